"""The meters on everything recorded from a real vLLM, against a simple reading of whole bodies."""

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from envoy_tokenpools.openai.usage import Metered, Usage, meter_for
from tests.support.captures import Recorded, load, response_names
from tests.support.streams import fed

EVERY_OFFSET_BELOW = 8 * 1024
STRIDE = 6_151
"""Prime, so that the cuts of a larger body fall on ever other places of its events."""

NAMES = response_names()

NO_ANSWERS = frozenset(("err_404", "err_405", "models", "models_tiny"))
"""Bodies of no dialect that generates: a web framework's own errors, lists of models."""


@functools.cache
def recorded(name: str) -> Recorded:
    """A recorded response, read once."""
    return load(name)


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The JSON events of a whole stream, as vLLM writes it: one data line and a blank line each."""
    blocks = [block for block in body.split(b"\n\n") if block not in (b"", b"data: [DONE]")]
    return [json.loads(block.removeprefix(b"data: ")) for block in blocks]


def channels_of(choice: dict[str, Any], part: str) -> Iterator[tuple[tuple[object, ...], str]]:
    """The generated texts of one choice of one event or body, with the channel of each."""
    message = choice.get(part) or {}
    index = choice["index"]
    yield (index, "content"), choice.get("text") or message.get("content") or ""
    yield (index, "reasoning"), message.get("reasoning") or ""
    yield (index, "refusal"), message.get("refusal") or ""
    for place, call in enumerate(message.get("tool_calls") or []):
        function = call["function"]
        yield (index, "name", call.get("index", place)), function.get("name") or ""
        yield (index, "arguments", call.get("index", place)), function.get("arguments") or ""


def texts_of(response: Recorded) -> list[str]:
    """Every generated text of a response, by joining each channel's pieces."""
    joined: dict[tuple[object, ...], str] = {}
    part = "delta" if response.is_stream else "message"
    events = events_of(response.body) if response.is_stream else [json.loads(response.body)]
    for event in events:
        for choice in event.get("choices", []):
            for channel, text in channels_of(choice, part):
                joined[channel] = joined.get(channel, "") + text
    return sorted(text for text in joined.values() if text)


def usage_of(response: Recorded) -> Usage | None:
    """The last total of a response; of a stream that died, the last one at all (it had one choice)."""
    events = events_of(response.body) if response.is_stream else [json.loads(response.body)]
    totals = [event["usage"] for event in events if event.get("usage") and not event["choices"]]
    reports = totals or [event["usage"] for event in events if event.get("usage")]
    if not reports:
        return None
    return Usage(reports[-1]["prompt_tokens"], reports[-1]["completion_tokens"])


def without_usage(response: Recorded) -> bytes:
    """The same body without any usage in it."""
    if not response.is_stream:
        return json.dumps({**json.loads(response.body), "usage": None}).encode()
    lines = [json.dumps({**event, "usage": None}) for event in events_of(response.body)]
    return b"".join(b"data: " + line.encode() + b"\n\n" for line in [*lines, "[DONE]"])


def metered(response: Recorded, *pieces: bytes) -> Metered:
    """What the meter for this response says of these pieces."""
    return fed(meter_for(response.content_type), *pieces)


def cuts_of(body: bytes) -> range:
    """Every offset of a body of ordinary size; every `STRIDE`th of a large one."""
    return range(0, len(body) + 1, 1 if len(body) < EVERY_OFFSET_BELOW else STRIDE)


def assert_the_same_however_cut(response: Recorded, body: bytes, expected: Metered) -> None:
    """In the server's own pieces of it, byte by byte, and cut in two at many places."""
    assert metered(response, *(body[i : i + 1] for i in range(len(body)))) == expected
    for cut in cuts_of(body):
        assert metered(response, body[:cut], body[cut:]) == expected


@pytest.mark.parametrize("name", NAMES)
def test_reported_usage_and_text(name: str) -> None:
    """What vLLM reported is what is metered, and every choice's text is there, at every cut."""
    response = recorded(name)
    whole = metered(response, response.body)
    assert whole.usage == usage_of(response)
    assert sorted(whole.texts) == texts_of(response)
    assert (whole.finished, whole.overflow_chars) == (True, 0)
    assert whole.unread == (name in NO_ANSWERS)
    assert metered(response, *response.chunks) == whole
    assert_the_same_however_cut(response, response.body, whole)


@pytest.mark.parametrize("name", [name for name in NAMES if usage_of(load(name))])
def test_text_without_usage(name: str) -> None:
    """With its usage removed, a response still gives the same text, at every cut."""
    response = recorded(name)
    body = without_usage(response)
    whole = metered(response, body)
    assert whole.usage is None
    assert sorted(whole.texts) == texts_of(response)
    assert_the_same_however_cut(response, body, whole)


@pytest.mark.parametrize("name", [name for name in NAMES if load(name).is_stream])
def test_disconnect_after_any_event(name: str) -> None:
    """A stream that breaks off gives the text so far, and is finished only if every choice was."""
    response = recorded(name)
    meter = meter_for(response.content_type)
    for count, piece in enumerate(response.chunks, start=1):
        meter.feed(piece)
        so_far = replace(response, body=b"".join(response.chunks[:count]))
        reasons: dict[int, str | None] = {}
        for event in events_of(so_far.body):
            for choice in event.get("choices", []):
                reasons[choice["index"]] = choice["finish_reason"]
        broken = metered(so_far, so_far.body)
        assert sorted(broken.texts) == texts_of(so_far)
        assert meter.first_output is bool(broken.texts)
        assert broken.finished is (all(reasons.values()) or b"[DONE]" in so_far.body)


@pytest.mark.parametrize("name", [name for name in NAMES if load(name).status >= 400])
def test_error_answers(name: str) -> None:
    """An error answer has no usage and no text, and is an error if its body says so."""
    response = recorded(name)
    answer = metered(response, response.body)
    assert (answer.usage, answer.texts) == (None, ())
    assert answer.error is ("error" in json.loads(response.body))


def test_engine_death_in_mid_stream() -> None:
    """The error is seen behind a clean end, and what had been delivered is what was last reported."""
    response = recorded("err_engine_death_midstream")
    death = metered(response, response.body)
    assert (death.error, death.finished, death.usage) == (True, True, Usage(6, 411))


def test_two_choices_with_continuous_usage() -> None:
    """Each choice reports its own tokens: cut before the total, the sum over choices stands."""
    response = recorded("chat_stream_n2_continuous")
    assert metered(response, response.body).usage == Usage(7, 8)
    before_total = response.body[: response.body.index(b'"choices":[]')]
    assert metered(response, before_total).usage == Usage(7, 8)
    assert metered(response, *response.chunks[:-3]).usage == Usage(7, 7)


def test_one_choice_never_finished_alone() -> None:
    """With two choices, the first finish_reason does not end the response."""
    response = recorded("chat_stream_n2")
    first = response.body.index(b'"finish_reason":"length"')
    second = response.body.index(b'"finish_reason":"length"', first + 1)
    assert not metered(response, response.body[:second]).finished
    end = response.body.index(b"\n\n", second) + 2
    assert metered(response, response.body[:end]).finished


def test_loader_undoes_the_framing() -> None:
    """Every recording has its status, type and whole body; requests belong to their responses."""
    assert len(NAMES) == 63
    for name in NAMES:
        response = recorded(name)
        assert response.status in (200, 400, 401, 404, 405, 503)
        assert b"".join(response.chunks) == response.body
        if "content-length" in response.headers and name != "models":  # its path was shortened
            assert len(response.body) == int(response.headers["content-length"])
        if response.is_stream:
            assert response.body.endswith(b"data: [DONE]\n\n")
            assert all(piece.startswith(b"data: ") for piece in response.chunks)
        else:
            json.loads(response.body)
    assert recorded("chat_stream_n2").request is not None
    assert recorded("err_bad_json").request is None
    assert recorded("models").request is None


def test_loader_refuses_what_is_no_response() -> None:
    """A bare metrics page is not taken for a response."""
    with pytest.raises(ValueError, match="no recorded response"):
        load("metrics_idle")
