"""
The listener that clients connect to: HTTP connection manager, routes and access log.
"""

import re
from datetime import timedelta

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import (
    HeaderMutation as HeaderMutationAction,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    Http2ProtocolOptions,
    SocketAddress,
    SubstitutionFormatString,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route.v3 import (
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.access_loggers.stream.v3 import StdoutAccessLog
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerPathWithEscapedSlashesAction,
    HttpConnectionManagerServerHeaderTransformation,
    HttpConnectionManagerUpgradeConfig,
    HttpFilter,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation,
)
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher
from envoy_data_plane.google.protobuf import Any, Struct

from envoy_tokenpools.envoyconf.cluster import BACKEND_CLUSTER
from envoy_tokenpools.envoyconf.filter import FILTER_NAME, external_processor, unbuffered
from envoy_tokenpools.envoyconf.local_reply import local_replies
from envoy_tokenpools.envoyconf.options import EnvoyOptions, FilterOptions

LISTENER_NAME = "tokenpools"
ROUTER_NAME = "envoy.filters.http.router"
CONNECTION_MANAGER_NAME = "envoy.filters.network.http_connection_manager"

MAX_CONCURRENT_STREAMS = 1_024
"""HTTP/2 streams that one client connection may hold; a client that wants more opens another."""

_LARGEST_WINDOW = (1 << 31) - 1

STRIPPED_PREFIXES = (
    "x-tokenpools-",  # ours: only the filter may set them
    "x-llm-d-inference-",  # priority and fairness as the engine reads them
    "x-gateway-inference-",  # the older spelling
    # Retries and timeouts: one metered request could become many. Envoy takes them off by itself
    # only where it holds the client for an external one.
    "x-envoy-retry-",
    "x-envoy-max-retries",
    "x-envoy-hedge-",
    "x-envoy-upstream-rq-",
)
"""Request headers that a client may not set, removed before any filter runs."""

REQUEST_HEADERS_TIMEOUT_S = 15
"""How long a client may take to send the headers of a request."""

UNBUFFERED_PATHS = (
    "/v1/(files|uploads|audio/(transcriptions|translations)|images/(edits|variations)|realtime)"
    "(/.*)?"
)
"""
Uploads that may be larger than `max_body_bytes`, and websockets, which never end: nothing of their
bodies is buffered. Whether they are metered is still the filter's decision, from their headers.
"""

_ACCESS_LOG_FIELDS = {
    "time": "%START_TIME%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ)%",
    "protocol": "%PROTOCOL%",
    "status": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "duration_ms": "%DURATION%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "upstream": "%UPSTREAM_HOST%",
}


def listener(options: EnvoyOptions) -> Listener:
    """The listener with its one HTTP filter chain: ext_proc, then the router."""
    return Listener(
        name=LISTENER_NAME,
        address=Address(
            socket_address=SocketAddress(
                address=options.listen_host, port_value=options.listen_port
            )
        ),
        # A body above it is a 413 by Envoy before the filter sees it; the default is 1 MiB.
        per_connection_buffer_limit_bytes=options.buffer_limit_bytes,
        filter_chains=[
            FilterChain(
                filters=[
                    Filter(
                        name=CONNECTION_MANAGER_NAME,
                        typed_config=Any.pack(_connection_manager(options)),
                    )
                ]
            )
        ],
    )


def http_filter(options: FilterOptions) -> HttpFilter:
    """The ext_proc filter as an entry of an HTTP filter chain."""
    return HttpFilter(name=FILTER_NAME, typed_config=Any.pack(external_processor(options)))


def traffic_settings(options: FilterOptions) -> HttpConnectionManager:
    """The connection manager's settings that keep long streams alive and metering complete."""
    escaped = HttpConnectionManagerPathWithEscapedSlashesAction
    return HttpConnectionManager(
        # 5 min by default; a model may think longer than that before its first byte.
        stream_idle_timeout=timedelta(milliseconds=options.stream_idle_timeout_ms),
        # Off by default: clients that never finish their headers would hold connections for an hour.
        request_headers_timeout=timedelta(seconds=REQUEST_HEADERS_TIMEOUT_S),
        # The filter and the backend must agree on what the path is.
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action=escaped.UNESCAPE_AND_FORWARD,
        http2_protocol_options=Http2ProtocolOptions(
            max_concurrent_streams=MAX_CONCURRENT_STREAMS,
            # It is also what HTTP/2 streams may buffer, whatever the listener's limit.
            initial_stream_window_size=options.buffer_limit_bytes,
            initial_connection_window_size=min(options.buffer_limit_bytes * 2, _LARGEST_WINDOW),
        ),
        early_header_mutation_extensions=[
            TypedExtensionConfig(
                name="envoy.http.early_header_mutation.header_mutation",
                typed_config=Any.pack(
                    HeaderMutation(
                        mutations=[
                            HeaderMutationAction(
                                remove_on_match=HeaderMutationRemoveOnMatch(
                                    key_matcher=StringMatcher(prefix=prefix, ignore_case=True)
                                )
                            )
                            for prefix in STRIPPED_PREFIXES
                        ]
                    )
                ),
            )
        ],
    )


def _connection_manager(options: EnvoyOptions) -> HttpConnectionManager:
    """The whole connection manager of an Envoy of our own."""
    manager = traffic_settings(options)
    manager.stat_prefix = LISTENER_NAME
    manager.route_config = _routes(options)
    manager.http_filters = [
        http_filter(options),
        HttpFilter(
            name=ROUTER_NAME,
            # Nothing is added to the backend's answers.
            typed_config=Any.pack(Router(suppress_envoy_headers=True)),
        ),
    ]
    manager.upgrade_configs = [HttpConnectionManagerUpgradeConfig(upgrade_type="websocket")]
    manager.server_header_transformation = (
        HttpConnectionManagerServerHeaderTransformation.PASS_THROUGH
    )
    manager.use_remote_address = True
    manager.generate_request_id = True
    manager.preserve_external_request_id = True
    manager.local_reply_config = local_replies()
    manager.drain_timeout = timedelta(milliseconds=options.drain_timeout_ms)
    if options.access_log:
        manager.access_log = [_access_log()]
    return manager


def _routes(options: EnvoyOptions) -> RouteConfiguration:
    """One destination for everything: no timeout (15 s by default) and no retries."""
    backend = options.backend
    action = RouteAction(cluster=BACKEND_CLUSTER, timeout=timedelta(0))
    if backend.tls:
        # A public endpoint answers to its own name only. A plain backend keeps the client's,
        # so that its redirects lead back here and not past the metering.
        action.host_rewrite_literal = backend.authority
    return RouteConfiguration(
        name=LISTENER_NAME,
        virtual_hosts=[
            VirtualHost(
                name=BACKEND_CLUSTER,
                domains=["*"],
                routes=[
                    Route(
                        match=RouteMatch(
                            safe_regex=RegexMatcher(
                                regex=re.escape(options.path_prefix) + UNBUFFERED_PATHS
                            )
                        ),
                        route=action,
                        typed_per_filter_config={FILTER_NAME: Any.pack(unbuffered(options))},
                    ),
                    Route(match=RouteMatch(prefix="/"), route=action),
                ],
            )
        ],
    )


def _access_log() -> AccessLog:
    """One JSON line per request, without the query string, which may hold a key."""
    return AccessLog(
        name="envoy.access_loggers.stdout",
        typed_config=Any.pack(
            StdoutAccessLog(
                log_format=SubstitutionFormatString(
                    json_format=Struct.from_dict(_ACCESS_LOG_FIELDS)
                )
            )
        ),
    )
