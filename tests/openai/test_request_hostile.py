"""Hostile bodies: whatever they hold, facts with bounded numbers or a 400 come out."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.openai.codes import ErrorCode
from envoy_tokenpools.openai.prompt import MAX_PROMPTS
from envoy_tokenpools.openai.request import (
    MAX_MODEL_CHARS,
    MAX_OUTPUT_TOKENS,
    MAX_SEQUENCES,
    Endpoint,
    UsageWish,
)
from tests.support.bodies import READING, SMALLEST, outcome, refusal

SECRET = "marmalade"

# Making deep values is slow on a busy machine, which says nothing about reading them.
UNHURRIED = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("endpoint", READING)
@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"input":' + b'[{"content":' * 20_000 + b'"x"' + b"}]" * 20_000 + b"}",
        b'{"prompt":' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001,
        b"[" * 1_000_000,
        b'{"model":"\xff\xfe"}',
        b'{"a":1}{"b":2}',
        b"[]",
        b'"x"',
        b"",
        b'{"messages":"hi","input":5,"prompt":5}',
        b'{"max_tokens":1,"max_tokens":2}',
    ],
)
def test_broken_bodies_are_a_400(endpoint: Endpoint, body: bytes) -> None:
    """Depth, encodings and shapes: an answer that tells the client not to try again."""
    refusal(endpoint, body)


@pytest.mark.parametrize("depth", [50, 200, 400, 480, 600, 900])
@pytest.mark.parametrize("field", ["content", "tools", "output"])
def test_depth_that_the_decoder_takes_is_read_or_refused(depth: int, field: str) -> None:
    """Reading nested parts uses the stack as well, and ends in the same refusal."""
    nested = f'[{{"{field}":' * depth + f'"{SECRET}"' + "}]" * depth
    body = f'{{"messages":[{{"role":"user","content":{nested}}}]}}'.encode()
    facts = outcome(Endpoint.CHAT, body)
    if isinstance(facts, RequestError):
        assert depth > 100
        assert (facts.status, facts.code) == (400, ErrorCode.INVALID_JSON)
    else:
        assert SECRET in "".join(facts.texts)


NAMES = st.sampled_from(
    [
        *("model", "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "n"),
        *("max_output_tokens", "best_of", "stream", "stream_options", "include_usage", "tools"),
        *("role", "name", "content", "type", "text", "image_url", "image", "input_audio", "file"),
        *("tool_calls", "function", "function_call", "arguments", "custom", "output", "summary"),
        *("response_format", "json_schema", "format", "schema", "instructions", "variables"),
        *("echo", "suffix", "documents", "previous_response_id", "reasoning"),
        *("system", "thinking", "budget_tokens", "source", "data", "title", "input_schema"),
        *("output_config", "tool", "definition", "id", "chat_template_kwargs"),
        *("query", "queries", "text_1", "text_2", "data_1", "items", "texts", "images", "inputs"),
        *("tokens", "token_ids", "input_ids", "input_embeds", "image_data", "audio_data"),
        *("sampling_params", "parameters", "max_new_tokens", "beam_width", "prompt_embeds"),
    ]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 200),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["text", "image_url", "input_audio", "user", SECRET, "json_schema"]),
    st.sampled_from(["document", "tool_result", "content", "prompt_embeds", "image"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=20,
)


def check(endpoint: Endpoint, body: bytes) -> None:
    """Facts with finite, bounded numbers come out of `body`, or a 400 that does not quote it."""
    facts = outcome(endpoint, body)
    if isinstance(facts, RequestError):
        assert facts.status == 400
        assert facts.code in list(ErrorCode)
        assert SECRET not in str(facts)
        return
    counts = [
        *(facts.token_ids, facts.overhead_tokens, facts.images, facts.audio_clips),
        *(facts.prompts, facts.sequences),
    ]
    assert all(type(count) is int and count >= 0 for count in counts)
    # What pairs share counts with each of them; an invocation is read once for every shape that it has.
    assert sum(counts[:4]) <= (7 * len(body) + 3) * facts.prompts
    assert 1 <= facts.prompts <= len(body)
    assert 1 <= facts.sequences <= MAX_SEQUENCES * MAX_PROMPTS
    assert facts.decodes or facts.max_output_tokens == 0
    assert facts.decodes or facts.sequences == 1 or facts.endpoint is Endpoint.IMAGES
    if facts.max_output_tokens is not None:
        assert type(facts.max_output_tokens) is int
        assert 0 <= facts.max_output_tokens <= MAX_OUTPUT_TOKENS
    assert all(type(text) is str and text for text in (*facts.texts, *facts.shared_texts))
    # Compact JSON may be longer than it came (1e15), but nothing is read over and over.
    times = 4 if endpoint is Endpoint.INVOCATIONS else 1
    assert sum(map(len, facts.texts)) <= 6 * len(body) * times
    assert sum(map(len, facts.shared_texts)) <= len(body)
    assert facts.model is None or len(facts.model) <= MAX_MODEL_CHARS
    assert {type(facts.stream), type(facts.echo), type(facts.flat)} == {bool}
    assert type(facts.usage_wish) is UsageWish


@UNHURRIED
@given(st.sampled_from(READING), st.dictionaries(NAMES, JSON, max_size=6))
def test_no_json_raises_anything_else(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    """Values of any type in any place."""
    check(endpoint, json.dumps(fields).encode())
    check(endpoint, json.dumps(fields | SMALLEST[endpoint]).encode())


@UNHURRIED
@given(st.sampled_from(READING), st.lists(JSON, min_size=1, max_size=4))
def test_no_content_raises_anything_else(endpoint: Endpoint, parts: list[Any]) -> None:
    """Parts of any shape in an otherwise proper request."""
    items = [{"role": "user", "content": parts}, *(part for part in parts if type(part) is dict)]
    fields = {"messages": items, "input": items, "prompt": parts, "tools": parts}
    check(endpoint, json.dumps(fields).encode())


@UNHURRIED
@given(st.sampled_from(READING), st.data())
def test_no_damaged_body_raises_anything_else(endpoint: Endpoint, data: st.DataObject) -> None:
    """A proper body with bytes changed, put in, cut out or repeated."""
    whole = {"messages": [{"role": "user", "content": [{"type": "text", "text": SECRET}]}]}
    fields = SMALLEST[Endpoint.COMPLETIONS] | SMALLEST[endpoint] | whole | {"max_tokens": 100}
    body = bytearray(json.dumps(fields).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(body)))
        end = data.draw(st.integers(start, min(len(body), start + 12)))
        pieces = st.sampled_from([b"", b'"', b"\\", b"{", b"}", b",", b"1e9", b"null", b"\\u0000"])
        body[start:end] = data.draw(pieces | st.binary(max_size=4) | st.just(bytes(body[start:])))
    check(endpoint, bytes(body))


@UNHURRIED
@given(st.sampled_from(READING), st.dictionaries(NAMES, JSON, max_size=4))
def test_the_same_request_written_otherwise_has_the_same_facts(
    endpoint: Endpoint, fields: dict[str, Any]
) -> None:
    """Blanks and escapes change nothing about the cost."""
    written = [
        json.dumps(SMALLEST[endpoint] | fields),
        json.dumps(SMALLEST[endpoint] | fields, separators=(",", ":")),
        json.dumps(SMALLEST[endpoint] | fields, indent=1),
        json.dumps(SMALLEST[endpoint] | fields, ensure_ascii=False),
    ]
    outcomes = {repr(outcome(endpoint, text.encode())) for text in written}
    assert len(outcomes) == 1
