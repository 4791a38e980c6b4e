"""The dialects beside chat: embeddings, transcriptions, Responses and Anthropic messages."""

import json
from typing import Any

import pytest

from envoy_tokenpools.openai.usage import (
    Metered,
    StreamMeter,
    Usage,
)
from tests.support.streams import chunk, fed, of_body, of_stream, total


@pytest.mark.parametrize("object_name", ["list", "embeddings"])
def test_embeddings_report_a_prompt_and_generate_nothing(object_name: str) -> None:
    """Prompt tokens alone mean no completion, as embeddings generate no text."""
    reported = {"prompt_tokens": 4, "total_tokens": 4}
    body = {"object": object_name, "data": [{"embedding": [0.5] * 9}], "usage": reported}
    metered = of_body(body)
    assert (metered.usage, metered.texts, metered.finished) == (Usage(4, 0), (), True)


def test_responses_stream() -> None:
    """The Responses dialect nests usage and spreads its text over typed deltas, `done` repeats it."""
    final = {"usage": {"input_tokens": 31, "output_tokens": 3, "total_tokens": 34}, "error": None}
    call = {"type": "function_call", "name": "get_weather", "arguments": ""}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {"usage": None, "error": None}},
        {"type": "response.reasoning_text.delta", "output_index": 0, "delta": "Let "},
        {"type": "response.reasoning_text.delta", "output_index": 0, "delta": "me"},
        {"type": "response.output_item.added", "output_index": 1, "item": {"type": "message"}},
        {"type": "response.output_text.delta", "output_index": 1, "content_index": 0, "delta": "a"},
        {"type": "response.output_text.delta", "output_index": 1, "content_index": 1, "delta": "c"},
        {"type": "response.output_text.delta", "output_index": 1, "content_index": 0, "delta": "b"},
        {"type": "response.output_text.done", "output_index": 1, "text": "ab"},
        {"type": "response.output_item.added", "output_index": 2, "item": call},
        {"type": "response.function_call_arguments.delta", "output_index": 2, "delta": '{"x":'},
        {"type": "response.function_call_arguments.delta", "output_index": 2, "delta": "1}"},
        {"type": "response.function_call_arguments.done", "output_index": 2, "arguments": "{}"},
        {"type": "response.audio.delta", "delta": "UklGRg=="},
        {"type": "response.reasoning_summary_text.delta", "summary_index": 0, "delta": "s"},
        {"type": "response.reasoning_summary_text.delta", "summary_index": 1, "delta": "t"},
    ]
    texts = ("Let me", "ab", "c", "get_weather", '{"x":1}', "s", "t")
    cut_off = of_stream(*events)
    assert (cut_off.usage, cut_off.texts, cut_off.finished) == (None, texts, False)
    whole = of_stream(*events, {"type": "response.completed", "response": final})
    assert whole == Metered(
        Usage(31, 3), texts, finished=True, error=False, overflow_chars=0, unread=0
    )


def test_responses_usage_alone() -> None:
    """The nested usage is found with an event name in front of it."""
    event = {"input_tokens": 31, "output_tokens": 3, "total_tokens": 34}
    data = json.dumps({"type": "response.completed", "response": {"usage": event}}).encode()
    metered = fed(StreamMeter(), b"event: response.completed\ndata: " + data + b"\n\n")
    assert (metered.usage, metered.finished) == (Usage(31, 3), True)


def test_responses_body() -> None:
    """A whole Responses answer gives messages, reasoning and calls of its output."""
    metered = of_body(
        {
            "object": "response",
            "error": None,
            "output": [
                {"type": "reasoning", "summary": [{"text": "s"}], "content": [{"text": "hm"}]},
                {
                    "type": "message",
                    "content": [
                        {"type": "output_text", "text": "a"},
                        {"type": "refusal", "refusal": "b"},
                    ],
                },
                {"type": "function_call", "name": "f", "arguments": "{}"},
                {"type": "custom_tool_call", "name": "g", "input": "in"},
                None,
            ],
            "usage": {"input_tokens": 31, "output_tokens": 3},
        }
    )
    assert metered == Metered(
        Usage(31, 3),
        ("hm", "s", "a", "b", "f", "{}", "g", "in"),
        finished=True,
        error=False,
        overflow_chars=0,
        unread=0,
    )


_ANTHROPIC: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"usage": {"input_tokens": 10, "output_tokens": 1}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking"}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 0, "delta": {"thinking": "hm"}},
    {"type": "content_block_delta", "index": 0, "delta": {"signature": "c2ln"}},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "a"}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "b"}},
    {
        "type": "content_block_start",
        "index": 2,
        "content_block": {"type": "tool_use", "id": "t", "name": "f", "input": {}},
    },
    {"type": "content_block_delta", "index": 2, "delta": {"partial_json": '{"x":'}},
    {"type": "content_block_delta", "index": 2, "delta": {"partial_json": "1}"}},
    {"type": "content_block_stop", "index": 2},
]


def test_anthropic_stream() -> None:
    """Anthropic's usage is split: input at the start, output at the end."""
    metered = of_stream(
        *_ANTHROPIC,
        {"type": "message_delta", "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    )
    assert metered == Metered(
        Usage(10, 5),
        ("hm", "ab", "f", '{"x":1}'),
        finished=True,
        error=False,
        overflow_chars=0,
        unread=0,
    )


def test_anthropic_stream_that_breaks_off() -> None:
    """The one output token announced at the start is no report of what was delivered."""
    metered = of_stream(*_ANTHROPIC)
    assert (metered.usage, metered.finished) == (Usage(10, None), False)


def test_anthropic_usage_alone() -> None:
    """Start and end are put together without any text between them."""
    metered = of_stream(_ANTHROPIC[0], {"type": "message_delta", "usage": {"output_tokens": 5}})
    assert metered.usage == Usage(10, 5)
    silent = {"usage": {"input_tokens": 10, "output_tokens": 0}}
    assert of_stream({"type": "message_start", "message": silent}).usage == Usage(10, 0)


def test_anthropic_body() -> None:
    """A whole Anthropic message gives its blocks, a tool's input spelled out."""
    content = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "ab"},
        {"type": "tool_use", "name": "f", "input": {"x": 1}},
    ]
    reported = {"input_tokens": 10, "output_tokens": 5}
    metered = of_body({"type": "message", "content": content, "usage": reported})
    assert (metered.usage, metered.texts) == (Usage(10, 5), ("hm", "ab", "f", '{"x": 1}'))


def test_transcriptions() -> None:
    """Transcribed text is generated text, whole or streamed."""
    assert of_body({"text": "hello"}).texts == ("hello",)
    assert of_stream({"type": "transcript.text.delta", "delta": "hello"}).texts == ("hello",)


# Dialects that are not OpenAI's


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"result": "Hello"},
        {"message": {"role": "assistant", "content": "Hello"}, "done": True},
        {"object": "list", "data": [{"embedding": [0.5]}]},
        [{"text": "Hello", "meta_info": {"completion_tokens": 2}}],
        "Hello",
        {"text": None, "generated_text": None, "choices": None, "output": None, "content": None},
        {"usage": {}, "meta_info": {"id": "x"}},
    ],
)
def test_a_whole_answer_in_an_unknown_dialect_is_unread(body: object) -> None:
    """Its silence about text and usage is ours, not the backend's."""
    metered = of_body(body)
    assert metered == Metered(
        usage=None, texts=(), finished=True, error=False, overflow_chars=0, unread=1
    )


def test_a_whole_stream_in_an_unknown_dialect_is_unread() -> None:
    """Once it has ended, however many events it had; before that it may still say something."""
    events = [{"token": {"text": "Hello"}}, {"message": {"content": "x"}, "done": True}]
    assert of_stream(*events, "[DONE]").unread == 1
    assert of_stream(*events).unread == 0
    assert of_stream(*events, {"token": None}, "{broken", "[DONE]").unread == 2
    assert of_stream(*events, chunk({"content": "a"}), "[DONE]").unread == 0


@pytest.mark.parametrize(
    "body",
    [
        {"choices": []},
        {"output": []},
        {"content": []},
        {"text": ""},
        {"generated_text": ""},
        {"data": [], "usage": {"prompt_tokens": 4}},
        {"meta_info": {"completion_tokens": 0}},
        {"error": "boom"},
        {"object": "error"},
    ],
)
def test_an_answer_of_nothing_in_a_known_dialect_is_read(body: dict[str, object]) -> None:
    """It generated nothing, reported its usage, or failed: no more is to be known."""
    assert (of_body(body).unread, of_body(body).texts) == (0, ())


@pytest.mark.parametrize("kind", ["message_stop", "response.completed"])
def test_a_typed_end_is_of_a_known_dialect(kind: str) -> None:
    """The Responses and Anthropic dialects name their events."""
    metered = of_stream({"type": kind})
    assert (metered.finished, metered.unread) == (True, 0)


def test_the_counts_of_sglangs_own_dialect_are_usage() -> None:
    """In `meta_info`, on every event of a stream, cumulative."""
    info = {"prompt_tokens": 7, "completion_tokens": 3, "finish_reason": {"type": "length"}}
    body = of_body({"text": "Hello world", "meta_info": info})
    assert (body.usage, body.texts, body.unread) == (Usage(7, 3), ("Hello world",), 0)
    events = [
        {"text": "Hello", "meta_info": {"prompt_tokens": 7, "completion_tokens": tokens}}
        for tokens in (1, 2, 5)
    ]
    assert of_stream(*events, "[DONE]").usage == Usage(7, 5)
    assert of_stream(*events[:2]).usage == Usage(7, 2)
    assert of_stream(*events, "[DONE]").unread == 0


@pytest.mark.parametrize("junk", [None, [], "7", {"prompt_tokens": "7", "completion_tokens": True}])
def test_counts_of_a_wrong_type_in_sglangs_dialect_are_ignored(junk: object) -> None:
    """As in `usage`."""
    assert of_stream({"text": "Hello", "meta_info": junk}, total(1, 2)).usage == Usage(1, 2)
    assert of_body({"text": "Hello", "meta_info": junk}).usage is None


def test_the_text_of_tgis_own_dialect_is_text() -> None:
    """It reports no usage, so that its text is counted."""
    metered = of_body({"generated_text": "Hello world"})
    assert (metered.usage, metered.texts, metered.unread) == (None, ("Hello world",), 0)
