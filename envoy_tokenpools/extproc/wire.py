"""
Narrow views of Envoy's ext_proc messages: only the fields that we read, with the numbers of the full types.

Protobuf skips what a message does not declare, so these parse the same bytes as `envoy_data_plane`'s full types (a test
holds them together) at a tenth of the cost. Header entries and attributes stay bytes until somebody wants them.
"""

from collections.abc import Iterable, Mapping
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
    attributes: "list[bytes]" = _entries(9)
    observability_mode: "bool" = _flag(10)
    protocol_config: "ProtocolConfiguration | None" = _message(11)


NONE = 0
"""`ProcessingMode.BodySendMode.NONE`: no body message comes."""

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
    """`google.protobuf.Value`, the kinds that attributes have."""

    number_value: "float" = betterproto2.field(2, betterproto2.TYPE_DOUBLE)
    string_value: "bytes" = _bytes(3)


def parse_request(data: bytes) -> ProcessingRequest:
    """
    One message from Envoy.

    Raises:
        Exception: of betterproto2's choosing, if the bytes are no such message; gRPC answers INTERNAL then.
    """
    return ProcessingRequest.parse(data)


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


NO_ATTRIBUTES = Attributes()


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
