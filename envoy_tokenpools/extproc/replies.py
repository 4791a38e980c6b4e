"""
What we answer Envoy, as bytes. Constant replies are serialized once from the full `envoy_data_plane` types.

Each message gets exactly one reply of its own kind. Headers are written as `raw_value` with an explicit append action
(the default appends). Replies that carry values are encoded here field by field; tests hold them equal to the full
types.
"""

from collections.abc import Iterable
from functools import lru_cache

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


def request_headers_unread(*, remove_headers: Iterable[str]) -> bytes:
    """Continue without sending us the request's body; the response is sent."""
    return bytes(
        ext_proc.ProcessingResponse(
            request_headers=ext_proc.HeadersResponse(
                response=ext_proc.CommonResponse(
                    header_mutation=ext_proc.HeaderMutation(remove_headers=list(remove_headers))
                )
            ),
            mode_override=ext_proc_filter.ProcessingMode(
                request_body_mode=_Mode.NONE,
                response_header_mode=_Header.SEND,
                response_body_mode=_Mode.STREAMED,
            ),
        )
    )


def request_body_with(
    body: bytes | None, *, set_headers: Headers = (), remove_headers: Iterable[str] = ()
) -> bytes:
    """Continue with the request, with another body unless None."""
    common = _field(2, _mutation(set_headers, remove_headers))
    if body is not None:
        common += _field(3, _body_mutation(body))
    return _field(3, _field(1, common))


def response_headers_with(set_headers: Headers, remove_headers: Iterable[str] = ()) -> bytes:
    """Continue with the response's headers, changed."""
    return _field(2, _field(1, _field(2, _mutation(set_headers, remove_headers))))


def response_body_with(body: bytes) -> bytes:
    """Continue with another piece of the response's body, which may be empty."""
    return _field(4, _field(1, _field(3, _body_mutation(body))))


def message_timeout(timeout_ms: int) -> bytes:
    """
    Have Envoy wait this long, from now on, for the reply to the message that it sent last.

    Envoy hears it once per message, and only up to the filter's `max_message_timeout`; without one it does not at all.
    """
    seconds, rest_ms = divmod(timeout_ms, 1_000)
    return _field(10, b"\x08" + _varint(seconds) + b"\x10" + _varint(rest_ms * 1_000_000))


def immediate(answer: Answer, request_id: str = "") -> bytes:
    """Answer the client ourselves, and say by which id it can be asked about; the request goes no further."""
    status = _field(1, b"\x08" + _varint(answer.status))
    mutation = _mutation(answer.headers)
    if request_id:
        # None of these comes twice: they would only drive others from the cache.
        mutation += _encoded_header("x-request-id", request_id)
    headers = _field(2, mutation)
    details = _field(5, b"tokenpools")
    return _field(7, status + headers + _field(3, answer.body) + details)


def _mutation(set_headers: Headers, remove_headers: Iterable[str] = ()) -> bytes:
    """A `HeaderMutation`."""
    set_ = b"".join([_set_header(name, value) for name, value in set_headers])
    return set_ + b"".join(_field(2, name.encode("ascii")) for name in remove_headers)


def _encoded_header(name: str, value: str) -> bytes:
    """One header to set."""
    header = _field(1, name.encode("ascii")) + _field(3, value.encode("latin-1"))
    return _field(1, _field(1, header) + _APPEND_ACTION)


# Most headers say the same again: limits, policies, times of nothing to wait for.
_set_header = lru_cache(maxsize=1_024)(_encoded_header)


def _body_mutation(body: bytes) -> bytes:
    """A `BodyMutation`; an empty body is cleared, for an absent one would change nothing."""
    return _field(1, body) if body else _CLEAR_BODY


def _field(number: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    size = len(payload)
    if size <= 0x7F:
        return bytes((number << 3 | 2, size)) + payload
    return bytes((number << 3 | 2,)) + _varint(size) + payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_APPEND_ACTION = bytes((3 << 3, OVERWRITE_IF_EXISTS_OR_ADD))
_CLEAR_BODY = bytes((2 << 3, 1))
