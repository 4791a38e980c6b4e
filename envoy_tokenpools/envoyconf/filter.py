"""
The ext_proc filter: which messages of a request the server gets, and how long Envoy waits for it.
"""

from datetime import timedelta

from envoy_data_plane.envoy.config.core.v3 import (
    BackoffStrategy,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    RetryPolicy,
    RetryPolicyRetryHostPredicate,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    ExtProcOverrides,
    ExtProcPerRoute,
    HeaderForwardingRules,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.matcher.v3 import ListStringMatcher, StringMatcher
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Any

from envoy_tokenpools.envoyconf.options import FilterOptions, Profile

FILTER_NAME = "envoy.filters.http.ext_proc"
EXT_PROC_CLUSTER = "tokenpools_ext_proc"

FORWARDED_HEADERS = (
    ":method",
    ":path",
    ":status",
    "accept-encoding",
    "api-key",
    "authorization",
    "content-encoding",
    "content-length",
    "content-type",
    "upgrade",
    "x-api-key",
    "x-forwarded-client-cert",
    "x-request-id",
    "x-stainless-retry-count",
)
"""
Headers of requests and responses that the server reads. All others stay in Envoy: each one costs
the server time, and cookies and tokens that it does not need are none of its business.
"""


def external_processor(options: FilterOptions) -> ExternalProcessor:
    """The filter's configuration for the chosen profile."""
    return ExternalProcessor(
        grpc_service=GrpcService(
            envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=EXT_PROC_CLUSTER),
            retry_policy=_another_worker() if options.workers > 1 else None,
        ),
        processing_mode=_PROCESSING_MODES[options.profile],
        # Traffic that nobody meters must not pass; the default status would be a bare 500.
        failure_mode_allow=False,
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
        # 200 ms by default: too short for a long prompt.
        message_timeout=timedelta(milliseconds=options.message_timeout_ms),
        # 0 by default, which ignores `override_message_timeout`: a waiting request would fail.
        max_message_timeout=timedelta(milliseconds=options.max_message_timeout_ms),
        # Without it Envoy ignores `mode_override` silently, and uploads would be buffered.
        allow_mode_override=True,
        forward_rules=_forward_rules(options.forwarded_headers),
        # A namespace that is not named here is dropped silently.
        metadata_options=_metadata_options(options.metadata_namespaces),
        # Else STREAMED takes the length off every response; the server never changes one's body
        # without taking the length off itself.
        allow_content_length_header=options.keep_content_length,
    )


def unbuffered(options: FilterOptions) -> ExtProcPerRoute:
    """
    The filter's settings for a route whose request bodies the server does not read.

    The server may answer a request-headers message with `mode_override` NONE on any route, but
    until that answer is there Envoy buffers, and refuses with 413 what outgrows the buffer in the
    meantime. A large upload is safe only where NONE is the mode from the start.
    """
    mode = _PROCESSING_MODES[options.profile]
    return ExtProcPerRoute(
        overrides=ExtProcOverrides(
            processing_mode=ProcessingMode(
                request_header_mode=mode.request_header_mode,
                request_body_mode=ProcessingModeBodySendMode.NONE,
                request_trailer_mode=mode.request_trailer_mode,
                response_header_mode=mode.response_header_mode,
                response_body_mode=mode.response_body_mode,
                response_trailer_mode=mode.response_trailer_mode,
            )
        )
    )


def _another_worker() -> RetryPolicy:
    """
    Asks another worker where one is gone before it has answered anything.

    Once a worker has said a word about a request, nobody else is asked: nothing is decided twice.
    """
    return RetryPolicy(
        retry_on="connect-failure,refused-stream,reset",
        num_retries=3,
        # A whole second by default, half of it on average.
        retry_back_off=BackoffStrategy(
            base_interval=timedelta(milliseconds=10), max_interval=timedelta(milliseconds=100)
        ),
        retry_host_predicate=[
            RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts",
                typed_config=Any.pack(PreviousHostsPredicate()),
            )
        ],
        # The dead one, at which nothing is open, is picked three times of four where there are two.
        host_selection_retry_max_attempts=20,
    )


def _forward_rules(extra: tuple[str, ...]) -> HeaderForwardingRules:
    """Rules that forward the headers needed, and those the operator names."""
    names = sorted({*FORWARDED_HEADERS, *(name.lower() for name in extra)})
    return HeaderForwardingRules(
        allowed_headers=ListStringMatcher(patterns=[StringMatcher(exact=name) for name in names])
    )


def _metadata_options(namespaces: tuple[str, ...]) -> MetadataOptions | None:
    """Forwards the metadata of other filters, such as verified claims."""
    if not namespaces:
        return None
    untyped = MetadataOptionsMetadataNamespaces(untyped=list(namespaces))
    return MetadataOptions(forwarding_namespaces=untyped)


_PROCESSING_MODES = {
    Profile.PORTABLE: ProcessingMode(
        request_header_mode=ProcessingModeHeaderSendMode.SEND,
        # STREAMED would send bytes to the backend before there is a verdict.
        request_body_mode=ProcessingModeBodySendMode.BUFFERED,
        request_trailer_mode=ProcessingModeHeaderSendMode.SKIP,
        response_header_mode=ProcessingModeHeaderSendMode.SEND,
        response_body_mode=ProcessingModeBodySendMode.STREAMED,
        response_trailer_mode=ProcessingModeHeaderSendMode.SKIP,
    ),
}
