"""Bytes to fields: what is one JSON object that everybody reads alike."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.openai.body import MAX_FIELDS, decode_fields
from envoy_tokenpools.openai.codes import ErrorCode

BLANKS = st.text(" \t\r\n", max_size=2)
NAMES = st.sampled_from(["n", "model", "max_tokens", "ü", 'a"b', "a\\", "", "{", ":", "☃"])
VALUES = st.sampled_from(
    [
        "1",
        "12",
        "1.5",
        "1e3",
        "-0",
        '"1"',
        '"n\\":1,\\"n"',
        '"}"',
        "[1, 2]",
        '{"n":1}',
        "null",
        "{}",
    ]
)


def escaped(name: str, draw: st.DataObject) -> str:
    """A field's name as some writer may write it: each character plain or escaped."""
    units = (
        f"\\u{ord(character):04x}" if draw.draw(st.booleans()) else json.dumps(character)[1:-1]
        for character in name
    )
    return f'"{"".join(units)}"'


@settings(deadline=None)
@given(st.data(), st.lists(st.tuples(NAMES, VALUES), max_size=5))
def test_a_repeated_field_is_refused_however_it_is_written(
    data: st.DataObject, pairs: list[tuple[str, str]]
) -> None:
    """Blanks, escapes in names and look-alikes inside of values neither hide nor feign a repetition."""
    written = ",".join(
        "".join(
            [
                data.draw(BLANKS),
                escaped(name, data),
                data.draw(BLANKS),
                ":",
                data.draw(BLANKS),
                value,
                data.draw(BLANKS),
            ]
        )
        for name, value in pairs
    )
    body = f"{data.draw(BLANKS)}{{{written}}}{data.draw(BLANKS)}".encode()
    names = [name for name, _ in pairs]
    if len(names) == len(set(names)):
        assert decode_fields(body) == json.loads(body)
    else:
        with pytest.raises(RequestError) as caught:
            decode_fields(body)
        assert caught.value.code == ErrorCode.DUPLICATE_PARAMETER
        assert caught.value.param is not None
        assert names.count(caught.value.param) > 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"n":1,"n":128}',
        b'{"n":12,"n":1}',
        b'{"n":1,"n":1}',
        b'{"n":1, "n" : 128}',
        b'{"\\u006e":1,"n":128}',
        b'{"max\\u005Ftokens":1,"max_tokens":800}',
        b'{"model":"a","model":"b"}',
        b'{"x":"\\"n\\":","n":1,"n":1}',
        b'\n{"n":1}\n'.replace(b"1}", b'1\t,\r"n"\n:\n2 }'),
    ],
)
def test_the_usual_ways_to_say_two_things_at_once(body: bytes) -> None:
    """Two readers would see two requests: 400."""
    with pytest.raises(RequestError) as caught:
        decode_fields(body)
    assert (caught.value.status, caught.value.code) == (400, ErrorCode.DUPLICATE_PARAMETER)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b" { } ",
        b'{"n":1}\n',
        b'{"tools":[{"n":1,"model":"x"},{"n":2}],"n":1, "model":"m"}',
        b'{"messages":"\\"n\\":1,\\"n\\":2","n":3 }',
        b'{"n":1,"N":2,"n ":3}',
    ],
)
def test_the_same_name_elsewhere_is_no_repetition(body: bytes) -> None:
    """Only the fields of the body itself count, and only under the very same name."""
    assert decode_fields(body) == json.loads(body)


def test_a_repeated_name_is_quoted_only_in_part() -> None:
    """A client's own long name does not come back to it as a long answer."""
    name = b'"' + b"x" * 100_000 + b'"'
    with pytest.raises(RequestError) as caught:
        decode_fields(b"{" + name + b":1," + name + b":2}")
    assert caught.value.param == "x" * 64


def test_the_number_of_fields_is_bounded() -> None:
    """The check for repetitions takes time by field, so there is a most of them."""
    fields = {f"k{index}": index for index in range(MAX_FIELDS)}
    assert decode_fields(json.dumps(fields).encode()) == fields
    with pytest.raises(RequestError) as caught:
        decode_fields(json.dumps(fields | {"one": "more"}).encode())
    assert caught.value.code == ErrorCode.TOO_MANY_PARAMETERS


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"\xff\xfe"}',
        b'{"model":"\xc0\xaf"}',
        b'{"x":"\xed\xa0\x80"}',
        b'{"x":"\\ud800"}',
        b'\xef\xbb\xbf{"model":"m"}',
        '{"model":"m"}'.encode("utf-16"),
        '{"model":"m"}'.encode("utf-32"),
        b'{"a":1}{"b":2}',
        b'{"a":1}x',
        b"[]",
        b'"x"',
        b"null",
        b"1",
        b"",
        b" ",
        b"{",
        b'{"x":"\x00"}',
        b'{"x":NaN}',
        b'{"x":Infinity}',
        b'{"x":-Infinity}',
        b'{"x":1e999}',
        b'{"x":01}',
        b'{"x":' + b"9" * 5_000 + b"}",
        b"{'x':1}",
        b'{"x":1,}',
        b'{"x":1/**/}',
        b"\x1f\x8b\x08\x00",
    ],
)
def test_a_broken_body_is_a_400(body: bytes) -> None:
    """What one reader of JSON refuses and another accepts is refused."""
    with pytest.raises(RequestError) as caught:
        decode_fields(body)
    assert (caught.value.status, caught.value.code) == (400, ErrorCode.INVALID_JSON)
    assert caught.value.param is None


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_no_bytes_raise_anything_else(body: bytes) -> None:
    """Whatever arrives, either fields or a `RequestError` come out."""
    try:
        fields = decode_fields(body)
    except RequestError:
        return
    assert isinstance(fields, dict)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(st.none() | st.text(max_size=5), st.lists, max_leaves=5),
        max_size=5,
    )
)
def test_every_way_to_write_an_object_gives_its_fields(fields: dict[str, Any]) -> None:
    """Compact, spaced, indented, escaped or not: the same fields, and never a false repetition."""
    for body in (
        json.dumps(fields),
        json.dumps(fields, separators=(",", ":")),
        json.dumps(fields, indent=2),
        json.dumps(fields, ensure_ascii=False),
    ):
        assert decode_fields(body.encode()) == fields


def test_a_refusal_is_short_however_deep_the_fault_lies() -> None:
    """What the decoder says of the way to it is not repeated."""
    with pytest.raises(RequestError) as caught:
        decode_fields(b'{"a":' * 600 + b"1e999" + b"}" * 600)
    assert caught.value.code == ErrorCode.INVALID_JSON
    assert str(caught.value) == "The body is not a JSON object: Number out of range."
