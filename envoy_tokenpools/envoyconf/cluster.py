"""
The two clusters: the backend and the filter's gRPC server.
"""

from collections.abc import Sequence
from datetime import timedelta

from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterDiscoveryType,
    ClusterDnsLookupFamily,
    ClusterLbPolicy,
    OutlierDetection,
    UpstreamConnectionOptions,
)
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    DataSource,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    Pipe,
    SocketAddress,
    TcpKeepalive,
    TransportSocket,
)
from envoy_data_plane.envoy.config.core.v3 import HttpProtocolOptions as CommonHttpProtocolOptions
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    SubjectAltNameMatcher,
    SubjectAltNameMatcherSanType,
    UpstreamTlsContext,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions,
    HttpProtocolOptionsAutoHttpConfig,
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any

from envoy_tokenpools.envoyconf.filter import EXT_PROC_CLUSTER
from envoy_tokenpools.envoyconf.options import (
    Backend,
    EnvoyOptions,
    FilterOptions,
    is_ip_literal,
)

BACKEND_CLUSTER = "backend"

BACKEND_IDLE_TIMEOUT_MS = 4_000
"""
How long an idle connection to the backend is kept: less than the 5 s after which uvicorn, and so
vLLM and SGLang, closes it, else a request now and then meets a connection that is just closing.
"""

EJECTION_MS = 1_000
"""How long a worker that cannot be reached is left out; one that died is back in two seconds or so."""

_HTTP_PROTOCOL_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def backend_cluster(options: EnvoyOptions) -> Cluster:
    """The cluster of the LLM backend: HTTP/1.1, or what ALPN agrees on under TLS."""
    backend = options.backend
    protocol = HttpProtocolOptions(
        common_http_protocol_options=CommonHttpProtocolOptions(
            idle_timeout=timedelta(milliseconds=BACKEND_IDLE_TIMEOUT_MS)
        )
    )
    if backend.tls:
        protocol.auto_config = HttpProtocolOptionsAutoHttpConfig(
            http_protocol_options=Http1ProtocolOptions(),
            http2_protocol_options=Http2ProtocolOptions(),
        )
    else:
        protocol.explicit_http_config = HttpProtocolOptionsExplicitHttpConfig(
            http_protocol_options=Http1ProtocolOptions()
        )
    cluster = _cluster(
        BACKEND_CLUSTER, [_socket_address(backend.host, backend.port)], protocol, options
    )
    cluster.connect_timeout = timedelta(seconds=5)
    if backend.tls:
        cluster.transport_socket = _tls_socket(backend, options.backend_ca_file)
    return cluster


def ext_proc_cluster(options: FilterOptions) -> Cluster:
    """
    The cluster of the filter's gRPC server, or of its workers.

    One server has no health check, no outlier detection and no retries: Envoy connects anew for
    the next request, so a filter that came back is used at once. Dead peers are found by TCP
    keepalive and not by HTTP/2 pings, which a gRPC server with default options punishes by ending
    the connection and every request on it.

    Of several workers one that cannot be reached is left out for a moment, and its requests are
    tried at the others (`filter.external_processor`). The least busy one gets the next request:
    their work is the streams that are open, of which each worker gets its share by this alone.
    """
    protocol = HttpProtocolOptions(
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
            # Each LLM stream holds one gRPC stream to its end; the default is 1024 a connection.
            http2_protocol_options=Http2ProtocolOptions(max_concurrent_streams=options.max_streams)
        )
    )
    addresses = [_ext_proc_address(address) for address in options.ext_proc_addresses]
    cluster = _cluster(EXT_PROC_CLUSTER, addresses, protocol, options)
    cluster.connect_timeout = timedelta(seconds=1)
    if len(addresses) > 1:
        cluster.outlier_detection = _unreachable_workers()
        if cluster.circuit_breakers is not None:
            # 3 by default; more requests than that meet a worker that has just died.
            cluster.circuit_breakers.thresholds[0].max_retries = options.max_streams
    return cluster


def _ext_proc_address(address: str) -> Address:
    """From `host:port` or `unix:/path`."""
    if address.startswith("unix:"):
        return Address(pipe=Pipe(path=address.removeprefix("unix:")))
    host, _, port = address.rpartition(":")
    return _socket_address(host, int(port))


def _unreachable_workers() -> OutlierDetection:
    """
    Leaves out what cannot be connected to or breaks off, and nothing else.

    Where more than half of the workers are gone nobody is left out any more. What a worker answers
    is no sign: a refusal is not a failure.
    """
    moment = timedelta(milliseconds=EJECTION_MS)
    return OutlierDetection(
        interval=moment / 2,
        base_ejection_time=moment,
        max_ejection_time=moment,
        max_ejection_percent=50,
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=1,
        enforcing_local_origin_success_rate=0,
        enforcing_consecutive_5xx=0,
        enforcing_success_rate=0,
    )


def _cluster(
    name: str, addresses: Sequence[Address], protocol: HttpProtocolOptions, options: FilterOptions
) -> Cluster:
    """A cluster of these addresses of one host, with breakers that allow `max_streams` of everything."""
    limit = options.max_streams
    socket_address = addresses[0].socket_address
    host = socket_address.address if socket_address is not None else None
    cluster = Cluster(
        name=name,
        type=ClusterDiscoveryType.STATIC,
        lb_policy=ClusterLbPolicy.LEAST_REQUEST,
        load_assignment=ClusterLoadAssignment(
            cluster_name=name,
            endpoints=[
                LocalityLbEndpoints(
                    lb_endpoints=[
                        LbEndpoint(endpoint=Endpoint(address=address)) for address in addresses
                    ]
                )
            ],
        ),
        # 1024 by default, and each LLM stream holds one on both clusters.
        circuit_breakers=CircuitBreakers(
            thresholds=[
                CircuitBreakersThresholds(
                    max_connections=limit, max_pending_requests=limit, max_requests=limit
                )
            ]
        ),
        upstream_connection_options=UpstreamConnectionOptions(
            tcp_keepalive=TcpKeepalive(keepalive_time=30, keepalive_interval=5, keepalive_probes=3)
        ),
        typed_extension_protocol_options={_HTTP_PROTOCOL_OPTIONS: Any.pack(protocol)},
    )
    if host is not None and not is_ip_literal(host):
        cluster.type = ClusterDiscoveryType.STRICT_DNS
        # The default asks for IPv6 first, and `localhost` would miss a server on 127.0.0.1.
        cluster.dns_lookup_family = ClusterDnsLookupFamily.V4_PREFERRED
    return cluster


def _socket_address(host: str, port: int) -> Address:
    return Address(socket_address=SocketAddress(address=host, port_value=port))


def _tls_socket(backend: Backend, ca_file: str) -> TransportSocket:
    """
    TLS that accepts only the backend's own name.

    The name is fixed here and not taken from the client's `host` header (`auto_sni`), which would
    let a client choose which certificate is asked for.
    """
    san_type = (
        SubjectAltNameMatcherSanType.IP_ADDRESS
        if is_ip_literal(backend.host)
        else SubjectAltNameMatcherSanType.DNS
    )
    context = UpstreamTlsContext(
        # A server name is never an address (RFC 6066 section 3).
        sni="" if is_ip_literal(backend.host) else backend.host,
        common_tls_context=CommonTlsContext(
            validation_context=CertificateValidationContext(
                trusted_ca=DataSource(filename=ca_file),
                match_typed_subject_alt_names=[
                    SubjectAltNameMatcher(
                        san_type=san_type, matcher=StringMatcher(exact=backend.host)
                    )
                ],
            )
        ),
    )
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=Any.pack(context))
