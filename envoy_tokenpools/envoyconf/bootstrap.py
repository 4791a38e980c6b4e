"""
A complete Envoy bootstrap: one listener, the filter, one backend.
"""

from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
from envoy_data_plane.envoy.config.core.v3 import Address, SocketAddress
from envoy_data_plane.envoy.config.overload.v3 import OverloadManager, ResourceMonitor
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import (
    DownstreamConnectionsConfig,
)
from envoy_data_plane.google.protobuf import Any

from envoy_tokenpools.envoyconf.cluster import backend_cluster, ext_proc_cluster
from envoy_tokenpools.envoyconf.listener import listener
from envoy_tokenpools.envoyconf.options import EnvoyOptions


def build_bootstrap(options: EnvoyOptions) -> Bootstrap:
    """The bootstrap that `options` describe; the same options always give the same message."""
    return Bootstrap(
        admin=_admin(options),
        overload_manager=_connection_limit(options.max_streams),
        static_resources=BootstrapStaticResources(
            listeners=[listener(options)],
            clusters=[backend_cluster(options), ext_proc_cluster(options)],
        ),
    )


def _admin(options: EnvoyOptions) -> Admin | None:
    """The admin interface, reachable even when the connection limit is."""
    if options.admin_host is None:
        return None
    address = SocketAddress(address=options.admin_host, port_value=options.admin_port)
    return Admin(address=Address(socket_address=address), ignore_global_conn_limit=True)


def _connection_limit(connections: int) -> OverloadManager:
    """At most so many client connections; by default Envoy takes them until it fails."""
    return OverloadManager(
        resource_monitors=[
            ResourceMonitor(
                name="envoy.resource_monitors.global_downstream_max_connections",
                typed_config=Any.pack(
                    DownstreamConnectionsConfig(max_active_downstream_connections=connections)
                ),
            )
        ]
    )
