"""Members put into and taken out of request bodies: those and not a byte more."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.openai.request import Endpoint, RequestFacts, UsageWish, parse_request
from envoy_tokenpools.openai.rewrite import with_usage_requested, without_members
from tests.support.captures import FOLDER

PRIORITY = frozenset({"priority"})
INSERTED = b',"stream_options":{"include_usage":true}'


def test_usage_is_asked_for_before_the_closing_brace() -> None:
    """A streaming request of 71 bytes becomes one of 111."""
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
    asking = with_usage_requested(body)
    assert asking == body[:-1] + INSERTED + b"}"
    assert (len(body), len(asking)) == (71, 111)


@pytest.mark.parametrize(
    "member",
    [
        rb'"stream_options":{"include_usage":false}',
        rb'"stream_options":{"include_usage":true}',
        rb'"stream_options":{}',
        rb'"stream_options":null',
        rb'"stream_options" : 7',
        rb'"stream\u005foptions":{}',
        rb'"\u0073tream_options":null',
        rb'"\u0073\u0074\u0072\u0065\u0061\u006D\u005F\u006f\u0070\u0074\u0069\u006f\u006e\u0073":0',
    ],
)
@pytest.mark.parametrize("body", [rb'{"stream":true,%b}', rb' { %b , "stream":true } ', rb"{%b}"])
def test_what_the_client_says_of_usage_stands(body: bytes, member: bytes) -> None:
    """A request with `stream_options` is left alone, whatever their value, place and spelling."""
    assert with_usage_requested(body % member) is None


@pytest.mark.parametrize(
    "body",
    [
        rb'{"stream":true,"metadata":{"stream_options":{"include_usage":false}}}',
        rb'{"messages":[[{"stream_options":1}]],"stream":true}',
        rb'{"stream":true,"user":"stream_options"}',
        rb'{"stream":true,"user":"\",\"stream_options\":{}"}',
        rb'{"stream":true,"user":"\u005c","stream_option":1,"stream_options ":1}',
        rb'{"stream":true,"\\u0073tream_options":1}',
        rb'{"stream":true,"Stream_options":1}',
        b'{\n  "stream": true,\n  "seed": 1.50e+1\n}\r\n',
        '{"stream":true,"user":"}☃}"}'.encode(),
    ],
)
def test_only_a_member_of_the_request_itself_counts(body: bytes) -> None:
    """Nested members, texts and other names that look like `stream_options` do not."""
    asking = with_usage_requested(body)
    assert asking is not None
    assert asking.replace(INSERTED, b"") == body
    expected = {**json.loads(body), "stream_options": {"include_usage": True}}
    assert json.loads(asking) == expected


@pytest.mark.parametrize(
    ("body", "rest"),
    [
        (b'{"priority":1}', b"{}"),
        (b' { "priority" : 1 } \n', b" { } \n"),
        (b'{"priority":1,"n":2}', b'{"n":2}'),
        (b'{"n":2,"priority":1}', b'{"n":2}'),
        (b'{"n":2,"priority":1,"m":3}', b'{"n":2,"m":3}'),
        (b'{\n  "priority": -1,\n  "n": 2\n}\n', b'{\n  "n": 2\n}\n'),
        (b'{\n  "n": 2,\n  "priority": -1\n}\n', b'{\n  "n": 2\n}\n'),
        (b'{"n":[{"priority":[1]}],"priority":{"priority":"}"}}', b'{"n":[{"priority":[1]}]}'),
        (b'{"n":"\\",\\"priority\\":1","priority":"\\\\"}', b'{"n":"\\",\\"priority\\":1"}'),
        (rb'{"\u0070riority":1,"n":2,"priorit\u0079":1}', b'{"n":2}'),
        (b'{"priority":1,"n":2,"priority":12,"priority":1}', b'{"n":2}'),
        (b'{"n":12,"priority":0,"n":1,"m":3,"n":1}', b'{"n":12,"n":1,"m":3,"n":1}'),
        (b'{"n":1.0,"priority":0,"n":1}', b'{"n":1.0,"n":1}'),
        (b'{"n":1e3,"m":1E3,"priority":0,"n":1,"m":1}', b'{"n":1e3,"m":1E3,"n":1,"m":1}'),
        (b'{"n":[2],"priority":0,"n":1,"________":1}', b'{"n":[2],"n":1,"________":1}'),
        (b'{"_":[1],"priority":0,"_":"","__":1}', b'{"_":[1],"_":"","__":1}'),
        (b'{"":1,"priority":0,"":2}', b'{"":1,"":2}'),
    ],
)
def test_a_member_goes_with_its_comma(body: bytes, rest: bytes) -> None:
    """What is left is valid, in its old order and spelling, also where members are given twice."""
    assert without_members(body, PRIORITY) == rest
    json.loads(rest)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"n":1}',
        b'{"n":{"priority":1}}',
        b'{"n":"priority"}',
        b'{"n":"\\",\\"priority\\":1"}',
        b'{"Priority":1," priority":2,"priority\\n":3,"\\u0050riority":4}',
        rb'{"\\u0070riority":1}',
    ],
)
def test_a_body_without_the_members_is_left_alone(body: bytes) -> None:
    """Nothing is rewritten for look-alikes in texts, in other names and further in."""
    assert without_members(body, PRIORITY) is None


def test_several_names_at_once() -> None:
    """All of them go, and a body with one of them is enough."""
    body = b'{"a":1,"b":2,"c":3,"d":4}'
    assert without_members(body, frozenset({"a", "b", "d", "x"})) == b'{"c":3}'
    assert without_members(body, frozenset({"x", "y"})) is None
    assert without_members(body, frozenset()) is None


@dataclass(frozen=True, slots=True)
class Member:
    """One member as it is written: the blanks before it, it, and the blanks behind it."""

    name: str
    blanks: str
    text: str
    trail: str


FINITE = st.floats(allow_nan=False, allow_infinity=False)
BLANKS = st.text(" \t\r\n", max_size=2)
NAMES = st.sampled_from(
    ["priority", "stream_options", "n", "m", "Priority", '"priority"', "\\", "", "{", ",", "ü", "☃"]
)
VALUES = st.sampled_from(
    [
        *("1", "12", "-0", "1.50", "1E+2", "true", "null", '""', "{}", "[]"),
        *('"priority"', '"☃\\u2603"', '"\\\\"', '"\\\\\\""', '"}"', '",\\"priority\\":1,\\""'),
        *('{"priority":1}', '[{"stream_options":[]},{"priority":{}}]', '{ "n" : [ 1 , "]" ] }'),
        "[" * 40 + "]" * 40,
    ]
)


def escaped(draw: st.DrawFn, name: str) -> str:
    """A name as some writer may write it: each character plain or escaped."""
    units = (
        f"\\u{ord(unit):04x}" if draw(st.booleans()) else json.dumps(unit)[1:-1] for unit in name
    )
    return f'"{"".join(units)}"'


@st.composite
def _members(draw: st.DrawFn) -> list[Member]:
    members = []
    for name in draw(st.lists(NAMES, max_size=6)):
        colon = f"{draw(BLANKS)}:{draw(BLANKS)}"
        text = escaped(draw, name) + colon + draw(VALUES)
        members.append(Member(name, draw(BLANKS), text, draw(BLANKS)))
    return members


def written(members: Iterable[Member]) -> bytes:
    """The object of these members, in a body with blanks around it."""
    texts = [member.blanks + member.text + member.trail for member in members]
    return f" {{{','.join(texts)}}}\n".encode()


def pairs_of(body: bytes) -> list[tuple[str, object]]:
    """The top-level members of a body in order, none lost that is given twice."""
    pairs = json.loads(body, object_pairs_hook=list)
    assert isinstance(pairs, list)
    return pairs


@settings(deadline=None)
@given(_members(), st.sets(st.sampled_from(["priority", "stream_options", "n"])))
def test_removal_takes_those_members_only(members: list[Member], names: set[str]) -> None:
    """All other members keep every byte, the blanks before them and their commas."""
    body = written(members)
    if names.isdisjoint(member.name for member in members):
        assert without_members(body, frozenset(names)) is None
        return
    rest = trail = ""
    for member in members:
        if member.name not in names:
            rest += (f"{trail}," if rest else "") + member.blanks + member.text
        trail = member.trail
    result = without_members(body, frozenset(names))
    assert result == f" {{{rest}{trail}}}\n".encode()
    assert pairs_of(result) == [pair for pair in pairs_of(body) if pair[0] not in names]


@settings(deadline=None)
@given(_members())
def test_insertion_adds_one_member_only(members: list[Member]) -> None:
    """The body parses to the same members and the new one; without it, every byte is the client's."""
    members = [*members, Member("stream", "", '"stream":true', " ")]
    body = written(members)
    asking = with_usage_requested(body)
    if any(member.name == "stream_options" for member in members):
        assert asking is None
        return
    assert asking is not None
    assert pairs_of(asking) == [*pairs_of(body), ("stream_options", [("include_usage", True)])]
    assert asking == body[:-2] + INSERTED + body[-2:]
    assert without_members(asking, frozenset({"stream_options"})) == body[:-3] + b"}\n"


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=3) | st.just("priority"),
        st.recursive(
            st.none() | st.booleans() | st.integers() | FINITE | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=8,
        ),
    ),
    st.sampled_from([{}, {"ensure_ascii": False}, {"indent": 1}, {"separators": (",", ":")}]),
)
def test_any_object_loses_the_member_only(fields: dict[str, object], style: dict[str, Any]) -> None:
    """Whatever Python can write as JSON, in each of its styles."""
    body = json.dumps(fields, **style).encode()
    rest = without_members(body, PRIORITY)
    had = "priority" in fields
    assert (rest is not None) is had
    if rest is not None:
        del fields["priority"]
        assert json.loads(rest) == fields


def _facts(body: bytes) -> RequestFacts:
    endpoint = Endpoint.CHAT if b'"messages"' in body else Endpoint.COMPLETIONS
    return parse_request(endpoint, body)


def test_recorded_requests_keep_all_but_their_usage() -> None:
    """Real streaming requests, asked for usage, state the same as before in everything else."""
    asked = 0
    for path in sorted(FOLDER.glob("*.request.json")):
        body = path.read_bytes()
        try:
            facts = _facts(body)
        except RequestError:
            continue
        asking = with_usage_requested(body)
        if b"stream_options" in body:
            assert asking is None
        elif facts.stream:
            asked += 1
            assert asking is not None
            assert _facts(asking) == replace(facts, usage_wish=UsageWish.ASKED)
    assert asked >= 5


def test_depth_beyond_the_decoder() -> None:
    """A body nested too deeply is not asked for usage, and is refused where a member must go."""
    deep = b'{"stream":true,"priority":1,"x":{"stream_options":' + b"[" * 100_000 + b"]" * 100_000
    body = deep + b"}}"
    assert with_usage_requested(body) is None
    with pytest.raises(RequestError) as caught:
        without_members(body, PRIORITY)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


MEGABYTE = 1024 * 1024


@pytest.mark.parametrize(
    "filling",
    [
        pytest.param(b'"' + b"x" * MEGABYTE + b'"', id="one text"),
        pytest.param(b'"' + rb"\n" * (MEGABYTE // 2) + b'"', id="escapes"),
        pytest.param(b'"' + rb"\u4f60" * (MEGABYTE // 6) + b'"', id="Unicode escapes"),
        pytest.param(b"[" + b"[]," * (MEGABYTE // 3) + b"1]", id="empty arrays"),
        pytest.param(b"[" + (b"[" * 50 + b"]" * 50 + b",") * 10_000 + b"1]", id="deep arrays"),
        pytest.param(b'{"stream_options":' * 800 + b"1" * MEGABYTE + b"}" * 800, id="deep objects"),
        pytest.param(b"1" + b" " * MEGABYTE, id="blanks"),
        pytest.param(
            b"0" + b"".join(b',"%04d":"%b"' % (n, b"x" * 1000) for n in range(1000)), id="members"
        ),
    ],
)
def test_a_megabyte_takes_milliseconds(filling: bytes) -> None:
    """No filling of a body makes the event loop wait: 20 ms are wanted, five times that is a fault."""
    body = b'{"stream":true,"a":' + filling + rb',"\u0078":1,"priority":2}'
    spent = []
    for _ in range(3):
        start = time.process_time()
        asking, rest = with_usage_requested(body), without_members(body, PRIORITY)
        spent.append(time.process_time() - start)
        assert asking == body[:-1] + INSERTED + b"}"
        assert rest == body.replace(b',"priority":2', b"")
    assert min(spent) < 0.1
