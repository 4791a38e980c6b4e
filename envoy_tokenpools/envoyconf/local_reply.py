"""
Envoy's own refusals in the shape that OpenAI's clients read, instead of plain text or nothing.

The filter's answers are local replies too, so each mapper looks at Envoy's reason for the reply
(`response code details`), which the filter's answers never share.
"""

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLogFilter, ExtensionFilter
from envoy_data_plane.envoy.config.core.v3 import (
    HeaderValue,
    HeaderValueOption,
    SubstitutionFormatString,
)
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    LocalReplyConfig,
    ResponseMapper,
)
from envoy_data_plane.google.protobuf import Any, Struct

_FILTER_FAILED = ("ext_proc_error",)
_TOO_LARGE = ("request_payload_too_large",)
_BACKEND_FAILED = ("upstream_", "no_healthy_upstream", "stream_idle_timeout")


def local_replies() -> LocalReplyConfig:
    """Bodies for an unreachable filter, an oversized request and an unreachable backend."""
    return LocalReplyConfig(
        mappers=[
            _mapper(
                _FILTER_FAILED,
                message="Admission control is not available at the moment. Please try again.",
                kind="server_error",
                code="admission_unavailable",
                retry_after_s=1,
            ),
            _mapper(
                _TOO_LARGE,
                message="The request body is larger than this gateway accepts.",
                kind="invalid_request_error",
                code="request_too_large",
            ),
            _mapper(
                _BACKEND_FAILED,
                message="The model's backend did not answer. Please try again.",
                kind="server_error",
                code="backend_unavailable",
                retry_after_s=1,
            ),
        ]
    )


def _because(reasons: tuple[str, ...]) -> AccessLogFilter:
    """Matches replies whose reason starts with one of `reasons`."""
    expression = " || ".join(f"response.code_details.startsWith('{reason}')" for reason in reasons)
    return AccessLogFilter(
        extension_filter=ExtensionFilter(
            name="envoy.access_loggers.extension_filters.cel",
            typed_config=Any.pack(ExpressionFilter(expression=expression)),
        )
    )


def _mapper(
    reasons: tuple[str, ...],
    *,
    message: str,
    kind: str,
    code: str,
    retry_after_s: int | None = None,
) -> ResponseMapper:
    """An OpenAI error object as JSON; the status stays Envoy's."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    headers = []
    if retry_after_s is not None:
        header = HeaderValue(key="retry-after", value=str(retry_after_s))
        headers.append(HeaderValueOption(header=header))
    return ResponseMapper(
        filter=_because(reasons),
        body_format_override=SubstitutionFormatString(
            json_format=Struct.from_dict({"error": error})
        ),
        headers_to_add=headers,
    )
