"""
Responses: the first byte says how the rest, which is what a backend sent, is cut and read.
"""

import contextlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from envoy_tokenpools.openai import sse, transcript, usage, withhold
from envoy_tokenpools.openai.usage import BodyMeter, Metered, StreamMeter
from envoy_tokenpools.openai.withhold import UsageChunkRemover
from tests.fuzz.json_values import spelled, text, value
from tests.support import captures
from tests.support.streams import S

_SMALL: Sequence[tuple[ModuleType, str, int]] = (
    (sse, "MAX_EVENT_BYTES", 512),
    (withhold, "MAX_HELD_BYTES", 128),
    (usage, "MAX_BODY_BYTES", 1_024),
    (transcript, "MAX_TEXT_CHARS", 64),
    (transcript, "MAX_CHANNELS", 3),
)
"""Limits so low that inputs of some hundred bytes go beyond them."""

_IS_SMALL = 1
_IS_BODY = 2
_CUTS_SHIFT = 2

_NAMES_OF_EVENTS = (
    *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
    *("message_delta", "message_stop", "error", "ping", "response.created", "response.completed"),
    *("response.output_text.delta", "response.function_call_arguments.delta", "response.failed"),
    *(
        "response.reasoning_summary_text.delta",
        "response.output_item.added",
        "response.audio.delta",
    ),
)
_RECORDED = [captures.load(name).body for name in captures.response_names()]
_KEEP_ALIVES = (b": ping\n\n", b"id: 7\n", b"event: x\n", b"retry: 3\n", b"\n", b":\n", b"\r\n")
_ENDS_OF_LINES = (b"\n", b"\n", b"\n", b"\r\n", b"\r")


def fuzz_stream(data: bytes) -> dict[str, int]:
    """
    Meter a response, cut anywhere, and take the usage chunk out of it.

    Nothing raises, what is held stays within its limits, and the cuts make no difference.
    """
    if not data:
        return {}
    how, body = data[0], data[1:]
    sizes, body = _sizes(how >> _CUTS_SHIFT, body)
    pieces = list(_cut(body, sizes))
    with _small_limits() if how & _IS_SMALL else contextlib.nullcontext():
        if how & _IS_BODY:
            metered = _meter_body(pieces)
            assert metered == _meter_body([body])
        else:
            metered = _meter_stream(pieces)
            whole = _meter_stream([body])
            # An oversized event behind the end is ignored, unless it comes in the same piece as that.
            is_told_apart = b"[DONE]" in body and metered.unread != whole.unread
            assert is_told_apart or metered == whole
            assert _pass(pieces, body) == _pass([body], body)
    return {
        "finished": metered.finished,
        "reported": metered.usage is not None,
        "with_text": bool(metered.texts),
        "with_unread": metered.unread > 0,
    }


def _sizes(count: int, body: bytes) -> tuple[Sequence[int], bytes]:
    """Sizes of the pieces, repeated over and over: from the next bytes, none if it is not to be cut."""
    count %= 6
    return [1 + size for size in body[:count]], body[count:]


def _cut(body: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    if not sizes:
        yield body
        return
    at = 0
    for size in itertools.cycle(sizes):
        if at >= len(body):
            return
        yield body[at : at + size]
        at += size


@contextlib.contextmanager
def _small_limits() -> Iterator[None]:
    usual = [(module, name, getattr(module, name)) for module, name, _ in _SMALL]
    try:
        for module, name, limit in _SMALL:
            setattr(module, name, limit)
        yield
    finally:
        for module, name, limit in usual:
            setattr(module, name, limit)


def _meter_stream(pieces: Sequence[bytes]) -> Metered:
    meter = StreamMeter()
    decoder = meter._decoder
    for piece in pieces:
        meter.feed(piece)
        assert len(decoder._line) <= sse.MAX_EVENT_BYTES
        # Each line may add its line feed to data that fits without it.
        assert len(decoder._data) <= sse.MAX_EVENT_BYTES + 1
    return _checked(meter.finish(), meter.finish())


def _meter_body(pieces: Sequence[bytes]) -> Metered:
    meter = BodyMeter()
    for piece in pieces:
        meter.feed(piece)
        assert len(meter._body) <= usage.MAX_BODY_BYTES
    return _checked(meter.finish(), meter.finish())


def _checked(metered: Metered, again: Metered) -> Metered:
    assert metered is again
    assert sum(map(len, metered.texts)) <= transcript.MAX_TEXT_CHARS
    for generated in metered.texts:
        generated.encode()
    # One that is shared, and one for each kind of text that has no place.
    assert len(metered.texts) <= transcript.MAX_CHANNELS + 1
    assert metered.overflow_chars >= 0
    assert metered.unread >= 0
    assert metered.token_ids >= 0
    if metered.usage is not None:
        for tokens in (metered.usage.prompt_tokens, metered.usage.completion_tokens):
            assert tokens is None or (type(tokens) is int and 0 <= tokens <= transcript.MAX_TOKENS)
    return metered


def _pass(pieces: Sequence[bytes], body: bytes) -> bytes:
    remover = UsageChunkRemover()
    passed = []
    for piece in pieces:
        passed.append(remover.feed(piece))
        assert len(remover._held) <= withhold.MAX_HELD_BYTES
    passed.append(remover.finish())
    assert not remover._held
    whole = b"".join(passed)
    assert len(whole) <= len(body)
    if b"usage" not in body and b"\\u" not in body:
        assert whole == body
    return whole


def response(rng: random.Random) -> bytes:
    """A response like those that backends send, with odd events in some."""
    cuts = rng.randrange(6)
    is_body = rng.random() < 0.15
    how = (rng.random() < 0.5) | is_body << 1 | cuts << _CUTS_SHIFT
    head = bytes((how, *(rng.choice((0, 1, 3, 15, 60, 200)) for _ in range(cuts))))
    if rng.random() < 0.15:
        return head + rng.choice((S, rng.choice(_RECORDED)))
    if is_body:
        return head + spelled(_event(rng, "message") | {"output": value(rng)}, rng)
    end = rng.choice(_ENDS_OF_LINES)
    parts = [b"\xef\xbb\xbf"] if rng.random() < 0.05 else []
    for _ in range(rng.choice((1, 2, 4, 8))):
        payload = spelled(_event(rng, "delta"), rng)
        lines = payload.split(b"\n") if rng.random() < 0.9 else [payload]
        parts += [b"data: " + line + end for line in lines]
        parts.append(end)
        if rng.random() < 0.2:
            parts.append(rng.choice(_KEEP_ALIVES))
    if rng.random() < 0.7:
        parts.append(b"data: [DONE]" + end + end)
    return head + b"".join(parts)


def _event(rng: random.Random, part: str) -> dict[str, Any]:
    kind = rng.random()
    event: dict[str, Any]
    if kind < 0.5:
        event = {"choices": [_choice(rng, part) for _ in range(rng.choice((1, 1, 1, 2, 5)))]}
    elif kind < 0.65:
        event = {"choices": [], "usage": _usage(rng)}
    elif kind < 0.85:
        event = _typed(rng)
    elif kind < 0.93:
        event = {rng.choice(("text", "generated_text")): text(rng), "meta_info": _usage(rng)}
    else:
        event = {"choices": value(rng)}
    if rng.random() < 0.2:
        event["usage"] = _usage(rng)
    if rng.random() < 0.1:
        event[rng.choice(transcript.Message.__struct_fields__)] = value(rng)
    return event


def _choice(rng: random.Random, part: str) -> dict[str, Any]:
    names = ("content", "reasoning", "reasoning_content", "refusal", "tool_calls", "function_call")
    message = {
        rng.choice(names): text(rng) if rng.random() < 0.7 else value(rng)
        for _ in range(rng.choice((0, 1, 1, 2)))
    }
    place: Any = rng.choice((0, 0, 1, 2, 9, None, True, -1))
    choice: dict[str, Any] = {"index": place, part: message if rng.random() < 0.95 else value(rng)}
    if rng.random() < 0.2:
        choice["finish_reason"] = rng.choice(("stop", "", None, value(rng, 1)))
    if rng.random() < 0.1:
        choice[rng.choice(("text", "token_ids"))] = rng.choice((text(rng), [1, 2], [3], value(rng)))
    return choice


def _usage(rng: random.Random) -> Any:
    if rng.random() < 0.1:
        return value(rng)
    names = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total_tokens")
    counts = (0, 1, 9, 26, 2**53 - 1, 2**53, 2**53 + 1, -1, None, 1.0, True, "7")
    return {name: rng.choice(counts) for name in names if rng.random() < 0.6}


def _typed(rng: random.Random) -> dict[str, Any]:
    fields = ("delta", "item", "content_block", "message", "response", "index", "output_index")
    event: dict[str, Any] = {"type": rng.choice(_NAMES_OF_EVENTS)}
    for _ in range(rng.choice((1, 2, 3))):
        event[rng.choice((*fields, "content_index", "summary_index"))] = value(rng, 2)
    if rng.random() < 0.3:
        event["message"] = {"usage": _usage(rng)}
    if rng.random() < 0.2:
        event["response"] = json.loads(json.dumps({"usage": _usage(rng), "error": value(rng, 1)}))
    return event
