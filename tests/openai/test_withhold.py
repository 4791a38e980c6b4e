"""The usage chunk that only we asked for: taken out at every cut, and nothing with it."""

import itertools
import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envoy_tokenpools.openai import withhold
from envoy_tokenpools.openai.withhold import UsageChunkRemover
from tests.support.captures import load, response_names
from tests.support.streams import S_EVENTS, S, chunk, stream_of, total

BOM = b"\xef\xbb\xbf"
USAGE_EVENT = stream_of(S_EVENTS[3])
S0 = S.replace(USAGE_EVENT, b"")
LIMIT = 100


def passed(*pieces: bytes) -> bytes:
    """What becomes of a stream fed in pieces; what is held meanwhile is always its last bytes."""
    remover = UsageChunkRemover()
    fed = out = b""
    for piece in pieces:
        fed += piece
        out += remover.feed(piece)
        assert fed.endswith(remover._held)
        assert len(remover._held) <= withhold.MAX_HELD_BYTES
    return out + remover.finish()


def assert_at_every_cut(stream: bytes, expected: bytes) -> None:
    """Whole, byte by byte, and cut in two or with empty feeds anywhere."""
    assert passed(stream) == expected
    assert passed(*(stream[i : i + 1] for i in range(len(stream)))) == expected
    for cut in range(len(stream) + 1):
        assert passed(stream[:cut], b"", stream[cut:]) == expected


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("mark", [b"", BOM])
def test_the_usage_chunk_alone_is_taken_out(mark: bytes, ending: bytes) -> None:
    """With its blank line, whatever ends lines, and behind a byte order mark too."""
    stream, expected = S.replace(b"\n", ending), S0.replace(b"\n", ending)
    assert_at_every_cut(mark + stream, mark + expected)
    event = USAGE_EVENT.replace(b"\n", ending)
    assert_at_every_cut(mark + event + stream + event, mark + expected)


@pytest.mark.parametrize(
    ("written", "left"),
    [
        pytest.param(b'data:{"usage":{},"choices":[]}\n\n', b"", id="least"),
        pytest.param(b'data: {"choices":[ ],"usage":1}\n\n', b"", id="blank in the array"),
        pytest.param(b'data: {"choices":[\ndata: ],"usage":1}\n\n', b"", id="array over lines"),
        pytest.param(b'data: {"choices":[\r\ndata:],"usage":1}\r\n\r\n', b"", id="the same, CRLF"),
        pytest.param(rb'data: {"choices":[],"us\u0061ge":{}}' + b"\n\n", b"", id="escaped name"),
        pytest.param(b'data: {"choices":[],"usage":{},"id":"\xff"}\n\n', b"", id="broken UTF-8"),
        pytest.param(b'data: {"choices":[],"usage":{},"t":NaN}\n\n', b"", id="NaN"),
        pytest.param(b'event: x\nid: 7\ndata: {"choices":[],"usage":1}\n\n', b"", id="its fields"),
        pytest.param(b': a\ndata: {"choices":[],"usage":1}\n\n', b": a\n", id="comment before"),
        pytest.param(b'data: {"choices":[],"usage":1}\r: a\r\r', b": a\r", id="comment behind"),
        pytest.param(
            b':\r\ndata: {"choices":[]\r\n: a\r\ndata: ,"usage":1}\r\n:b\n\n',
            b":\r\n: a\r\n:b\n",
            id="comments inside",
        ),
        pytest.param(b'\n\ndata: {"choices":[],"usage":1}\n\n\n', b"\n\n\n", id="blank lines"),
        pytest.param(b'data: {"choices":[],"usage":1}', b"", id="unterminated"),
        pytest.param(b'data: {"choices":[],"usage":1}\r', b"", id="without its blank line"),
        pytest.param(b'data: {"choices":[],"usage":1}\n: a', b": a", id="cut in a comment"),
        pytest.param(b'data: {"choices":[],"usage":1', None, id="cut in its JSON"),
        pytest.param(b'data: {"choices":[],"usage":null}\n\n', None, id="null usage"),
        pytest.param(b'data: {"choices":[]}\n\n', None, id="no usage"),
        pytest.param(b'data: {"usage":{"choices":[]}}\n\n', None, id="no choices"),
        pytest.param(b'data: {"choices":null,"usage":{"a":[]}}\n\n', None, id="null choices"),
        pytest.param(b'data: {"choices":[[]],"usage":{}}\n\n', None, id="a choice"),
        pytest.param(b'data: {"choices":{},"usage":[]}\n\n', None, id="choices of another kind"),
        pytest.param(b'data: {"response":{"choices":[],"usage":{}}}\n\n', None, id="nested"),
        pytest.param(b'data: [{"choices":[],"usage":{}}]\n\n', None, id="no object"),
        pytest.param(b'data: "{\\"choices\\":[],\\"usage\\":{}}"\n\n', None, id="a text"),
        pytest.param(b'data: {"choices":[],"usage":{}}}\n\n', None, id="no JSON"),
        pytest.param(b"data: " + b"[" * 5_000 + b"]" * 5_000 + b"\n\n", None, id="too deep"),
        pytest.param(b'data: {"choices":[],"us\ndata: age":1}\n\n', None, id="a name over lines"),
        pytest.param(b': data: {"choices":[],"usage":{}}\n\n', None, id="a comment"),
        pytest.param(b'id: {"choices":[],"usage":{}}\n\n', None, id="another field"),
        pytest.param(b'Data: {"choices":[],"usage":{}}\n\n', None, id="no field at all"),
        pytest.param(b'{"choices":[],"usage":{}}\n\n', None, id="no event stream"),
        pytest.param(BOM + BOM + b'data: {"choices":[],"usage":{}}\n\n', None, id="two marks"),
        pytest.param(BOM[:2] + b'\ndata: {"choices":[],"usage":{}}\n\n', b"", id="half a mark"),
        pytest.param(b"\n" + BOM + b'data: {"choices":[],"usage":{}}\n\n', None, id="late mark"),
        pytest.param(BOM[:1], None, id="end in a mark"),
        pytest.param(b"", None, id="nothing"),
    ],
)
def test_what_is_a_usage_chunk_and_what_is_not(written: bytes, left: bytes | None) -> None:
    """The rule of the module, to the letter; anything else keeps every byte."""
    expected = written if left is None else left
    if len(written) < 1_000:
        assert_at_every_cut(written, expected)
    assert passed(written) == expected


@pytest.mark.parametrize("keep_alive", [": OPENROUTER PROCESSING\n\n", "id: 7\n: ping\n\n", ":\n"])
def test_keep_alives_between_all_events(keep_alive: str) -> None:
    """Comments and pings pass untouched, also right before the usage chunk."""
    ping = keep_alive.encode()
    events = [stream_of(event) for event in S_EVENTS]
    stream = ping.join([*events, b""])
    expected = ping.join([*events[:3], b"", events[4], b""])
    assert_at_every_cut(stream, expected)


def test_usage_beside_choices_stays() -> None:
    """Of a server that reports on every chunk only the last one goes, also with several choices."""
    events: list[object] = [
        {"choices": [], "prompt_filter_results": [{"prompt_index": 0}], "usage": None},
        chunk({"content": "a"}, usage={"prompt_tokens": 1, "completion_tokens": 1}),
        chunk({"content": "b"}, index=1, usage={"prompt_tokens": 1, "completion_tokens": 1}),
        chunk({"content": '"choices":[],"usage":{}'}, usage=None),
        {"error": {"message": "x", "choices": [], "usage": {}}},
    ]
    stream = stream_of(*events, total(1, 2), "[DONE]")
    assert_at_every_cut(stream, stream_of(*events, "[DONE]"))


def test_nothing_waits_longer_than_its_event() -> None:
    """Whole events and comments pass at once; a cut event goes out with its blank line."""
    remover = UsageChunkRemover()
    assert remover.feed(BOM) == BOM
    assert remover.feed(b"data: a\n\n") == b"data: a\n\n"
    assert remover.feed(b": pi") == b": pi"
    assert remover.feed(b"ng\n") == b"ng\n"
    assert remover.feed(b"data: b\n\ndata:") == b"data: b\n\n"
    assert remover.feed(b" c\n") == b""
    assert remover.feed(b": d\n") == b""
    assert remover.feed(b"\ndata: [DONE]\n\n") == b"data: c\n: d\n\ndata: [DONE]\n\n"
    assert remover.feed(b"data: g\n") == b""
    assert remover.feed(USAGE_EVENT) == b"data: g\n" + USAGE_EVENT
    assert remover.feed(b"data: e\r\r") == b"data: e\r\r"
    assert remover.feed(b"\n:") == b"\n:"
    assert remover.feed(b"\n") == b"\n"
    assert remover.feed(b"data: f") == b""
    assert remover.finish() == b"data: f"
    assert remover.finish() == b""


def test_half_of_a_line_ending_shares_its_fate() -> None:
    """A CR ends an event at once; an LF that follows is of the same line, kept or removed."""
    event = b'data: {"choices":[],"usage":{}}\r\n\r'
    remover = UsageChunkRemover()
    assert remover.feed(event) == b""
    assert remover.feed(b"\n") == b""
    assert remover.feed(b"\n") == b"\n"
    assert remover.feed(event) == b""
    assert remover.feed(b"data: a\n\n") == b"data: a\n\n"
    assert remover.feed(event + b"\n: a\r") == b": a\r"
    assert remover.feed(b"\n") == b"\n"


FIELDS = st.sampled_from(
    [
        *(b'data: {"choices":[],"usage":{"prompt_tokens":1}}',) * 3,
        b'data:{"usage":{},"choices": [ ] }',
        b'data: {"choices":[',
        b'data: ],"usage":[]}',
        b'data: {"choices":[],"usage":null}',
        b'data: {"choices":[{"index":0}],"usage":{}}',
        b"data: [DONE]",
        *(b"data:", b"data", b": a", b":", b"id: 7", b"event: ping", BOM, b"x"),
        *(b"",) * 5,
    ]
)
ENDINGS = st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"])


@st.composite
def _pieces(draw: st.DrawFn) -> list[bytes]:
    lines = draw(st.lists(st.tuples(FIELDS, ENDINGS).map(b"".join), max_size=20))
    mark = draw(st.sampled_from([b"", BOM, BOM[:1]]))
    stream = mark + b"".join(lines) + draw(st.just(b"") | FIELDS | st.binary(max_size=4))
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    return [stream[a:b] for a, b in itertools.pairwise([0, *cuts, len(stream)])]


def plain_removal(stream: bytes, limit: int) -> bytes:
    """The rule on a whole stream, in no haste."""
    mark = BOM if stream.startswith(BOM) else b""
    out, event = [mark], b""
    for line in re.findall(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+$", stream.removeprefix(mark)):
        if not event and line.startswith(b":"):
            out.append(line)
        elif line.strip(b"\r\n"):
            event += line
        else:
            out.append(rest_of(event, line, limit))
            event = b""
    return b"".join([*out, rest_of(event, b"", limit)])


def rest_of(event: bytes, blank_line: bytes, limit: int) -> bytes:
    """What is left of one event: all of it or its comments."""
    lines = re.findall(rb"[^\r\n]+[\r\n]*", event)
    data = []
    for line in lines:
        name, _, value = line.strip(b"\r\n").partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" ").decode("utf-8", "replace"))
    try:
        message: Any = json.loads("\n".join(data))
    except ValueError:
        message = None
    if len(event) > limit or not isinstance(message, dict):
        return event + blank_line
    if message.get("choices") != [] or message.get("usage") is None:
        return event + blank_line
    return b"".join(line for line in lines if line.startswith(b":"))


@settings(max_examples=400, deadline=None)
@given(_pieces())
def test_cuts_change_nothing(pieces: list[bytes]) -> None:
    """However it is cut, a stream loses exactly the events that a plain reading of the rule names."""
    stream = b"".join(pieces)
    assert passed(*pieces) == passed(stream) == plain_removal(stream, withhold.MAX_HELD_BYTES)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=12) | st.sampled_from([b"\n\n", b"data: ", b"\r", BOM])))
def test_any_bytes_pass_as_they_are(pieces: list[bytes]) -> None:
    """A stream without usage chunks, however broken, comes out as it went in."""
    assert passed(*pieces) == b"".join(pieces)


@pytest.fixture
def _small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(withhold, "MAX_HELD_BYTES", LIMIT)


def _usage_event(length: int, ending: bytes) -> bytes:
    """A usage chunk that long, its blank line not counted."""
    head = b'data: {"choices":[],"usage":"'
    return head + b"x" * (length - len(head) - 2 - len(ending)) + b'"}' + ending + ending


@pytest.mark.usefixtures("_small_limit")
@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_only_a_short_event_is_examined(ending: bytes) -> None:
    """A longer one passes unexamined at every cut, and the next one is examined again."""
    longest, too_long = _usage_event(LIMIT, ending), _usage_event(LIMIT + 1, ending)
    assert_at_every_cut(longest + too_long + longest, too_long)
    comment = b": " + b"x" * LIMIT + ending
    assert_at_every_cut(comment + longest, comment)
    assert_at_every_cut(too_long[: -len(ending)], too_long[: -len(ending)])


@pytest.mark.usefixtures("_small_limit")
@pytest.mark.parametrize(
    ("begun", "ended"),
    [
        (b": pi", b"ng\n\n"),
        (b"data: " + b"x" * LIMIT, b"y\n\n"),
        (b"data: " + b"x" * LIMIT + b"\n", b"data: y\r\n\r\n"),
        (b"data: a", b"\n\n"),
        (b"data: a\r", b"\n\r\n\r\n"),
    ],
)
def test_what_follows_a_cut_is_examined(begun: bytes, ended: bytes) -> None:
    """A feed that ends what an earlier one began leaves nothing behind for the next event."""
    assert passed(b"\n", begun, ended, _usage_event(LIMIT, b"\n")) == b"\n" + begun + ended


@pytest.mark.usefixtures("_small_limit")
def test_the_rest_of_a_long_event_does_not_wait() -> None:
    """Once an event is too long, it passes as it comes, up to its blank line."""
    remover = UsageChunkRemover()
    assert remover.feed(b"data: " + b"x" * (LIMIT - 6)) == b""
    assert remover.feed(b"y") == b"data: " + b"x" * (LIMIT - 6) + b"y"
    assert remover.feed(b"z") == b"z"
    assert remover.feed(b'\ndata: {"choices":[],"usage":1}\n') != b""
    assert remover.feed(b'\ndata: {"choices":[],"usage":1}\n') == b"\n"


@pytest.mark.usefixtures("_small_limit")
@settings(max_examples=200, deadline=None)
@given(_pieces(), st.integers(LIMIT - 3, LIMIT + 3), ENDINGS)
def test_cuts_change_nothing_near_the_limit(
    pieces: list[bytes], length: int, ending: bytes
) -> None:
    """The limit falls on the same events however they are cut."""
    pieces = [b"\n", _usage_event(length, ending), *pieces]
    stream = b"".join(pieces)
    assert passed(*pieces) == passed(stream) == plain_removal(stream, LIMIT)


def blocks_of(body: bytes) -> list[bytes]:
    """The events of a stream as vLLM writes it, each with its blank line."""
    return re.findall(rb"data: .*\n\n", body)


def is_total(block: bytes) -> bool:
    """Whether this event is a chunk of usage and nothing else."""
    return block != b"data: [DONE]\n\n" and json.loads(block[6:]).get("choices") == []


STREAMS = [name for name in response_names() if load(name).is_stream]


@pytest.mark.parametrize("name", STREAMS)
def test_recorded_streams_lose_their_total_only(name: str) -> None:
    """Everything that a real vLLM streamed passes, in the server's own pieces and any other."""
    response = load(name)
    blocks = blocks_of(response.body)
    assert b"".join(blocks) == response.body
    totals = [block for block in blocks if is_total(block)]
    asked = (response.request or {}).get("stream_options", {}).get("include_usage", False)
    assert len(totals) == (1 if asked or "forced" in name else 0)
    expected = b"".join(block for block in blocks if block not in totals)
    assert passed(*response.chunks) == passed(response.body) == expected
    assert passed(*(response.body[i : i + 1] for i in range(len(response.body)))) == expected
    for cut in range(0, len(response.body), 7 if len(response.body) < 10_000 else 4_001):
        assert passed(response.body[:cut], response.body[cut:]) == expected


VARYING = ("id", "created", "system_fingerprint")
"""Fields that differ from run to run, or (the last) that vLLM says on the last chunk only, which is the usage's."""


def shapes_of(body: bytes) -> list[object]:
    """Every event of a stream without what differs from run to run."""
    shapes: list[object] = []
    for block in blocks_of(body):
        if block == b"data: [DONE]\n\n":
            shapes.append("[DONE]")
        else:
            fields = json.loads(block[6:])
            shapes.append({name: fields[name] for name in fields if name not in VARYING})
    return shapes


@pytest.mark.parametrize(
    ("with_usage", "without"),
    [
        ("chat_stream_usage", "chat_stream_nousage"),
        ("chat_stream_usage", "chat_stream_continuous_without_include"),
        ("completions_stream_usage", "completions_stream_nousage"),
    ],
)
def test_a_recorded_stream_becomes_its_twin(with_usage: str, without: str) -> None:
    """The same request, recorded with and without usage: what is left of the one equals the other."""
    asked, silent = load(with_usage), load(without)
    for response in (asked, silent):
        assert response.request is not None
        response.request.pop("stream_options", None)
    assert asked.request == silent.request
    assert shapes_of(asked.body) != shapes_of(silent.body)
    assert shapes_of(passed(*asked.chunks)) == shapes_of(silent.body)


def test_one_byte_feeds_are_linear() -> None:
    """Four times the bytes take about four times the time, not sixteen times."""

    def seconds(length: int) -> float:
        remover = UsageChunkRemover()
        remover.feed(b"data: ")
        start = time.process_time()
        for _ in range(length):
            remover.feed(b"x")
        spent = time.process_time() - start
        assert remover.finish() == b"data: " + b"x" * length
        return spent

    short = min(seconds(15_000) for _ in range(3))
    long = min(seconds(60_000) for _ in range(3))
    assert long < 10 * short
