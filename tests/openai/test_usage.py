"""The meters: however a response is cut, however broken it is, they answer once and stay bounded."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.openai import sse, transcript, usage
from envoy_tokenpools.openai.usage import (
    BodyMeter,
    Metered,
    StreamMeter,
    Usage,
    meter_for,
)
from tests.support.streams import (
    S_EVENTS,
    S_METERED,
    S_TEXT,
    S,
    chunk,
    fed,
    of_stream,
    stream_of,
    total,
)

# The stream and the body, cut anywhere


def test_canonical_stream_is_the_documented_one() -> None:
    """The stream of the cut tests has the length that its cut offsets assume."""
    assert len(S) == 643
    assert S.index(b'"usage"') < 560 < S.index(b'"prompt_tokens"')
    assert S.index(b"data: [DONE]") == 629


def test_stream_cut_at_every_offset() -> None:
    """Usage and text are the same whole, byte by byte, and cut in two anywhere."""
    assert fed(StreamMeter(), S) == S_METERED
    assert fed(StreamMeter(), *(S[i : i + 1] for i in range(len(S)))) == S_METERED
    for cut in range(len(S) + 1):
        assert fed(StreamMeter(), S[:cut], S[cut:], b"") == S_METERED


def test_stream_without_usage_gives_its_text() -> None:
    """Without a report the caller gets the joined text, at every cut."""
    silent = stream_of(*S_EVENTS[:3], S_EVENTS[4])
    for cut in range(len(silent) + 1):
        metered = fed(StreamMeter(), silent[:cut], silent[cut:])
        assert (metered.usage, metered.texts) == (None, (S_TEXT,))


@given(st.lists(st.integers(0, len(S)), max_size=8).map(sorted))
def test_stream_cut_in_many_pieces(cuts: list[int]) -> None:
    """Any number of cuts changes nothing."""
    pieces = [S[a:b] for a, b in itertools.pairwise([0, *cuts, len(S)])]
    assert fed(StreamMeter(), *pieces) == S_METERED


_BODY = (
    b'{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"Hello world"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,'
    b'"completion_tokens":7,"total_tokens":12}}'
)


def test_plain_body_cut_at_every_offset() -> None:
    """A JSON answer in several messages is read as one, with usage and without."""
    silent = _BODY[: _BODY.index(b',"usage"')] + b"}"
    for body, reported in ((_BODY, Usage(5, 7)), (silent, None)):
        for cut in range(len(body) + 1):
            assert fed(BodyMeter(), body[:cut], body[cut:], b"") == Metered(
                reported, ("Hello world",), finished=True, error=False, overflow_chars=0, unread=0
            )


@pytest.mark.parametrize(
    ("content_type", "meter"),
    [
        ("text/event-stream", StreamMeter),
        ("text/event-stream; charset=utf-8", StreamMeter),
        ("Text/Event-Stream;charset=UTF-8", StreamMeter),
        (" text/event-stream ", StreamMeter),
        ("application/json", BodyMeter),
        ("application/json; x=text/event-stream", BodyMeter),
        ("text/event-streams", BodyMeter),
        ("", BodyMeter),
    ],
)
def test_content_type_chooses_the_meter(content_type: str, meter: type[object]) -> None:
    """The response's own type decides, whatever the request asked for."""
    assert type(meter_for(content_type)) is meter


# Comments, pings, tails


@pytest.mark.parametrize(
    "noise",
    [
        b": OPENROUTER PROCESSING\n\n",
        b"id: 7\n: ping\n\n",
        b"event: ping\ndata:\n\n",
        b"data:  \n\n",
        b":\n",
        b'event: ping\ndata: {"type": "ping"}\n\n',
        b"data: null\n\n",
    ],
)
def test_keep_alives_are_neither_data_nor_faults(noise: bytes) -> None:
    """Noise between any two events, cut anywhere, changes nothing and is not a first output."""
    events = S.split(b"\n\n")[:-1]
    stream = noise + b"".join(event + b"\n\n" + noise for event in events)
    for cut in range(len(stream) + 1):
        assert fed(StreamMeter(), stream[:cut], stream[cut:]) == S_METERED
    meter = StreamMeter()
    meter.feed(noise * 3 + events[0] + b"\n\n" + noise)
    assert not meter.first_output


@pytest.mark.parametrize("tail", [b"", b"\n", b"\r\n"])
def test_usage_in_an_unterminated_tail_counts(tail: bytes) -> None:
    """A stream that ends with the usage event, its blank line missing, is metered all the same."""
    stream = S[: S.index(b"\n\ndata: [DONE]")] + tail
    assert fed(StreamMeter(), stream, b"") == S_METERED


def test_disconnect_in_the_middle_of_an_event_is_no_fault() -> None:
    """What was delivered counts; the event that was cut short is not called unreadable."""
    cut = S.index(b" world")
    metered = fed(StreamMeter(), S[:cut])
    assert metered == Metered(
        None, ("Hello 你好",), finished=False, error=False, overflow_chars=0, unread=0
    )


# What is the first output


@pytest.mark.parametrize(
    ("event", "is_output"),
    [
        (chunk({"role": "assistant", "content": ""}), False),
        (chunk({"role": "assistant", "content": None}), False),
        (chunk({}), False),
        (chunk(None), False),
        (chunk({"reasoning_content": "", "tool_calls": []}), False),
        (chunk({"tool_calls": [{"index": 0, "id": "x", "function": {"arguments": ""}}]}), False),
        (total(1, 2), False),
        ({"choices": [{"index": 0, "text": ""}]}, False),
        ({"type": "message_start", "message": {"usage": {"output_tokens": 1}}}, False),
        ({"type": "content_block_start", "content_block": {"type": "text", "text": ""}}, False),
        ({"type": "response.created", "response": {"usage": None}}, False),
        ({"error": {"message": "broken"}}, False),
        (chunk({"content": " "}), True),
        (chunk({"reasoning_content": "a"}), True),
        (chunk({"reasoning": "a"}), True),
        (chunk({"refusal": "a"}), True),
        (chunk({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}), True),
        (chunk({"function_call": {"name": "f"}}), True),
        ({"choices": [{"index": 0, "text": "a"}]}, True),
        ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}, True),
        ({"type": "response.output_text.delta", "delta": "a"}, True),
    ],
)
def test_first_output(event: dict[str, object], is_output: bool) -> None:  # noqa: FBT001
    """Only a generated piece is a first output: no role, no empty delta, no usage, no error."""
    meter = StreamMeter()
    meter.feed(stream_of(event))
    assert meter.first_output is is_output


def test_first_output_of_a_body_comes_with_its_end() -> None:
    """A body's output is known only when it is whole."""
    meter = BodyMeter()
    meter.feed(_BODY)
    before = meter.first_output
    meter.finish()
    assert (before, meter.first_output) == (False, True)


def test_settles_once() -> None:
    """A second [DONE], bytes behind it, feeding on and finishing again change nothing."""
    again = stream_of(chunk({"content": "more"}), total(99, 99), "[DONE]", "{broken")
    for pieces in ((S, b"", again), (S + again,), (S + again[:40],), (S, stream_of("[DONE]"))):
        meter = StreamMeter()
        first = fed(meter, *pieces)
        assert first == S_METERED
        assert fed(meter, again) is first
    body = BodyMeter()
    first = fed(body, _BODY)
    assert fed(body, _BODY) is first
    assert not body._body


def test_nothing_is_held_or_seen_after_the_end() -> None:
    """After `[DONE]` no bytes are kept, and after finishing nothing becomes a first output."""
    meter = StreamMeter()
    meter.feed(S + b"data: more")
    meter.feed(b"and more")
    assert not meter._decoder._line.endswith(b"and more")
    late = StreamMeter()
    late.finish()
    late.feed(S)
    assert not late.first_output


# Broken and hostile bytes


def test_emoji_cut_between_deltas() -> None:
    """Surrogate halves in neighbouring deltas become the emoji again."""
    stream = stream_of(
        r'{"choices":[{"index":0,"delta":{"content":"a\ud83d"}}]}',
        r'{"choices":[{"index":1,"delta":{"content":"\ude00"}}]}',
        r'{"choices":[{"index":0,"delta":{"content":"\ude00b"}}]}',
        r'{"choices":[{"index":2,"delta":{"content":"\ufeff\ud83d"}}]}',
    )
    metered = fed(StreamMeter(), stream)
    assert metered.texts == ("a\U0001f600b", "\ufffd", "\ufeff\ufffd")
    assert metered.unread == 0


def test_careless_json_is_read() -> None:
    """NaN and broken UTF-8, which some backends write, cost no event."""
    stream = (
        b'data: {"choices":[{"delta":{"content":"a"},"logprobs":{"logprob":-Infinity}}],'
        b'"usage":{"prompt_tokens":NaN,"completion_tokens":3}}\n\n'
        b'data: {"choices":[{"delta":{"content":"\xf0\x9f"}}]}\n\n'
    )
    metered = fed(StreamMeter(), stream)
    assert (metered.usage, metered.texts, metered.unread) == (None, ("a\ufffd",), 0)


@pytest.mark.parametrize(
    "payload",
    [
        b"{broken",
        b'{"choices":[',
        b"data: twice",
        b"[" * 100_000,
        b'{"choices":' + b"[" * 100_000,
        b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"zzz":' + b'{"a":' * 100_000,
        b"9" * 5_000,
        b"\xff\xfe\x00",
    ],
)
def test_events_that_are_no_json_are_counted(payload: bytes) -> None:
    """An unreadable event is skipped and counted; its neighbours are read."""
    stream = S.replace(b"data: [DONE]", b"data: " + payload + b"\n\ndata: [DONE]")
    metered = fed(StreamMeter(), stream)
    assert (metered.usage, metered.texts, metered.unread) == (Usage(26, 9), (S_TEXT,), 1)
    body = fed(BodyMeter(), payload)
    assert (body.usage, body.texts, body.finished, body.unread) == (None, (), False, 1)


@pytest.mark.parametrize("payload", ["null", "7", "true", '"text"', "[]", "[1,2]", "{}"])
def test_json_without_content_is_no_fault(payload: str) -> None:
    """JSON that says nothing changes nothing."""
    assert of_stream(*S_EVENTS[:2], payload, *S_EVENTS[2:]) == S_METERED


def test_deep_arguments_are_passed_over() -> None:
    """Tool arguments nested as deeply as can be read, or a little less, never raise."""
    call = '{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":%s}}]}}]}'
    for depth in range(800, 1_000):
        nested = '{"a":' * depth + "1" + "}" * depth
        metered = of_stream(call % nested, total(1, 2))
        assert metered.usage == Usage(1, 2)


def test_oversized_event_is_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event above the decoder's bound is counted as unread, and the stream goes on."""
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 200)
    metered = of_stream(chunk({"content": "x" * 300}), chunk({"content": "y"}), total(1, 2))
    assert (metered.texts, metered.unread, metered.usage) == (("y",), 1, Usage(1, 2))


def test_body_above_the_bound_is_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that is too long has no usage, says so, and is not held."""
    monkeypatch.setattr(usage, "MAX_BODY_BYTES", len(_BODY))
    assert fed(BodyMeter(), _BODY[:10], _BODY[10:]).usage == Usage(5, 7)
    meter = BodyMeter()
    meter.feed(_BODY)
    assert not meter.too_large
    meter.feed(b" ")
    assert meter.too_large
    assert not meter._body
    meter.feed(_BODY)
    assert meter.finish() == Metered(
        None, (), finished=False, error=False, overflow_chars=0, unread=1
    )


def test_body_cut_short_is_unread() -> None:
    """Half a body has no usage and is not finished; no body at all is no fault."""
    assert fed(BodyMeter(), _BODY[:-1]) == Metered(
        None, (), finished=False, error=False, overflow_chars=0, unread=1
    )
    assert fed(BodyMeter(), b"") == Metered(
        None, (), finished=False, error=False, overflow_chars=0, unread=0
    )


def test_held_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text beyond the bound is counted in characters, over all channels together."""
    monkeypatch.setattr(transcript, "MAX_TEXT_CHARS", 10)
    events = [chunk({"content": "abcd"}, 0), chunk({"content": "efgh"}, 1)]
    metered = of_stream(*events, chunk({"content": "ijkl"}, 0), chunk({"content": "m"}, 2))
    assert (metered.texts, metered.overflow_chars) == (("abcdij", "efgh"), 3)


def test_channels_and_choices_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of channels beyond the bound are kept in one, and no choice's usage is lost."""
    monkeypatch.setattr(transcript, "MAX_CHANNELS", 2)
    reported = {"prompt_tokens": 1, "completion_tokens": 3}
    events = [
        chunk({"content": str(index % 10)}, index, usage=reported)
        for index in (0, 1, 10**30, -7, 55, 0)
    ]
    metered = of_stream(*events)
    assert metered.texts == ("00", "1", "035")
    assert metered.usage == Usage(1, 9)


def test_hostile_sizes_stay_bounded() -> None:
    """Endless choices, tools and text hold no more than the bounds allow."""
    meter = StreamMeter()
    for index in range(2 * transcript.MAX_CHANNELS):
        tool = {"index": index, "function": {"name": "n", "arguments": "a"}}
        meter.feed(stream_of(chunk({"content": "c", "tool_calls": [tool]}, index)))
    script = meter._transcript
    assert len(script._channels) <= transcript.MAX_CHANNELS + 1
    assert len(script._choices) <= transcript.MAX_CHANNELS + 1
    for _ in range(4):
        meter.feed(stream_of(chunk({"content": "x" * (transcript.MAX_TEXT_CHARS // 2)})))
    metered = meter.finish()
    held = sum(map(len, metered.texts))
    assert held == transcript.MAX_TEXT_CHARS
    pieces = 6 * transcript.MAX_CHANNELS
    assert held + metered.overflow_chars == pieces + 2 * transcript.MAX_TEXT_CHARS


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_random_bytes_never_raise(pieces: list[bytes]) -> None:
    """Whatever comes, a meter answers, and the same for one piece as for many."""
    for meter in (StreamMeter, BodyMeter):
        metered = fed(meter(), *pieces)
        assert metered == fed(meter(), b"".join(pieces))
        "".join(metered.texts).encode()


@given(st.binary(max_size=30), st.integers(0, len(S)), st.integers(0, 30))
def test_damaged_streams_never_raise(damage: bytes, place: int, cut_out: int) -> None:
    """A stream damaged anywhere is metered the same whole and byte by byte."""
    stream = S[:place] + damage + S[place + cut_out :]
    bytewise = (stream[i : i + 1] for i in range(len(stream)))
    assert fed(StreamMeter(), stream) == fed(StreamMeter(), *bytewise)


@pytest.mark.parametrize(
    ("content_type", "cut"), [("text/event-stream", 7), ("application/json", 5)]
)
def test_tokens_that_come_as_ids_are_output(content_type: str, cut: int) -> None:
    """As /inference/v1/generate of vLLM answers, with ids and no text: they count, and they are the first output."""
    choice = {"index": 0, "token_ids": [5, 6, 7], "finish_reason": "length"}
    body = json.dumps({"choices": [choice], "usage": None}).encode()
    if content_type == "text/event-stream":
        body = b"data: " + body + b"\n\ndata: [DONE]\n\n"
    meter = meter_for(content_type)
    meter.feed(body[:cut])
    meter.feed(body[cut:])
    metered = meter.finish()
    assert (metered.token_ids, metered.usage, metered.texts) == (3, None, ())
    assert meter.first_output


def test_ids_that_are_no_list_are_passed_over() -> None:
    """As `token_ids: null` on every ordinary chunk of vLLM."""
    meter = meter_for("text/event-stream")
    meter.feed(b'data: {"choices":[{"index":0,"token_ids":null},{"index":1,"token_ids":7}]}\n\n')
    assert meter.finish().token_ids == 0
