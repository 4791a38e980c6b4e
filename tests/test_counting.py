"""
What is charged where a backend reports nothing: tiktoken's count of the generated text, however it was cut.
"""

import json
from typing import Any

import pytest
import tiktoken

from envoy_tokenpools.openai.usage import Metered, meter_for
from envoy_tokenpools.tokenizer import VOCABULARY_NAMES, Vocabulary, load_vocabularies
from tests.support.captures import Recorded, load, response_names

VOCABULARIES = load_vocabularies(VOCABULARY_NAMES)
ANSWERS = [name for name in response_names() if name.startswith(("chat", "compl", "done"))]


def _stream(*deltas: dict[str, Any]) -> bytes:
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    return b"".join(b"data: %b\n\n" % json.dumps(e).encode() for e in events) + b"data: [DONE]\n\n"


def _metered(body: bytes, content_type: str, piece: int) -> Metered:
    meter = meter_for(content_type)
    for start in range(0, len(body), piece):
        meter.feed(body[start : start + piece])
    return meter.finish()


def _count(vocabulary: Vocabulary, metered: Metered) -> int:
    assert metered.usage is None
    return vocabulary.count_all(metered.texts)


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=lambda v: v.name)
@pytest.mark.parametrize(
    ("deltas", "tokens"),
    [
        (["Hello world, how are you today?"], 8),
        (["1", "2", "3", "4", "5", "6"], 2),
        (["Hel", "lo", " wor", "ld"], 2),
        (["", "", ""], 0),
        (["<|endoftext|>"], 7),
    ],
)
def test_chunks_are_not_tokens(vocabulary: Vocabulary, deltas: list[str], tokens: int) -> None:
    """The joined text is counted: not events, and not each piece alone."""
    body = _stream({"role": "assistant"}, *({"content": delta} for delta in deltas))
    assert _count(vocabulary, _metered(body, "text/event-stream", 7)) == tokens


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=lambda v: v.name)
@pytest.mark.parametrize("reasoning", ["reasoning_content", "reasoning"])
def test_reasoning_and_tool_calls_are_counted_too(vocabulary: Vocabulary, reasoning: str) -> None:
    """7 tokens of reasoning, 6 of content, 2 of a tool's name and 5 of its joined arguments are 20."""
    body = _stream(
        {"role": "assistant", "content": None},
        {reasoning: "Let me think step by step."},
        {"content": "The answer is 4."},
        {"tool_calls": [{"index": 0, "function": {"name": "get_weather"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]},
    )
    assert _count(vocabulary, _metered(body, "text/event-stream", 11)) == 20


def _without_usage(recorded: Recorded) -> bytes:
    if not recorded.is_stream:
        body = json.loads(recorded.body)
        body.pop("usage", None)
        return json.dumps(body).encode()
    events = []
    for event in recorded.body.split(b"\n\n"):
        payload = event.removeprefix(b"data: ")
        if payload.startswith(b"{"):
            fields = json.loads(payload)
            fields.pop("usage", None)
            payload = json.dumps(fields).encode()
        events.append(b"data: " + payload if payload else b"")
    return b"\n\n".join(events)


def _texts_by_choice(recorded: Recorded) -> dict[tuple[Any, ...], str]:
    """Generated text per choice and channel, read the plain way."""
    joined: dict[tuple[Any, ...], str] = {}
    if recorded.is_stream:
        payloads = [e.removeprefix(b"data: ") for e in recorded.body.split(b"\n\n")]
        bodies = [json.loads(payload) for payload in payloads if payload.startswith(b"{")]
    else:
        bodies = [json.loads(recorded.body)]
    for choice in (c for body in bodies for c in body.get("choices") or []):
        part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        pieces = {"content": part.get("content"), "reasoning": part.get("reasoning")}
        for number, call in enumerate(part.get("tool_calls") or []):
            for name, value in call["function"].items():
                pieces[f"{name}-{call.get('index', number)}"] = value
        for channel, text in pieces.items():
            key = (choice["index"], channel)
            joined[key] = joined.get(key, "") + (text or "")
    return joined


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("piece", [1, 37, 100_000])
def test_recorded_answers_without_usage_are_charged_tiktokens_count(name: str, piece: int) -> None:
    """Each vLLM recording, its usage removed, counts as tiktoken counts the joined text of each choice."""
    recorded = load(name)
    vocabulary = VOCABULARIES["o200k_base"]
    encoding: tiktoken.Encoding = vocabulary._encoding
    expected = sum(len(encoding.encode_ordinary(t)) for t in _texts_by_choice(recorded).values())
    metered = _metered(_without_usage(recorded), recorded.content_type, piece)
    assert _count(vocabulary, metered) == expected
