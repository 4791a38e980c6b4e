"""The settings without which something fails only in production."""

from collections.abc import Mapping
from typing import Any

import pytest
from envoy_data_plane.envoy.config.cluster.v3 import Cluster
from pydantic import ValidationError

from envoy_tokenpools.envoyconf.bootstrap import build_bootstrap
from envoy_tokenpools.envoyconf.filter import FORWARDED_HEADERS
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from envoy_tokenpools.envoyconf.render import to_plain


def _build(backend_url: str = "http://vllm:8000", **options: Any) -> Mapping[str, Any]:
    return to_plain(build_bootstrap(EnvoyOptions(backend_url=backend_url, **options)))


def _listener(**options: Any) -> Mapping[str, Any]:
    listener: Mapping[str, Any] = _build(**options)["static_resources"]["listeners"][0]
    return listener


def _connection_manager(**options: Any) -> Mapping[str, Any]:
    config: Mapping[str, Any] = _listener(**options)["filter_chains"][0]["filters"][0][
        "typed_config"
    ]
    return config


def _ext_proc(**options: Any) -> Mapping[str, Any]:
    config: Mapping[str, Any] = _connection_manager(**options)["http_filters"][0]["typed_config"]
    return config


def _clusters(**options: Any) -> list[Mapping[str, Any]]:
    clusters: list[Mapping[str, Any]] = _build(**options)["static_resources"]["clusters"]
    return clusters


def test_a_field_that_envoy_does_not_have_cannot_be_written() -> None:
    """The typed messages refuse unknown names."""
    with pytest.raises(ValidationError, match="circuit_breaker"):
        Cluster(name="x", circuit_breaker={})  # type: ignore[call-arg]


def test_portable_asks_for_what_is_metered_and_no_more() -> None:
    """Headers both ways, the whole request body, the response as it streams, no trailers."""
    assert _ext_proc()["processing_mode"] == {
        "request_header_mode": "SEND",
        "request_body_mode": "BUFFERED",
        "request_trailer_mode": "SKIP",
        "response_header_mode": "SEND",
        "response_body_mode": "STREAMED",
        "response_trailer_mode": "SKIP",
    }


def test_a_filter_that_fails_stops_traffic_with_503() -> None:
    """Nothing passes unmetered, and the status says that trying again may help."""
    filter_config = _ext_proc()
    assert not filter_config.get("failure_mode_allow", False)
    assert filter_config["status_on_error"] == {"code": "ServiceUnavailable"}


def test_a_request_may_wait_longer_than_one_message() -> None:
    """`override_message_timeout` is honoured only below a maximum above 0."""
    filter_config = _ext_proc(message_timeout_ms=1_500, max_message_timeout_ms=30_000)
    assert filter_config["message_timeout"] == "1.500s"
    assert filter_config["max_message_timeout"] == "30s"


def test_mode_overrides_are_honoured() -> None:
    """Without this Envoy ignores `mode_override` in silence."""
    assert _ext_proc()["allow_mode_override"] is True


def test_only_needed_headers_leave_envoy() -> None:
    """The operator may add names; they are matched as Envoy has them, in lower case."""
    patterns = _ext_proc(forwarded_headers=("X-Team",))["forward_rules"]["allowed_headers"]
    assert {each["exact"] for each in patterns["patterns"]} == {*FORWARDED_HEADERS, "x-team"}


@pytest.mark.parametrize("max_body_bytes", [1_024, 8 << 20, 1 << 30])
def test_every_buffer_holds_the_largest_body(max_body_bytes: int) -> None:
    """HTTP/2 buffers by window, HTTP/1 by the listener's limit; both are raised."""
    http2 = _connection_manager(max_body_bytes=max_body_bytes)["http2_protocol_options"]
    limit = _listener(max_body_bytes=max_body_bytes)["per_connection_buffer_limit_bytes"]
    assert limit > max_body_bytes
    assert http2["initial_stream_window_size"] == limit
    assert limit <= http2["initial_connection_window_size"] < 1 << 31


def test_both_clusters_allow_every_stream() -> None:
    """Each LLM stream holds one request on the backend and one on the filter."""
    for cluster in _clusters(max_streams=5_000):
        assert cluster["circuit_breakers"]["thresholds"] == [
            {"max_connections": 5_000, "max_pending_requests": 5_000, "max_requests": 5_000}
        ]


def test_long_streams_are_not_cut() -> None:
    """The route has no timeout and silence is allowed for as long as was said."""
    manager = _connection_manager(stream_idle_timeout_ms=7_200_000)
    assert manager["stream_idle_timeout"] == "7200s"
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert {route["route"]["timeout"] for route in routes} == {"0s"}


def test_names_are_resolved_and_addresses_are_not() -> None:
    """IPv4 first, because `localhost` is often served on 127.0.0.1 only."""
    named, literal = _clusters(backend_url="http://localhost:8000")
    assert (named["type"], named["dns_lookup_family"]) == ("STRICT_DNS", "V4_PREFERRED")
    assert literal["type"] == "STATIC"
    assert "dns_lookup_family" not in literal


def test_tls_accepts_only_the_backends_own_name() -> None:
    """The name is the operator's, never the client's host header, and the host is rewritten."""
    backend = _clusters(backend_url="https://api.example.com", backend_ca_file="/ca.pem")[0]
    tls = backend["transport_socket"]["typed_config"]
    assert tls["sni"] == "api.example.com"
    assert tls["common_tls_context"]["validation_context"] == {
        "trusted_ca": {"filename": "/ca.pem"},
        "match_typed_subject_alt_names": [
            {"san_type": "DNS", "matcher": {"exact": "api.example.com"}}
        ],
    }
    manager = _connection_manager(backend_url="https://api.example.com")
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert {route["route"]["host_rewrite_literal"] for route in routes} == {"api.example.com"}


def test_tls_to_an_address_asks_for_no_name() -> None:
    """A server name indication is never an address."""
    backend = _clusters(backend_url="https://10.0.0.7:8443")[0]
    tls = backend["transport_socket"]["typed_config"]
    assert "sni" not in tls
    names = tls["common_tls_context"]["validation_context"]["match_typed_subject_alt_names"]
    assert names == [{"san_type": "IP_ADDRESS", "matcher": {"exact": "10.0.0.7"}}]


def test_a_plain_backend_sees_the_clients_host() -> None:
    """Else its redirects would lead clients past the metering."""
    routes = _connection_manager()["route_config"]["virtual_hosts"][0]["routes"]
    assert all("host_rewrite_literal" not in route["route"] for route in routes)


def test_the_filter_may_be_behind_a_socket_file() -> None:
    """A path replaces host and port."""
    filter_cluster = _clusters(ext_proc_unix_path="/run/tokenpools.sock")[1]
    endpoint = filter_cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    assert endpoint == {"address": {"pipe": {"path": "/run/tokenpools.sock"}}}


def _ext_proc_endpoints(**options: Any) -> list[Mapping[str, Any]]:
    assignment = _clusters(**options)[1]["load_assignment"]
    return [each["endpoint"]["address"] for each in assignment["endpoints"][0]["lb_endpoints"]]


def test_each_worker_is_an_endpoint_of_its_own() -> None:
    """Ports follow on the first one; socket files have the worker's number."""
    ports = _ext_proc_endpoints(ext_proc_port=50_100, workers=3)
    assert ports == [
        {"socket_address": {"address": "127.0.0.1", "port_value": port}}
        for port in (50_100, 50_101, 50_102)
    ]
    files = _ext_proc_endpoints(ext_proc_unix_path="/run/x.sock", workers=2)
    assert files == [{"pipe": {"path": "/run/x.sock.0"}}, {"pipe": {"path": "/run/x.sock.1"}}]


def test_workers_of_a_name_are_resolved_and_of_an_address_are_not() -> None:
    """As of one filter."""
    assert _clusters(ext_proc_host="filter.example", workers=2)[1]["type"] == "STRICT_DNS"
    assert _ext_proc_endpoints(ext_proc_host="::1", workers=2)[1] == {
        "socket_address": {"address": "::1", "port_value": 50_052}
    }


def test_a_worker_that_is_gone_is_left_out_and_never_more_than_half_of_them() -> None:
    """Only for what Envoy itself meets: no answer of a worker ends in its ejection."""
    cluster = _clusters(workers=4, max_streams=5_000)[1]
    assert cluster["lb_policy"] == "LEAST_REQUEST"
    assert cluster["circuit_breakers"]["thresholds"][0]["max_retries"] == 5_000
    ejection = cluster["outlier_detection"]
    assert ejection["max_ejection_percent"] == 50
    assert ejection["split_external_local_origin_errors"] is True
    assert ejection["base_ejection_time"] == ejection["max_ejection_time"] == "1s"
    answers = {name: value for name, value in ejection.items() if name.startswith("enforcing")}
    assert set(answers.values()) == {0}


def test_another_worker_is_asked_only_before_the_first_has_answered() -> None:
    """None of the conditions is about an answer."""
    policy = _ext_proc(workers=2)["grpc_service"]["retry_policy"]
    assert set(policy["retry_on"].split(",")) == {"connect-failure", "refused-stream", "reset"}


def test_one_filter_is_neither_left_out_nor_asked_again() -> None:
    """There is nobody else."""
    assert "retry_policy" not in _ext_proc()["grpc_service"]
    cluster = _clusters()[1]
    assert "outlier_detection" not in cluster
    assert "max_retries" not in cluster["circuit_breakers"]["thresholds"][0]


def test_no_admin_unless_there_is_an_address_for_it() -> None:
    """The admin interface can be left out."""
    assert "admin" in _build()
    assert "admin" not in _build(admin_host=None)


def test_the_access_log_is_off_until_asked_for_and_has_no_query() -> None:
    """Query strings may hold keys."""
    assert "access_log" not in _connection_manager()
    (log,) = _connection_manager(access_log=True)["access_log"]
    assert log["typed_config"]["log_format"]["json_format"]["path"] == "%PATH(NQ)%"
