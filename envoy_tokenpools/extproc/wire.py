"""
Narrow views of Envoy's ext_proc messages: only the fields that we read, with the numbers of the full types.

Protobuf skips what a message does not declare, so these parse the same bytes as `envoy_data_plane`'s full types (a test
holds them together) at a tenth of the cost. Header entries and attributes stay bytes until somebody wants them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import betterproto2


def _bytes(number: int) -> Any:  # noqa: ANN401
    return betterproto2.field(number, betterproto2.TYPE_BYTES)


def _entries(number: int) -> Any:  # noqa: ANN401
    return betterproto2.field(number, betterproto2.TYPE_BYTES, repeated=True)


def _flag(number: int) -> Any:  # noqa: ANN401
    return betterproto2.field(number, betterproto2.TYPE_BOOL)


def _message(number: int) -> Any:  # noqa: ANN401
    return betterproto2.field(number, betterproto2.TYPE_MESSAGE, optional=True)


@dataclass(eq=False, repr=False)
class HeaderMap(betterproto2.Message):
    """`envoy.config.core.v3.HeaderMap`, entries undecoded."""

    headers: "list[bytes]" = _entries(1)


@dataclass(eq=False, repr=False)
class HeaderValue(betterproto2.Message):
    """`envoy.config.core.v3.HeaderValue`; Envoy fills `raw_value` and leaves `value` empty."""

    key: "bytes" = _bytes(1)
    value: "bytes" = _bytes(2)
    raw_value: "bytes" = _bytes(3)


@dataclass(eq=False, repr=False)
class HttpHeaders(betterproto2.Message):
    """`envoy.service.ext_proc.v3.HttpHeaders`."""

    headers: "HeaderMap | None" = _message(1)
    end_of_stream: "bool" = _flag(3)


@dataclass(eq=False, repr=False)
class HttpBody(betterproto2.Message):
    """`envoy.service.ext_proc.v3.HttpBody`."""

    body: "bytes" = _bytes(1)
    end_of_stream: "bool" = _flag(2)


@dataclass(eq=False, repr=False)
class HttpTrailers(betterproto2.Message):
    """`envoy.service.ext_proc.v3.HttpTrailers`: that they came is all we need."""


@dataclass(eq=False, repr=False)
class ProtocolConfiguration(betterproto2.Message):
    """`envoy.service.ext_proc.v3.ProtocolConfiguration`, on the first message only."""

    request_body_mode: "int" = betterproto2.field(1, betterproto2.TYPE_INT32)
    response_body_mode: "int" = betterproto2.field(2, betterproto2.TYPE_INT32)


@dataclass(eq=False, repr=False)
class ProcessingRequest(betterproto2.Message):
    """`envoy.service.ext_proc.v3.ProcessingRequest`: exactly one of the first six is set."""

    request_headers: "HttpHeaders | None" = _message(2)
    response_headers: "HttpHeaders | None" = _message(3)
    request_body: "HttpBody | None" = _message(4)
    response_body: "HttpBody | None" = _message(5)
    request_trailers: "HttpTrailers | None" = _message(6)
    response_trailers: "HttpTrailers | None" = _message(7)
    metadata_context: "bytes" = _bytes(8)
    attributes: "list[bytes]" = _entries(9)
    observability_mode: "bool" = _flag(10)
    protocol_config: "ProtocolConfiguration | None" = _message(11)


NONE = 0
"""`ProcessingMode.BodySendMode.NONE`: no body message comes."""

STREAMED = 1
"""`ProcessingMode.BodySendMode.STREAMED`: the headers have gone on before the body comes."""

BUFFERED = 2
"""`ProcessingMode.BodySendMode.BUFFERED`: the one body message holds the whole body."""


@dataclass(eq=False, repr=False)
class _MapEntry(betterproto2.Message):
    """An entry of `map<string, google.protobuf.Struct>`, and of a Struct's fields: the same two numbers."""

    key: "str" = betterproto2.field(1, betterproto2.TYPE_STRING)
    value: "bytes" = _bytes(2)


@dataclass(eq=False, repr=False)
class _Struct(betterproto2.Message):
    """`google.protobuf.Struct`."""

    fields: "list[bytes]" = _entries(1)


@dataclass(eq=False, repr=False)
class _Value(betterproto2.Message):
    """`google.protobuf.Value`, the kinds that attributes and claims have."""

    number_value: "float" = betterproto2.field(2, betterproto2.TYPE_DOUBLE)
    string_value: "bytes" = _bytes(3)
    struct_value: "bytes" = _bytes(5)


def parse_request(data: bytes) -> ProcessingRequest:
    """
    One message from Envoy.

    Raises:
        Exception: of betterproto2's choosing, if the bytes are no such message; gRPC answers INTERNAL then.
    """
    try:
        return _read_request(data)
    except (IndexError, _UnusualError):
        return ProcessingRequest.parse(data)


_NUMBER = 0
_BYTES = 2
"""Wire types."""


class _UnusualError(Exception):
    """Not what Envoy sends day by day: the general parser, ten times as slow, shall read it."""


def _read_request(data: bytes) -> ProcessingRequest:
    """The message in `data`, if it holds nothing but the fields named here and below."""
    request = ProcessingRequest()
    for tag, start, end in _fields(data, 0, len(data)):
        match tag:
            case 0x2A:
                request.response_body = _read_body(data, start, end)
            case 0x22:
                request.request_body = _read_body(data, start, end)
            case 0x12:
                request.request_headers = _read_headers(data, start, end)
            case 0x1A:
                request.response_headers = _read_headers(data, start, end)
            case 0x42:
                request.metadata_context = data[start:end]
            case 0x4A:
                request.attributes.append(data[start:end])
            case 0x5A:
                request.protocol_config = _read_modes(data, start, end)
            case _:
                raise _UnusualError
    return request


def _read_body(data: bytes, start: int, end: int) -> HttpBody:
    body = HttpBody()
    for tag, at, after in _fields(data, start, end):
        if tag == 0x0A:
            body.body = data[at:after]
        elif tag == 0x10:
            body.end_of_stream = data[at] > 0
        else:
            raise _UnusualError
    return body


def _read_headers(data: bytes, start: int, end: int) -> HttpHeaders:
    headers = HttpHeaders()
    for tag, at, after in _fields(data, start, end):
        if tag == 0x0A:
            headers.headers = _read_map(data, at, after)
        elif tag == 0x18:
            headers.end_of_stream = data[at] > 0
        else:
            raise _UnusualError
    return headers


def _read_map(data: bytes, start: int, end: int) -> HeaderMap:
    entries = []
    for tag, at, after in _fields(data, start, end):
        if tag != 0x0A:
            raise _UnusualError
        entries.append(data[at:after])
    return HeaderMap(headers=entries)


def _read_modes(data: bytes, start: int, end: int) -> ProtocolConfiguration:
    modes = ProtocolConfiguration()
    for tag, at, _ in _fields(data, start, end):
        if tag == 0x08:
            modes.request_body_mode = data[at]
        elif tag == 0x10:
            modes.response_body_mode = data[at]
        else:
            raise _UnusualError
    return modes


def _fields(data: bytes, at: int, end: int) -> list[tuple[int, int, int]]:
    """
    Tag (number * 8 + wire type), start and end of each field in `data[at:end]`: bytes, or numbers of one byte.

    Raises:
        _UnusualError: there is something else, or a field is longer than its message.
        IndexError: likewise.
    """
    fields = []
    while at < end:
        tag = data[at]
        size = data[at + 1]
        at += 2
        if tag > 0x7F:
            raise _UnusualError
        if tag & 7 == _BYTES:
            if size > 0x7F:
                size &= 0x7F
                shift = 7
                while data[at] > 0x7F:
                    size |= (data[at] & 0x7F) << shift
                    shift += 7
                    at += 1
                size |= data[at] << shift
                at += 1
            fields.append((tag, at, at + size))
            at += size
        elif tag & 7 == _NUMBER and size <= 0x7F:
            fields.append((tag, at - 1, at))
        else:
            raise _UnusualError
    if at != end:
        raise _UnusualError
    return fields


def headers_of(message: HttpHeaders, wanted: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """
    The wanted headers in order, duplicates kept; names as Envoy sends them, in lower case.

    The key is compared before anything is decoded: a field tag, one length byte, the name. What then is not simply a
    short `raw_value` to the end is left to the full parser.
    """
    if message.headers is None:
        return []
    found = []
    for entry in message.headers.headers:
        if entry[:1] != _KEY_TAG:  # a header without a name
            continue
        end = 2 + entry[1]
        key = entry[2:end]
        if key not in wanted:
            continue
        size = len(entry) - end - 2
        if 0 < size < 0x80 and entry[end] == _RAW_VALUE_TAG and entry[end + 1] == size:
            found.append((key, entry[end + 2 :]))
        else:
            header = HeaderValue.parse(entry)
            found.append((header.key, header.raw_value or header.value))
    return found


_KEY_TAG = b"\n"
_RAW_VALUE_TAG = 3 << 3 | 2


@dataclass(frozen=True, slots=True)
class Attributes:
    """CEL attributes of one message by expression, such as `request.path`."""

    texts: Mapping[str, bytes] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


def attributes_of(entries: Iterable[bytes]) -> Attributes:
    """Decode the `attributes` map of a message; every filter's entries together."""
    texts: dict[str, bytes] = {}
    numbers: dict[str, float] = {}
    for entry in entries:
        for attribute in _Struct.parse(_MapEntry.parse(entry).value).fields:
            pair = _MapEntry.parse(attribute)
            value = _Value.parse(pair.value)
            if value.string_value:
                texts[pair.key] = value.string_value
            else:
                numbers[pair.key] = value.number_value
    return Attributes(texts, numbers)


def metadata_text(metadata: bytes, namespace: str, path: Sequence[str]) -> str | None:
    """
    The text at `path` inside `namespace` of a `metadata_context`; a whole number counts as its digits.

    None if it is not there or of another kind.
    """
    value = _Value(struct_value=_entry(_Struct.parse(metadata), namespace))
    for name in path:
        value = _Value.parse(_entry(_Struct.parse(value.struct_value), name))
    if value.string_value:
        return value.string_value.decode("utf-8", "replace")
    number = value.number_value
    return f"{number:.0f}" if number and number.is_integer() else None


def _entry(struct: _Struct, name: str) -> bytes:
    """The value of a map's entry as it stands, empty if there is none; `Metadata` and `Struct` are laid out alike."""
    for raw in struct.fields:
        pair = _MapEntry.parse(raw)
        if pair.key == name:
            return pair.value
    return b""
