"""
The filter as an Istio EnvoyFilter, for a gateway that exists already.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from envoy_data_plane.envoy.config.listener.v3 import Filter, Listener
from envoy_data_plane.google.protobuf import Any

from envoy_tokenpools.envoyconf.cluster import ext_proc_cluster
from envoy_tokenpools.envoyconf.listener import (
    CONNECTION_MANAGER_NAME,
    ROUTER_NAME,
    http_filter,
    traffic_settings,
)
from envoy_tokenpools.envoyconf.options import FilterOptions
from envoy_tokenpools.envoyconf.render import to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class IstioGateway:
    """
    The gateway that the filter is put into.

    Attributes:
        namespace: where the gateway's pods run; an EnvoyFilter works in its own namespace.
        labels: labels of the gateway's pods.
        name: of the EnvoyFilter.
    """

    namespace: str = "istio-system"
    labels: Mapping[str, str]
    name: str = "tokenpools"


def istio_envoy_filter(options: FilterOptions, gateway: IstioGateway) -> dict[str, object]:
    """
    An EnvoyFilter that puts the filter before the router of a gateway.

    It also adds the filter's cluster, and raises the limits of the gateway that would end long
    streams or refuse large prompts.

    Routes need nothing: Istio sets no timeout unless a VirtualService or HTTPRoute does, and its
    circuit breakers are open unless a DestinationRule closes them.
    """
    connection_manager = {"name": CONNECTION_MANAGER_NAME}
    settings = Filter(
        name=CONNECTION_MANAGER_NAME, typed_config=Any.pack(traffic_settings(options))
    )
    buffer_limit = Listener(per_connection_buffer_limit_bytes=options.buffer_limit_bytes)
    return {
        "apiVersion": "networking.istio.io/v1alpha3",
        "kind": "EnvoyFilter",
        "metadata": {"name": gateway.name, "namespace": gateway.namespace},
        "spec": {
            "workloadSelector": {"labels": dict(gateway.labels)},
            "configPatches": [
                _patch("CLUSTER", "ADD", to_plain(ext_proc_cluster(options))),
                _patch("LISTENER", "MERGE", to_plain(buffer_limit)),
                _patch("NETWORK_FILTER", "MERGE", to_plain(settings), connection_manager),
                _patch(
                    "HTTP_FILTER",
                    "INSERT_BEFORE",
                    to_plain(http_filter(options)),
                    {**connection_manager, "subFilter": {"name": ROUTER_NAME}},
                ),
            ],
        },
    }


def _patch(
    apply_to: str,
    operation: str,
    value: Mapping[str, object],
    network_filter: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """One entry of `configPatches`, for gateways only."""
    match: dict[str, object] = {"context": "GATEWAY"}
    if network_filter is not None:
        match["listener"] = {"filterChain": {"filter": dict(network_filter)}}
    return {
        "applyTo": apply_to,
        "match": match,
        "patch": {"operation": operation, "value": dict(value)},
    }
