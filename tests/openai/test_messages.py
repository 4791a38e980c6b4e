"""Anthropic's messages read into facts: blocks of every kind, tools, limits, and the counting of tokens."""

import json
from typing import Any

import pytest

from envoy_tokenpools.openai.codes import ErrorCode
from envoy_tokenpools.openai.request import MAX_OUTPUT_TOKENS, Endpoint, RequestFacts
from tests.support.bodies import SMALLEST, parse, refusal


def said(*blocks: Any, role: str = "user") -> RequestFacts:
    """The facts of one message with these blocks."""
    return parse(Endpoint.MESSAGES, max_tokens=1, messages=[{"role": role, "content": [*blocks]}])


def with_fields(endpoint: Endpoint, **fields: Any) -> bytes:
    """The endpoint's smallest body with these fields."""
    return json.dumps(SMALLEST[endpoint] | fields).encode()


def test_a_usual_message() -> None:
    """System, messages and tools are read; the limit and the stream are as said."""
    facts = parse(
        Endpoint.MESSAGES,
        model="m",
        max_tokens=1_024,
        system="Be terse.",
        messages=[
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": [{"type": "text", "text": "Where?"}]},
        ],
        tools=[{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        tool_choice={"type": "tool", "name": "f"},
        metadata={"user_id": "u"},
        stop_sequences=["x"],
        stream=True,
    )
    assert facts.endpoint is Endpoint.MESSAGES
    assert facts.texts == (
        *("weather?", "Where?", "Be terse."),
        '[{"name":"f","description":"d","input_schema":{"type":"object"}}]',
    )
    assert facts.overhead_tokens == 4 + 4 + 4 + 3
    assert (facts.model, facts.max_output_tokens, facts.sequences) == ("m", 1_024, 1)
    assert (facts.stream, facts.decodes, facts.flat) == (True, True, False)


@pytest.mark.parametrize(
    ("system", "texts"),
    [
        ("a", ("a", "hi")),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], ("a", "b", "hi")),
        ("", ("hi",)),
        ([], ("hi",)),
        (None, ("hi",)),
        (7, ("hi",)),
    ],
)
def test_a_system_prompt_is_a_text_or_blocks(system: Any, texts: tuple[str, ...]) -> None:
    """Anything else adds nothing; the backend judges it."""
    facts = parse(Endpoint.MESSAGES, **SMALLEST[Endpoint.MESSAGES], system=system)
    assert sorted(facts.texts) == sorted(texts)


def test_blocks_of_an_agents_turn_are_read() -> None:
    """Thinking, calls and their results; signatures and what was redacted are not text."""
    facts = said(
        {"type": "thinking", "thinking": "a", "signature": "AAAA"},
        {"type": "redacted_thinking", "data": "AAAA"},
        {"type": "tool_use", "id": "toolu_1", "name": "b", "input": {"city": "Paris"}},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "c", "input": {}},
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "d"},
        {
            "type": "tool_result",
            "tool_use_id": "toolu_2",
            "is_error": True,
            "content": [
                {"type": "text", "text": "e"},
                {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
                {"type": "tool_reference", "tool_name": "f"},
            ],
        },
        {
            "type": "code_execution_tool_result",
            "content": {"type": "code_execution_result", "stdout": "g", "stderr": "h"},
        },
        {
            "type": "web_search_tool_result",
            "content": [{"type": "web_search_result", "title": "i", "encrypted_content": "AAAA"}],
        },
        {
            "type": "tool_addition",
            "tool": {"type": "tool_definition", "definition": {"name": "j"}},
        },
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "k"}},
        {"type": "text", "text": "l", "cache_control": {"type": "ephemeral"}},
        role="assistant",
    )
    assert facts.texts == (
        *("a", "b", '{"city":"Paris"}', "c", "d", "e", "f", "g", "h", "i", '{"name":"j"}'),
        *("k", "l"),
    )
    assert (facts.images, facts.audio_clips) == (1, 0)


@pytest.mark.parametrize(
    ("block", "texts", "images", "files"),
    [
        ({"type": "image", "source": {"type": "base64", "data": "@"}}, (), 1, 0),
        ({"type": "image", "source": {"type": "url", "url": "@"}}, (), 1, 0),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, (), 1, 0),
        ({"type": "document", "source": {"type": "base64", "data": "@"}}, (), 0, 1),
        ({"type": "document", "source": {"type": "url", "url": "@"}}, (), 0, 1),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}}, (), 0, 1),
        ({"type": "document", "source": {"type": "text", "data": "x"}}, ("x",), 0, 0),
        ({"type": "document", "source": {"type": "content", "content": "x"}}, ("x",), 0, 0),
        (
            {
                "type": "document",
                "title": "t",
                "context": "c",
                "source": {
                    "type": "content",
                    "content": [{"type": "text", "text": "x"}, {"type": "image", "source": {}}],
                },
            },
            ("t", "c", "x"),
            1,
            0,
        ),
        (
            {
                "type": "search_result",
                "source": "https://a.example",
                "title": "t",
                "content": [{"type": "text", "text": "x"}],
            },
            ("https://a.example", "t", "x"),
            0,
            0,
        ),
        ({"type": "document", "source": None}, (), 0, 0),
        ({"type": "document", "source": {"type": ["text"], "data": "@"}}, (), 0, 1),
        ({"type": "document"}, (), 0, 0),
    ],
)
@pytest.mark.parametrize("size", [4, 400_000])
def test_documents_are_text_or_files(
    block: dict[str, Any], texts: tuple[str, ...], images: int, files: int, size: int
) -> None:
    """Encoded ones count once, however long they are."""
    facts = said(json.loads(json.dumps(block).replace("@", "A" * size)))
    assert (facts.texts, facts.images, facts.audio_clips) == (texts, images, files)


def test_blocks_of_unknown_kinds_never_raise() -> None:
    """The backend judges them; what text they have is counted."""
    facts = said({"type": "zzz", "text": "a"}, {"type": "compaction", "content": "b"}, None, 5, [])
    assert facts.texts == ("a", "b")


def test_a_schema_of_the_answer_is_read() -> None:
    """Structured outputs come with their schema."""
    form = {"type": "json_schema", "schema": {"type": "object"}}
    facts = parse(Endpoint.MESSAGES, **SMALLEST[Endpoint.MESSAGES], output_config={"format": form})
    assert facts.texts == ("hi", '{"type":"object"}')
    others: list[Any] = [None, {}, {"format": None}, {"format": {}}, {"effort": "low"}, "x"]
    for config in others:
        plain = parse(Endpoint.MESSAGES, **SMALLEST[Endpoint.MESSAGES], output_config=config)
        assert plain.texts == ("hi",)


@pytest.mark.parametrize(
    ("thinking", "limit"),
    [
        ({"type": "enabled", "budget_tokens": 1_024}, 2_000),
        ({"type": "enabled", "budget_tokens": 9_000}, 9_000),
        ({"type": "adaptive"}, 2_000),
        ({"type": "disabled"}, 2_000),
        ({"budget_tokens": None}, 2_000),
        (None, 2_000),
        ("enabled", 2_000),
    ],
)
def test_thinking_is_part_of_the_limit(thinking: Any, limit: int) -> None:
    """A budget above the limit, which a backend should refuse, is believed."""
    fields = SMALLEST[Endpoint.MESSAGES] | {"max_tokens": 2_000, "thinking": thinking}
    assert parse(Endpoint.MESSAGES, **fields).max_output_tokens == limit


@pytest.mark.parametrize(
    ("budget", "code"),
    [
        ("high", ErrorCode.INVALID_TYPE),
        (1.5, ErrorCode.INVALID_TYPE),
        (True, ErrorCode.INVALID_TYPE),
        (-1, ErrorCode.INTEGER_TOO_SMALL),
        (MAX_OUTPUT_TOKENS + 1, ErrorCode.INTEGER_TOO_LARGE),
    ],
)
def test_an_odd_budget_is_refused(budget: Any, code: ErrorCode) -> None:
    """And named by its path. In a chat the same field is somebody else's, and anything goes."""
    thinking = {"type": "enabled", "budget_tokens": budget}
    error = refusal(
        Endpoint.MESSAGES, with_fields(Endpoint.MESSAGES, thinking=thinking, max_tokens=9)
    )
    assert (error.code, error.param) == (code, "thinking.budget_tokens")
    facts = parse(Endpoint.CHAT, **SMALLEST[Endpoint.CHAT], thinking=thinking, max_tokens=5)
    assert facts.max_output_tokens == 5


def test_a_limit_is_needed_by_most_backends_but_not_by_us() -> None:
    """Anthropic and vLLM refuse a request without one; llama.cpp has a default. Zero fills the cache."""
    fields = {"messages": [{"role": "user", "content": "hi"}]}
    assert parse(Endpoint.MESSAGES, **fields).max_output_tokens is None
    assert parse(Endpoint.MESSAGES, **fields, max_tokens=0).max_output_tokens == 0
    error = refusal(Endpoint.MESSAGES, with_fields(Endpoint.MESSAGES, max_tokens=-1))
    assert (error.code, error.param) == (ErrorCode.INTEGER_TOO_SMALL, "max_tokens")


def test_counting_tokens_reads_the_same_and_generates_nothing() -> None:
    """Limits and streams mean nothing to it."""
    fields: dict[str, Any] = {
        "model": "m",
        "system": "s",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "f"}],
        "thinking": {"type": "enabled", "budget_tokens": "any"},
    }
    counted = parse(Endpoint.COUNT_TOKENS, **fields, max_tokens="any", stream="any")
    generated = parse(Endpoint.MESSAGES, **fields)
    assert counted.texts == generated.texts == ("hi", "s", '[{"name":"f"}]')
    assert counted.overhead_tokens == generated.overhead_tokens
    assert (counted.decodes, counted.max_output_tokens, counted.stream) == (False, 0, False)


@pytest.mark.parametrize("endpoint", [Endpoint.MESSAGES, Endpoint.COUNT_TOKENS])
@pytest.mark.parametrize("messages", ["hi", {}, [], ["hi"], [[{"role": "user"}]]])
def test_messages_are_a_list_of_objects(endpoint: Endpoint, messages: Any) -> None:
    """There are no batches of conversations here."""
    error = refusal(endpoint, with_fields(endpoint, messages=messages))
    assert error.code in (ErrorCode.INVALID_TYPE, ErrorCode.EMPTY_ARRAY)
