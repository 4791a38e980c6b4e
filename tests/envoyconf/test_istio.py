"""The EnvoyFilter patches a gateway as Istio reads it."""

from collections.abc import Mapping
from typing import Any

from envoy_tokenpools.envoyconf.bootstrap import build_bootstrap
from envoy_tokenpools.envoyconf.istio import IstioGateway, istio_envoy_filter
from envoy_tokenpools.envoyconf.options import EnvoyOptions, FilterOptions
from envoy_tokenpools.envoyconf.render import to_plain


def _patches(options: FilterOptions) -> dict[str, Mapping[str, Any]]:
    gateway = IstioGateway(namespace="edge", labels={"app": "gw"}, name="pools")
    document: Mapping[str, Any] = istio_envoy_filter(options, gateway)
    return {patch["applyTo"]: patch for patch in document["spec"]["configPatches"]}


def test_it_selects_the_gateway_it_was_given() -> None:
    """Name, namespace and labels are the parameters'."""
    gateway = IstioGateway(namespace="edge", labels={"app": "gw"}, name="pools")
    document: Mapping[str, Any] = istio_envoy_filter(FilterOptions(), gateway)
    assert document["metadata"] == {"name": "pools", "namespace": "edge"}
    assert document["spec"]["workloadSelector"] == {"labels": {"app": "gw"}}
    contexts = {patch["match"]["context"] for patch in document["spec"]["configPatches"]}
    assert contexts == {"GATEWAY"}


def test_the_filter_stands_before_the_router() -> None:
    """The whole chain in front of it, authentication too, runs first."""
    patch = _patches(FilterOptions())["HTTP_FILTER"]
    assert patch["patch"]["operation"] == "INSERT_BEFORE"
    assert patch["match"]["listener"]["filterChain"]["filter"] == {
        "name": "envoy.filters.network.http_connection_manager",
        "subFilter": {"name": "envoy.filters.http.router"},
    }


def test_filter_and_cluster_are_those_of_a_bootstrap() -> None:
    """There is one definition of either."""
    options = FilterOptions(ext_proc_host="pools.pools.svc", ext_proc_port=9002)
    patches = _patches(options)
    whole: Mapping[str, Any] = to_plain(
        build_bootstrap(
            EnvoyOptions(
                backend_url="http://x", ext_proc_host="pools.pools.svc", ext_proc_port=9002
            )
        )
    )
    resources = whole["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    assert patches["CLUSTER"]["patch"]["value"] == resources["clusters"][1]
    assert patches["HTTP_FILTER"]["patch"]["value"] == manager["http_filters"][0]


def test_limits_that_end_streams_or_refuse_prompts_are_merged() -> None:
    """Buffer, windows and idle timeout of the gateway are raised."""
    patches = _patches(FilterOptions(max_body_bytes=1 << 20, stream_idle_timeout_ms=60_000))
    limit = patches["LISTENER"]["patch"]["value"]["per_connection_buffer_limit_bytes"]
    settings = patches["NETWORK_FILTER"]["patch"]["value"]["typed_config"]
    assert limit > 1 << 20
    assert settings["http2_protocol_options"]["initial_stream_window_size"] == limit
    assert settings["stream_idle_timeout"] == "60s"
    assert {patches[name]["patch"]["operation"] for name in ("LISTENER", "NETWORK_FILTER")} == {
        "MERGE"
    }
