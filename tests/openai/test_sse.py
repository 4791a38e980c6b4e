"""The event-stream decoder: every way to end a line, to cut the bytes, and to be too long."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.openai import sse
from envoy_tokenpools.openai.sse import SseDecoder


def decoded(*pieces: bytes) -> list[bytes]:
    """All events of a stream fed in pieces."""
    decoder = SseDecoder()
    events = [event for piece in pieces for event in decoder.feed(piece)]
    return events + decoder.finish()


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        pytest.param(b"data: a\n\ndata: b\n\n", [b"a", b"b"], id="LF"),
        pytest.param(b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"], id="CRLF"),
        pytest.param(b"data: a\r\rdata: b\r\r", [b"a", b"b"], id="CR"),
        pytest.param(b"data: a\r\n\ndata: b\n\r\n", [b"a", b"b"], id="mixed line endings"),
        pytest.param(b"\xef\xbb\xbfdata: a\n\n", [b"a"], id="byte order mark"),
        pytest.param(b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", [], id="only one mark is removed"),
        pytest.param(b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"], id="no mark after the start"),
        pytest.param(b"data: a\n\xef\xbb\xbf\n\n", [b"a"], id="a mark is no blank line later on"),
        pytest.param(b"data: a\ndata: b\n\n", [b"a\nb"], id="lines joined with LF"),
        pytest.param(b"data: a\r\ndata: b\r\n\r\n", [b"a\nb"], id="lines joined, CRLF"),
        pytest.param(b"data: a\ndata:\ndata\ndata: b\n\n", [b"a\n\n\nb"], id="empty data lines"),
        pytest.param(b"data:a\n\ndata:  b\n\n", [b"a", b" b"], id="one leading space is removed"),
        pytest.param(b": data: a\n\n:\n\n", [], id="comments"),
        pytest.param(b"data: a\n: ping\ndata: b\n\n", [b"a\nb"], id="comment inside an event"),
        pytest.param(b"event: x\nid: 1\nretry: 5\ndata: a\n\n", [b"a"], id="other fields"),
        pytest.param(b"datas: a\nDATA: b\n data: c\n\n", [], id="names that only look like data"),
        pytest.param(b"event: ping\ndata:\n\nid: 7\n\ndata\n\ndata: \n\n", [], id="empty data"),
        pytest.param(b"data: a", [b"a"], id="end inside a line"),
        pytest.param(b"data: a\n", [b"a"], id="end before the blank line"),
        pytest.param(b"data: a\r", [b"a"], id="end after a CR"),
        pytest.param(b"data: a\n\n: bye", [b"a"], id="end inside a comment"),
        pytest.param(b"data: a: b\n\n", [b"a: b"], id="colon in the value"),
        pytest.param(b"data: \x00\xff\x0b\x0c\x1c\xc2\x85\n\n", [b"\x00\xff\x0b\x0c\x1c\xc2\x85"]),
        pytest.param(b"", [], id="nothing"),
    ],
)
def test_rules_hold_at_every_cut(stream: bytes, events: list[bytes]) -> None:
    """A stream gives its events whole, byte by byte, and cut in two or with empty feeds anywhere."""
    assert decoded(stream) == events
    assert decoded(*(stream[i : i + 1] for i in range(len(stream)))) == events
    for cut in range(len(stream) + 1):
        assert decoded(stream[:cut], b"", stream[cut:]) == events


@pytest.mark.parametrize(
    "feed",
    [
        b"data: a\n\n",
        b"data: a\rdata: b\n\n",
        b"data: a\n\ndata: b\n\n",
        b"data: a\ndata: b\n\n",
        b"data: a\n\r",
        b"data: a\r\n",
        b"data: \n\n",
        b"data:  \n\n",
        b"data: a\nx",
        b"data: a\n",
        b"data: a",
        b"data: ",
        b"data:\n\n",
    ],
)
def test_short_way_and_long_way_agree(feed: bytes) -> None:
    """A feed that is one whole event, or nearly, is read as the standard says, also after others."""
    for before in (
        b"\n",
        b"data: 1\n\n",
        b"data: 1\n\ndata: 2\n\n",
        b": c\r\n",
        b"data: 1\n",
        b"data",
    ):
        assert decoded(before, feed, feed) == plain_reading(before + feed + feed)


def test_event_is_dispatched_by_its_last_byte() -> None:
    """An event comes out with its blank line, a CR included, and not with a later feed."""
    decoder = SseDecoder()
    assert decoder.feed(b"data: a\n") == []
    assert decoder.feed(b"\n") == [b"a"]
    assert decoder.feed(b"data: b\r\n\r") == [b"b"]
    assert decoder.feed(b"\ndata: c\n\n") == [b"c"]
    assert decoder.feed(b"data: d\n\n") == [b"d"]


def test_finish_dispatches_once() -> None:
    """Finishing again gives nothing more."""
    decoder = SseDecoder()
    decoder.feed(b"data: a\ndata: b")
    assert decoder.finish() == [b"a\nb"]
    assert decoder.finish() == []


_LINES = st.sampled_from(
    [
        b"data: a",
        b"data:",
        b"data",
        b"data:  b",
        b": c",
        b"event: d",
        b"",
        b"",
        b"\xef\xbb\xbf",
        b"x",
    ]
)
_ENDINGS = st.sampled_from([b"\n", b"\r", b"\r\n"])


@st.composite
def _streams_and_cuts(draw: st.DrawFn) -> tuple[bytes, list[int]]:
    lines = draw(st.lists(st.tuples(_LINES, _ENDINGS).map(b"".join), max_size=20))
    stream = b"".join(lines) + draw(st.binary(max_size=6))
    cuts = st.lists(st.integers(0, len(stream)), max_size=6)
    return stream, sorted(draw(cuts))


@given(_streams_and_cuts())
def test_cuts_change_nothing(case: tuple[bytes, list[int]]) -> None:
    """However a stream is cut, its events are those of one feed, which agree with plain WHATWG rules."""
    stream, cuts = case
    bounds = [0, *cuts, len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(bounds)]
    assert decoded(*pieces) == decoded(stream) == plain_reading(stream)


def plain_reading(stream: bytes) -> list[bytes]:
    """The events of a whole stream, by the letter of the standard and without any haste."""
    stream = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events, data = [], []
    for line in [*stream.split(b"\n"), b""]:
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
        elif not line:
            events.append(b"\n".join(data))
            data = []
    return [event for event in events if event]


LIMIT = 100


@pytest.fixture
def _small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", LIMIT)


def _data_line(length: int) -> bytes:
    return b"data: " + b"x" * (length - 6)


@pytest.mark.usefixtures("_small_limit")
@pytest.mark.parametrize(
    ("event", "payload"),
    [
        pytest.param(_data_line(LIMIT), b"x" * (LIMIT - 6), id="longest line"),
        pytest.param(_data_line(LIMIT + 1), None, id="one byte too long"),
        pytest.param(_data_line(20 * LIMIT), None, id="much too long"),
        pytest.param(_data_line(LIMIT + 1) + b"\ndata: y", None, id="dropped with what follows"),
        pytest.param(b"\n".join([_data_line(LIMIT + 1)] * 3), None, id="counted once"),
        pytest.param(
            b"data: y\n" + _data_line(LIMIT + 1), None, id="dropped with what came before"
        ),
        pytest.param(b"\n".join([b"data:"] * LIMIT), b"\n" * (LIMIT - 1), id="most lines"),
        pytest.param(b"\n".join([_data_line(60)] * 2), None, id="lines too long together"),
        pytest.param(b":" + b"x" * 300 + b"\ndata: y", b"y", id="long comment harms nothing"),
        pytest.param(b"id: " + b"x" * 300 + b"\ndata: y", b"y", id="long other field either"),
    ],
)
def test_oversized_event_is_dropped_whole_and_counted(event: bytes, payload: bytes | None) -> None:
    """A too long event vanishes alone, is counted once, and its neighbours come out at every cut."""
    stream = b"data: before\n\n" + event + b"\n\ndata: after\n\n"
    expected = [b"before", *([payload] if payload is not None else []), b"after"]
    for cut in range(len(stream) + 1):
        decoder = SseDecoder()
        events = decoder.feed(stream[:cut]) + decoder.feed(stream[cut:])
        assert events == expected
        assert decoder.oversized == (payload is None)


@pytest.mark.usefixtures("_small_limit")
def test_oversized_first_line_behind_a_byte_order_mark() -> None:
    """The mark hides neither that the line is data nor where it ends."""
    decoder = SseDecoder()
    stream = b"\xef\xbb\xbf" + _data_line(200) + b"\n\ndata: a\n\n"
    assert [event for i in range(len(stream)) for event in decoder.feed(stream[i : i + 1])] == [
        b"a"
    ]
    assert decoder.oversized == 1


@pytest.mark.usefixtures("_small_limit")
@pytest.mark.parametrize(
    ("feeds", "events", "oversized"),
    [
        ([_data_line(LIMIT) + b"\n\n"], [b"x" * (LIMIT - 6)], 0),
        ([_data_line(LIMIT + 1) + b"\n\n"], [], 1),
        ([_data_line(LIMIT + 1) + b"\n", b"data: same\n\n"], [], 1),
        ([_data_line(LIMIT + 1), b"data: same\n\n"], [], 1),
        ([b":" + b"x" * LIMIT, b"data: same\n\n"], [], 0),
        ([b":" + b"x" * LIMIT, b"\n", b"data: a\n\n"], [b"a"], 0),
    ],
)
def test_whole_feeds_after_an_oversized_one(
    feeds: list[bytes], events: list[bytes], oversized: int
) -> None:
    """A feed that looks like one whole event is still part of the long one that it continues."""
    decoder = SseDecoder()
    fed = [event for feed in [b"\n", *feeds, b"data: after\n\n"] for event in decoder.feed(feed)]
    assert fed == [*events, b"after"]
    assert decoder.oversized == oversized


@pytest.mark.usefixtures("_small_limit")
def test_no_byte_order_mark_after_a_line_too_long() -> None:
    """Only the very first line may have one, also when that line was skipped."""
    assert decoded(b":" + b"x" * 200 + b"\n\xef\xbb\xbfdata: a\n\n") == []


@pytest.mark.usefixtures("_small_limit")
def test_oversized_tail_is_no_event() -> None:
    """A stream that ends inside a too long event gives nothing of it."""
    decoder = SseDecoder()
    assert decoder.feed(b"data: a\n" + _data_line(200)) == []
    assert decoder.finish() == []
    assert decoder.oversized == 1


@pytest.mark.usefixtures("_small_limit")
@given(_streams_and_cuts(), st.integers(60, 140))
def test_cuts_change_nothing_near_the_limit(case: tuple[bytes, list[int]], length: int) -> None:
    """The limit falls on the same events however they are cut."""
    stream, cuts = case
    stream = b"data: 1\n" + _data_line(length) + b"\n" + stream
    bounds = [0, *cuts, len(stream)]
    whole, cut = SseDecoder(), SseDecoder()
    expected = whole.feed(stream) + whole.finish()
    events = [event for a, b in itertools.pairwise(bounds) for event in cut.feed(stream[a:b])]
    assert events + cut.finish() == expected
    assert cut.oversized == whole.oversized


def test_memory_stays_bounded() -> None:
    """A line without an end does not grow what is held."""
    decoder = SseDecoder()
    piece = b"x" * (sse.MAX_EVENT_BYTES // 4)
    decoder.feed(b"data: ")
    for _ in range(40):
        decoder.feed(piece)
        assert len(decoder._line) + len(decoder._data) <= sse.MAX_EVENT_BYTES
    assert decoder.feed(b"\n\ndata: a\n\n") == [b"a"]


def test_one_byte_feeds_of_a_long_line_are_linear() -> None:
    """Four times the bytes take about four times the time, not sixteen times."""

    def seconds(length: int) -> float:
        decoder = SseDecoder()
        decoder.feed(b"data: ")
        start = time.process_time()
        for _ in range(length):
            decoder.feed(b"x")
        spent = time.process_time() - start
        assert decoder.finish() == [b"x" * length]
        return spent

    short = min(seconds(50_000) for _ in range(3))
    long = min(seconds(200_000) for _ in range(3))
    assert long < 10 * short
