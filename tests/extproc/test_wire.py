"""The narrow messages read the same from the same bytes as Envoy's full types."""

import contextlib
import dataclasses
from typing import Any

import pytest
from betterproto2 import Message as Proto
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
from envoy_data_plane.google.protobuf import ListValue, NullValue, Struct, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from envoy_tokenpools.extproc import wire
from envoy_tokenpools.extproc.incoming import WANTED
from tests.support.extproc import (
    BodyMode,
    Message,
    post_rh,
    rb,
    rh,
    sb,
    sh,
    verified,
    with_protocol,
)

KINDS = (
    "request_headers",
    "response_headers",
    "request_body",
    "response_body",
    "request_trailers",
    "response_trailers",
)

NAMES = st.one_of(
    st.sampled_from([name.decode() for name in WANTED]),
    st.sampled_from(["x-" + "y" * 126, "authorization" + "z" * 200, "k" * 20_000]),
    st.text(min_size=1, max_size=20),
)
RAW_VALUES = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([b"v" * 127, b"v" * 128, b"v" * 16_384, b"\x1a\x03abc", b"Bearer \xff"]),
)
HEADERS = st.lists(
    st.one_of(
        st.builds(core.HeaderValue, key=NAMES, raw_value=RAW_VALUES),
        st.builds(core.HeaderValue, key=NAMES, value=st.text(max_size=200)),
        st.builds(core.HeaderValue, key=NAMES, value=st.text(max_size=5), raw_value=RAW_VALUES),
    ),
    max_size=8,
)
HTTP_HEADERS = st.builds(
    ext_proc.HttpHeaders,
    headers=st.one_of(st.none(), st.builds(core.HeaderMap, headers=HEADERS)),
    end_of_stream=st.booleans(),
)
HTTP_BODIES = st.builds(
    ext_proc.HttpBody,
    body=st.binary(max_size=300),
    end_of_stream=st.booleans(),
    end_of_stream_without_message=st.booleans(),
)
HTTP_TRAILERS = st.builds(
    ext_proc.HttpTrailers, trailers=st.one_of(st.none(), st.builds(core.HeaderMap, headers=HEADERS))
)
TEXT_OR_NUMBER = st.one_of(
    st.builds(Value, string_value=st.text(max_size=200)),
    st.builds(Value, number_value=st.floats(allow_nan=False)),
)
OTHER_VALUES = st.sampled_from(
    [
        Value(),
        Value(bool_value=True),
        Value(null_value=NullValue.NULL_VALUE),
        Value(struct_value=Struct(fields={"a": Value(string_value="b")})),
        Value(list_value=ListValue(values=[Value(number_value=1.0)])),
    ]
)
ATTRIBUTES = st.dictionaries(
    st.text(max_size=10),
    st.builds(Struct, fields=st.dictionaries(st.text(max_size=150), TEXT_OR_NUMBER, max_size=4)),
    max_size=3,
)
PROTOCOLS = st.builds(
    ext_proc.ProtocolConfiguration,
    request_body_mode=st.sampled_from(BodyMode),
    response_body_mode=st.sampled_from(BodyMode),
    send_body_without_waiting_for_header_response=st.booleans(),
)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """Any message, with fields that we do not read among them."""
    kind = draw(st.sampled_from(KINDS))
    payload = {"headers": HTTP_HEADERS, "body": HTTP_BODIES, "trailers": HTTP_TRAILERS}
    message = Message(
        attributes=draw(ATTRIBUTES),
        observability_mode=draw(st.booleans()),
        protocol_config=draw(st.one_of(st.none(), PROTOCOLS)),
        metadata_context=draw(
            st.sampled_from([None, core.Metadata(filter_metadata={"a": Struct()})])
        ),
    )
    setattr(message, kind, draw(payload[kind.partition("_")[2]]))
    return message


def numbers(message: Any) -> dict[str, int]:
    """Field numbers of a message type by name."""
    return {f.name: f.metadata["betterproto"].number for f in dataclasses.fields(message)}


@pytest.mark.parametrize(
    ("narrow", "full"),
    [
        (wire.HeaderMap, core.HeaderMap),
        (wire.HeaderValue, core.HeaderValue),
        (wire.HttpHeaders, ext_proc.HttpHeaders),
        (wire.HttpBody, ext_proc.HttpBody),
        (wire.HttpTrailers, ext_proc.HttpTrailers),
        (wire.ProtocolConfiguration, ext_proc.ProtocolConfiguration),
        (wire.ProcessingRequest, ext_proc.ProcessingRequest),
        (wire._Struct, Struct),
        (wire._Value, Value),
    ],
)
def test_field_numbers_are_those_of_the_full_type(narrow: type[Proto], full: type[Proto]) -> None:
    """Every field that we declare has the number that Envoy writes."""
    assert numbers(narrow).items() <= numbers(full).items()


def test_entries_of_maps_have_the_numbers_of_every_map() -> None:
    """A map is a list of entries: key 1, value 2, of the attributes and of a struct's fields alike."""
    for full, name in ((ext_proc.ProcessingRequest, "attributes"), (Struct, "fields")):
        (metadata,) = (
            f.metadata["betterproto"] for f in dataclasses.fields(full) if f.name == name
        )
        assert tuple(part.number for part in metadata.map_meta) == (1, 2)
    assert numbers(wire._MapEntry) == {"key": 1, "value": 2}


def test_body_modes_are_those_of_the_full_type() -> None:
    """The modes that we tell apart by number."""
    assert (wire.NONE, wire.BUFFERED) == (BodyMode.NONE, BodyMode.BUFFERED)


@settings(deadline=None)
@given(messages())
def test_every_message_reads_as_the_full_type_does(full: Message) -> None:
    """Which kind it is, and every field that the narrow type declares."""
    narrow = wire.parse_request(bytes(full))
    assert [kind for kind in KINDS if getattr(narrow, kind) is not None] == [
        kind for kind in KINDS if getattr(full, kind) is not None
    ]
    assert narrow.observability_mode == full.observability_mode
    metadata = full.metadata_context
    assert narrow.metadata_context == (b"" if metadata is None else bytes(metadata))
    for kind in ("request_body", "response_body"):
        body, full_body = getattr(narrow, kind), getattr(full, kind)
        if full_body is not None:
            assert (body.body, body.end_of_stream) == (full_body.body, full_body.end_of_stream)
    for kind in ("request_headers", "response_headers"):
        headers, full_headers = getattr(narrow, kind), getattr(full, kind)
        if full_headers is not None:
            assert headers.end_of_stream == full_headers.end_of_stream
            assert (headers.headers is None) == (full_headers.headers is None)
    if full.protocol_config is None:
        assert narrow.protocol_config is None
    else:
        assert narrow.protocol_config is not None
        modes = (
            narrow.protocol_config.request_body_mode,
            narrow.protocol_config.response_body_mode,
        )
        assert modes == (
            full.protocol_config.request_body_mode,
            full.protocol_config.response_body_mode,
        )


@settings(deadline=None)
@given(HEADERS)
def test_wanted_headers_are_read_whatever_their_form(headers: list[core.HeaderValue]) -> None:
    """In order, duplicates kept, `raw_value` before `value`; all others are left out."""
    full = ext_proc.HttpHeaders(core.HeaderMap(headers=headers))
    expected = [
        (header.key.encode(), header.raw_value or header.value.encode())
        for header in headers
        if header.key.encode() in WANTED
    ]
    assert wire.headers_of(wire.HttpHeaders.parse(bytes(full)), WANTED) == expected


def test_a_header_without_anything_is_passed_over() -> None:
    """The fast comparison of names does not run past its end."""
    empty = core.HeaderValue()
    key_only = core.HeaderValue(key="api-key")
    full = ext_proc.HttpHeaders(core.HeaderMap(headers=[empty, key_only, empty]))
    narrow = wire.HttpHeaders.parse(bytes(full))
    assert wire.headers_of(narrow, WANTED) == [(b"api-key", b"")]
    bare = wire.HttpHeaders(headers=wire.HeaderMap(headers=[b""]))
    assert wire.headers_of(bare, WANTED) == []


def test_a_value_that_spells_a_wanted_name_is_no_header_of_that_name() -> None:
    """An entry without a key whose value stands where the key would."""
    forged = core.HeaderValue(value="authorization", raw_value=b"Bearer stolen")
    narrow = wire.HttpHeaders.parse(bytes(ext_proc.HttpHeaders(core.HeaderMap(headers=[forged]))))
    assert b"authorization" not in dict(wire.headers_of(narrow, WANTED))


def test_headers_that_were_not_sent_are_none() -> None:
    """A headers message without a map, as with every header kept from us by `forward_rules`."""
    assert wire.headers_of(wire.HttpHeaders(), WANTED) == []
    assert wire.headers_of(wire.HttpHeaders.parse(bytes(ext_proc.HttpHeaders())), WANTED) == []


FIELD_99 = b"\x9a\x06\x01x"
FIELD_15 = b"\x7a\x01x"
NUMBER_15 = b"\x78\xac\x02"


@pytest.mark.parametrize("unknown", [FIELD_99, FIELD_15, NUMBER_15])
def test_fields_of_a_newer_envoy_are_passed_over(unknown: bytes) -> None:
    """Wherever they stand."""
    header = core.HeaderValue(key="api-key", raw_value=b"k")
    entry = bytes(core.HeaderMap(headers=[header]))
    headers = _field(1, entry + unknown) + b"\x18\x01" + unknown
    body = _field(1, b"hello") + b"\x10\x01" + unknown
    protocol = b"\x08\x02\x10\x01" + unknown
    for kind, payload in (("request_headers", headers), ("request_body", body)):
        number = numbers(Message)[kind]
        data = _field(number, payload) + _field(11, protocol) + unknown
        narrow = wire.parse_request(data)
        assert narrow.protocol_config is not None
        assert narrow.protocol_config.request_body_mode == wire.BUFFERED
        if narrow.request_headers is not None:
            assert narrow.request_headers.end_of_stream
            assert wire.headers_of(narrow.request_headers, WANTED) == [(b"api-key", b"k")]
        else:
            assert narrow.request_body is not None
            assert (narrow.request_body.body, narrow.request_body.end_of_stream) == (b"hello", True)


def _field(number: int, payload: bytes) -> bytes:
    assert len(payload) < 128
    return bytes((number << 3 | 2, len(payload))) + payload


@settings(deadline=None)
@given(messages(), st.data())
def test_the_fast_reading_is_the_general_one(full: Message, data: st.DataObject) -> None:
    """Where it does not give up; and a message cut anywhere is never half of one to it."""
    whole = bytes(full)
    try:
        assert wire._read_request(whole) == wire.ProcessingRequest.parse(whole)
    except wire._UnusualError:
        assert wire.parse_request(whole) == wire.ProcessingRequest.parse(whole)
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    with contextlib.suppress(wire._UnusualError, IndexError):
        assert wire._read_request(cut) == wire.ProcessingRequest.parse(cut)


@pytest.mark.parametrize(
    "message",
    [
        with_protocol(post_rh(), BodyMode.BUFFERED, BodyMode.STREAMED),
        verified(post_rh(), "envoy.filters.http.jwt_authn", sub=Value(string_value="a")),
        rb(b"x" * 100),
        rb(b"x" * 5_000_000),
        rb(b"x" * 300, given={"request.path": "/v1/chat/completions" + "?" * 200}),
        sh(200, "text/event-stream"),
        sb(b"data: {}\n\n"),
        sb(b"", eos=True),
    ],
)
def test_what_envoy_sends_day_by_day_is_read_fast(message: Message) -> None:
    """The general parser is ten times as slow."""
    data = bytes(message)
    assert wire._read_request(data) == wire.ProcessingRequest.parse(data)


def test_an_empty_message_still_has_its_kind() -> None:
    """Headers or a body without any field set are a message all the same."""
    assert wire.parse_request(bytes(rh())).request_headers is not None
    for kind in KINDS:
        payload = b"\x00"
        tag = bytes((numbers(Message)[kind] << 3 | 2,))
        assert getattr(wire.parse_request(tag + payload), kind) is not None


@settings(deadline=None)
@given(ATTRIBUTES)
def test_attributes_are_texts_and_numbers(values: dict[str, Struct]) -> None:
    """By expression, every filter's together; an empty text is none."""
    full = Message(attributes=values)
    texts: dict[str, bytes] = {}
    found: dict[str, float] = {}
    for struct in values.values():
        for name, value in struct.fields.items():
            if value.string_value:
                texts[name] = value.string_value.encode()
            else:
                found[name] = value.number_value or 0.0
    read = wire.attributes_of(wire.parse_request(bytes(full)).attributes)
    assert read == wire.Attributes(texts, found)


@settings(deadline=None)
@given(OTHER_VALUES)
def test_attributes_of_other_kinds_are_no_text(value: Value) -> None:
    """Flags, lists, maps and nothing never stand for a header or a path."""
    struct = Struct(fields={"request.path": value, "request.id": Value(string_value="8f3c")})
    narrow = wire.parse_request(bytes(Message(attributes={"filter": struct})))
    assert wire.attributes_of(narrow.attributes).texts == {"request.id": b"8f3c"}


def test_no_attributes() -> None:
    """Every message but the first of a direction."""
    assert wire.attributes_of([]) == wire.Attributes()
