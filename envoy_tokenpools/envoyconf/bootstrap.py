"""
A complete Envoy bootstrap: one listener, the filter, one backend.
"""

from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
from envoy_data_plane.envoy.config.core.v3 import Address, SocketAddress

from envoy_tokenpools.envoyconf.cluster import backend_cluster, ext_proc_cluster
from envoy_tokenpools.envoyconf.listener import listener
from envoy_tokenpools.envoyconf.options import EnvoyOptions


def build_bootstrap(options: EnvoyOptions) -> Bootstrap:
    """The bootstrap that `options` describe; the same options always give the same message."""
    admin = None
    if options.admin_host is not None:
        address = SocketAddress(address=options.admin_host, port_value=options.admin_port)
        admin = Admin(address=Address(socket_address=address))
    return Bootstrap(
        admin=admin,
        static_resources=BootstrapStaticResources(
            listeners=[listener(options)],
            clusters=[backend_cluster(options), ext_proc_cluster(options)],
        ),
    )
