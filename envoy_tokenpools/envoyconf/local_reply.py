"""
Envoy's own refusals in the shape that OpenAI's clients read, instead of plain text or nothing.

The filter's answers are local replies too, so each mapper looks at Envoy's reason for the reply
(`response code details`), which the filter's answers never share.
"""

from envoy_data_plane.envoy.config.accesslog.v3 import (
    AccessLogFilter,
    ExtensionFilter,
    ResponseFlagFilter,
)
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

UPSTREAM_FLAGS = ("UF", "UC", "UH", "UO", "UR", "UT", "LR", "SI")
"""Response flags of a backend that could not be reached or broke off before it answered."""


def local_replies() -> LocalReplyConfig:
    """Bodies for an unreachable filter, an oversized request and an unreachable backend."""
    return LocalReplyConfig(
        mappers=[
            _mapper(
                _details("ext_proc_error"),
                message="Admission control is not available at the moment. Please try again.",
                kind="server_error",
                code="admission_unavailable",
                retry_after_s=1,
            ),
            _mapper(
                _details("request_payload_too_large"),
                message="The request body is larger than this gateway accepts.",
                kind="invalid_request_error",
                code="request_too_large",
            ),
            _mapper(
                AccessLogFilter(response_flag_filter=ResponseFlagFilter(flags=[*UPSTREAM_FLAGS])),
                message="The model's backend did not answer. Please try again.",
                kind="server_error",
                code="backend_unavailable",
                retry_after_s=1,
            ),
        ]
    )


def _details(prefix: str) -> AccessLogFilter:
    """Matches replies whose reason starts with `prefix`."""
    expression = f"response.code_details.startsWith('{prefix}')"
    return AccessLogFilter(
        extension_filter=ExtensionFilter(
            name="envoy.access_loggers.extension_filters.cel",
            typed_config=Any.pack(ExpressionFilter(expression=expression)),
        )
    )


def _mapper(
    matching: AccessLogFilter,
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
        filter=matching,
        body_format_override=SubstitutionFormatString(
            json_format=Struct.from_dict({"error": error})
        ),
        headers_to_add=headers,
    )
