"""Messages become YAML as Envoy's documentation writes it."""

from datetime import timedelta

import yaml
from envoy_data_plane.envoy.config.bootstrap.v3 import Bootstrap
from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType, OutlierDetection
from envoy_data_plane.envoy.config.core.v3 import TransportSocket
from envoy_data_plane.envoy.config.route.v3 import RouteAction
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.google.protobuf import Any
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.envoyconf.bootstrap import build_bootstrap
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from envoy_tokenpools.envoyconf.render import render_yaml, to_plain


def test_fields_have_the_names_of_the_proto() -> None:
    """Digits inside a name do not split it."""
    cluster = Cluster(
        name="a",
        type=ClusterDiscoveryType.STRICT_DNS,
        outlier_detection=OutlierDetection(consecutive_5xx=3),
    )
    assert to_plain(cluster) == {
        "name": "a",
        "type": "STRICT_DNS",
        "outlier_detection": {"consecutive_5xx": 3},
    }


def test_an_any_has_its_fields_beside_its_type() -> None:
    """Nothing of a packed message is left in bytes."""
    socket = TransportSocket(name="x", typed_config=Any.pack(Router(suppress_envoy_headers=True)))
    assert to_plain(socket)["typed_config"] == {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router",
        "suppress_envoy_headers": True,
    }


def test_zero_is_written_where_it_was_set() -> None:
    """A timeout of 0 s switches the timeout off; leaving it out would mean 15 s."""
    assert to_plain(RouteAction(timeout=timedelta(0))) == {"timeout": "0s"}


@given(st.integers(0, 10**9))
def test_durations_are_exact(milliseconds: int) -> None:
    """A duration is seconds with an `s`, to the millisecond."""
    text = to_plain(RouteAction(timeout=timedelta(milliseconds=milliseconds)))["timeout"]
    assert isinstance(text, str)
    assert text.endswith("s")
    assert round(float(text[:-1]) * 1_000) == milliseconds


def test_the_text_means_the_message() -> None:
    """Reading the YAML back gives the same bootstrap."""
    bootstrap = build_bootstrap(EnvoyOptions(backend_url="https://vllm:8443", access_log=True))
    text = render_yaml(to_plain(bootstrap), "one\n\ntwo")
    assert text.startswith("# one\n#\n# two\n")
    assert to_plain(Bootstrap.from_dict(yaml.safe_load(text))) == to_plain(bootstrap)


def test_the_same_options_give_the_same_text() -> None:
    """A generated file only changes when its options do."""
    options = EnvoyOptions(backend_url="http://vllm:8000", forwarded_headers=("b", "a"))
    first, second = (render_yaml(to_plain(build_bootstrap(options))) for _ in range(2))
    assert first == second
    assert "&" not in first
