"""
What we answer Envoy, as bytes. Constant replies are serialized once from the full `envoy_data_plane` types.

Each message gets exactly one reply of its own kind. Headers are written as `raw_value` with an explicit append action
(the default appends). Replies that carry values are encoded here field by field; tests hold them equal to the full
types.
"""

from collections.abc import Iterable

from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc_filter
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc

from envoy_tokenpools.openai.answers import Answer

Headers = Iterable[tuple[str, str]]

OVERWRITE_IF_EXISTS_OR_ADD = 2
"""`HeaderValueOption.HeaderAppendAction`."""

_Mode = ext_proc_filter.ProcessingModeBodySendMode
_Header = ext_proc_filter.ProcessingModeHeaderSendMode


def _continue() -> ext_proc.CommonResponse:
    return ext_proc.CommonResponse()


CONTINUE_REQUEST_HEADERS = bytes(
    ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse(response=_continue()))
)
CONTINUE_REQUEST_BODY = bytes(
    ext_proc.ProcessingResponse(request_body=ext_proc.BodyResponse(response=_continue()))
)
CONTINUE_REQUEST_TRAILERS = bytes(
    ext_proc.ProcessingResponse(request_trailers=ext_proc.TrailersResponse())
)
CONTINUE_RESPONSE_HEADERS = bytes(
    ext_proc.ProcessingResponse(response_headers=ext_proc.HeadersResponse(response=_continue()))
)
CONTINUE_RESPONSE_BODY = bytes(
    ext_proc.ProcessingResponse(response_body=ext_proc.BodyResponse(response=_continue()))
)
CONTINUE_RESPONSE_TRAILERS = bytes(
    ext_proc.ProcessingResponse(response_trailers=ext_proc.TrailersResponse())
)

PASS_UNMETERED = bytes(
    ext_proc.ProcessingResponse(
        request_headers=ext_proc.HeadersResponse(response=_continue()),
        mode_override=ext_proc_filter.ProcessingMode(
            request_body_mode=_Mode.NONE,
            response_header_mode=_Header.SKIP,
            response_body_mode=_Mode.NONE,
            request_trailer_mode=_Header.SKIP,
            response_trailer_mode=_Header.SKIP,
        ),
    )
)
"""Continue, and send us no more of this request: neither a large upload nor a websocket waits for us."""

BUFFER_REQUEST_BODY = bytes(
    ext_proc.ProcessingResponse(
        request_headers=ext_proc.HeadersResponse(response=_continue()),
        mode_override=ext_proc_filter.ProcessingMode(
            request_body_mode=_Mode.BUFFERED,
            response_header_mode=_Header.SEND,
            response_body_mode=_Mode.STREAMED,
        ),
    )
)
"""Continue, but send us the body: for a metered request on a route that is configured to keep its body from us."""

ADMIT_REQUEST_BODY = bytes(
    ext_proc.ProcessingResponse(
        request_body=ext_proc.BodyResponse(
            response=ext_proc.CommonResponse(
                header_mutation=ext_proc.HeaderMutation(remove_headers=["accept-encoding"])
            )
        )
    )
)
"""Continue; the backend must not compress what we have to count."""


def response_headers_with(headers: Headers) -> bytes:
    """Continue with the response's headers, setting `headers`."""
    mutation = _field(2, _set_headers(headers))
    return _field(2, _field(1, mutation))


def immediate(answer: Answer) -> bytes:
    """Answer the client ourselves; the request goes no further."""
    status = _field(1, b"\x08" + _varint(answer.status))
    headers = _field(2, _set_headers(answer.headers))
    details = _field(5, b"tokenpools")
    return _field(7, status + headers + _field(3, answer.body) + details)


def _set_headers(headers: Headers) -> bytes:
    return b"".join(
        _field(
            1,
            _field(1, _field(1, name.encode("ascii")) + _field(3, value.encode("latin-1")))
            + _APPEND_ACTION,
        )
        for name, value in headers
    )


def _field(number: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    return bytes((number << 3 | 2,)) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_APPEND_ACTION = bytes((3 << 3, OVERWRITE_IF_EXISTS_OR_ADD))
