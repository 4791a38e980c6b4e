"""
What Envoy sends, as bytes on the wire, and what kind of message some bytes are.
"""

import gzip
from collections.abc import Iterator

from envoy_tokenpools.extproc.wire import ProcessingRequest
from tests.support import captures, extproc
from tests.support.extproc import BodyMode, Message, chat, head_attributes
from tests.support.streams import S

KINDS = (
    "request_headers",
    "response_headers",
    "request_body",
    "response_body",
    "request_trailers",
    "response_trailers",
)
"""The kinds of messages, each with a reply of the same name."""

REPLY_KINDS = {
    1: "request_headers",
    2: "response_headers",
    3: "request_body",
    4: "response_body",
    5: "request_trailers",
    6: "response_trailers",
    7: "immediate_response",
}
"""`ProcessingResponse.response`, by the number of its field."""

_ZIPPED = ("content-encoding", "gzip")
_STREAMING = chat(stream=True)
_BATCH = b'{"model":"m","prompt":["a b","c"],"n":2,"max_tokens":5,"stream":true,"priority":9}'
_MESSAGES = b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"hi"}]}'
_BODY_ANSWER = captures.load("chat_nonstream").body

_REQUEST_HEADERS = (
    extproc.post_rh(),
    extproc.post_rh(extproc.CHAT, key="key-b"),
    extproc.post_rh("/v1/completions", key="key-c"),
    extproc.post_rh("/v1/audio/transcriptions"),
    extproc.post_rh("/team" + extproc.CHAT),
    extproc.post_rh("/v1/chat/completions/?x=1", _ZIPPED),
    extproc.with_protocol(extproc.post_rh(), BodyMode.BUFFERED, BodyMode.STREAMED),
    extproc.with_protocol(extproc.post_rh(), BodyMode.NONE, BodyMode.NONE),
    extproc.with_protocol(extproc.post_rh(), BodyMode.STREAMED, BodyMode.STREAMED),
    extproc.post_rh(eos=True),
    extproc.post_rh(key=None),
    extproc.post_rh(extproc.CHAT, ("content-length", "9" * 40)),
    extproc.post_rh(extproc.CHAT, ("content-encoding", "lzma")),
    extproc.post_rh(extproc.CHAT, ("authorization", "Bearer b")),
    extproc.post_rh("/v1/messages"),
    extproc.observed(extproc.post_rh()),
    extproc.rh([(":method", "GET"), (":path", "/v1/models")], eos=True),
    extproc.rh([(":method", "POST"), (":path", "/unknown")]),
    extproc.rh(),
)
_REQUEST_BODIES = (
    *(extproc.rb(body) for body in (extproc.HI, _STREAMING, _BATCH, b"", b"\xff", b"x" * 2_000)),
    *(extproc.rb(body, eos=False) for body in (extproc.HI[:9], extproc.HI[9:], _STREAMING)),
    extproc.rb(_MESSAGES),
    extproc.rb(chat(n=3, max_tokens=20, priority=-1)),
    extproc.rb(chat("a word " * 60, max_tokens=50)),
    extproc.rb(chat("a word " * 60, max_tokens=4_000)),
    extproc.rb(gzip.compress(_STREAMING, mtime=0)),
    extproc.rb(gzip.compress(_STREAMING, mtime=0)[:-9]),
    extproc.rb(extproc.HI, given=head_attributes()),
    extproc.rb(_STREAMING, given=head_attributes(key="key-b")),
    extproc.rb(_STREAMING, given=head_attributes(content_encoding="gzip")),
    extproc.rb(extproc.HI, given=head_attributes("/health", None)),
    extproc.observed(extproc.rb(extproc.HI)),
)
_RESPONSE_HEADERS = (
    extproc.sh(200, "text/event-stream"),
    extproc.sh(200, "application/json"),
    extproc.sh(200, "text/event-stream", _ZIPPED),
    extproc.sh(200, None, ("content-encoding", "snappy")),
    extproc.sh(429, "application/json"),
    extproc.sh(500, None, eos=True),
    extproc.sh(200, "text/event-stream", eos=True),
    extproc.sh("odd", "text/event-stream"),
)
_ZIPPED_S = gzip.compress(S, mtime=0)
_RESPONSE_BODIES = (
    *(extproc.sb(piece) for piece in (S[:200], S[200:500], S[500:], S, b"", b"\xff\x00", b"\n\n")),
    *(extproc.sb(piece, eos=True) for piece in (S, S[500:], b"", _BODY_ANSWER)),
    *(extproc.sb(piece) for piece in (_BODY_ANSWER, _ZIPPED_S, _ZIPPED_S[:90], _ZIPPED_S[90:])),
    extproc.sb(S, given={"response.code": 500.0}),
    extproc.sb(
        S[:300], given={"response.code": 200.0, "response.headers['content-type']": "text/x"}
    ),
)
_TRAILERS = (extproc.rt(), extproc.st(), extproc.rt([("a", "b")]), extproc.st([("a", "b")]))

_GROUPS: tuple[tuple[Message, ...], ...] = (
    *(_REQUEST_HEADERS, _REQUEST_BODIES, _RESPONSE_HEADERS, _RESPONSE_BODIES, _TRAILERS),
)

MESSAGES = tuple(bytes(message) for group in _GROUPS for message in group)
"""Messages of all kinds, usual and odd."""


USUAL = tuple(
    (MESSAGES.index(bytes(headers)), MESSAGES.index(bytes(body)))
    for headers, body in (
        (extproc.post_rh(), extproc.rb(extproc.HI)),
        (extproc.post_rh(), extproc.rb(_STREAMING)),
        (extproc.post_rh(extproc.CHAT, key="key-b"), extproc.rb(_STREAMING)),
        (extproc.post_rh("/v1/completions", key="key-c"), extproc.rb(_BATCH)),
        (extproc.post_rh("/v1/messages"), extproc.rb(_MESSAGES)),
        (
            extproc.post_rh("/v1/chat/completions/?x=1", _ZIPPED),
            extproc.rb(gzip.compress(_STREAMING, mtime=0)),
        ),
        (
            extproc.with_protocol(extproc.post_rh(), BodyMode.BUFFERED, BodyMode.STREAMED),
            extproc.rb(_STREAMING),
        ),
    )
)
"""Request headers that go together with a body, by their places among `MESSAGES`."""


def numbers_of(group: int) -> range:
    """Which of `MESSAGES` are request headers (0), request bodies, response headers and bodies, trailers (4)."""
    start = sum(map(len, _GROUPS[:group]))
    return range(start, start + len(_GROUPS[group]))


def body_message(kind: str, body: bytes, *, ends: bool) -> bytes:
    """A piece of a body."""
    tag = {"request_body": 4, "response_body": 5}[kind]
    return field(tag, field(1, body) + (b"\x10\x01" if ends else b""))


def headers_message(kind: str, pairs: list[tuple[bytes, bytes]], *, ends: bool) -> bytes:
    """Headers with any bytes as names and values."""
    tag = {"request_headers": 2, "response_headers": 3}[kind]
    entries = b"".join(field(1, field(1, name) + field(3, value)) for name, value in pairs)
    return field(tag, field(1, entries) + (b"\x18\x01" if ends else b""))


def kinds_of(message: ProcessingRequest) -> tuple[str, ...]:
    """What is set of the kinds; what is no message of Envoy's may have none or several."""
    return tuple(kind for kind in KINDS if getattr(message, kind) is not None)


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    size = len(payload)
    out = bytearray((number << 3 | 2,))
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out) + payload


def fields_of(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """
    The fields of a message by number: numbers, or the bytes of whatever has a length.

    Raises:
        AssertionError, IndexError: it is no well-formed message.
    """
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value, at = _varint(data, at)
        if tag & 7 == 0:
            yield tag >> 3, value
            continue
        assert tag & 7 == 2, tag
        assert at + value <= len(data)
        yield tag >> 3, data[at : at + value]
        at += value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] > 0x7F:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | data[at] << shift, at + 1
