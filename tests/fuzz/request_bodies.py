"""
Request bodies: the first byte chooses the endpoint, the rest is what a client sent there.
"""

import json
import random
from typing import Any

from envoy_tokenpools.core.cost import Need, estimate
from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.extproc.requesting import change_for
from envoy_tokenpools.openai.answers import error_answer
from envoy_tokenpools.openai.codes import ErrorCode
from envoy_tokenpools.openai.endpoint import Endpoint
from envoy_tokenpools.openai.prompt import MAX_PIECES, MAX_PROMPTS
from envoy_tokenpools.openai.request import (
    MAX_MODEL_CHARS,
    MAX_OUTPUT_TOKENS,
    MAX_SEQUENCES,
    RequestFacts,
    parse_request,
)
from tests.fuzz.json_values import spelled, value
from tests.support import captures
from tests.support.bodies import SMALLEST
from tests.support.pools import amount, entitlement, pool

_ENDPOINTS = tuple(Endpoint)
_TENANT = entitlement("a", ServiceClass.SPOT)
_POOL = pool(amount(1_000, 16, 10_000_000), _TENANT)
_CODES = frozenset(code.value for code in ErrorCode)
_CODES_OF_COSTS = frozenset(("too_many_sequences", "context_length_exceeded"))

_MAX_TEXT_PER_BYTE = 40
"""A number of a schema may be rendered longer than it was written, and one text may be read for several shapes."""

_FIELDS = (
    *("model", "messages", "prompt", "input", "inputs", "max_tokens", "max_completion_tokens"),
    *("max_output_tokens", "max_new_tokens", "n", "best_of", "beam_width", "stream", "echo"),
    *("stream_options", "stream_format", "tools", "functions", "documents", "response_format"),
    *("text", "texts", "text_1", "text_2", "data", "data_1", "data_2", "query", "queries", "items"),
    *("input_ids", "token_ids", "prompt_token_ids", "tokens", "input_embeds", "prompt_embeds"),
    *("image_data", "video_data", "audio_data", "images", "content_parts", "suffix", "system"),
    *("sampling_params", "parameters", "thinking", "instructions", "previous_input_messages"),
    *("chat_template", "chat_template_kwargs", "output_config", "priority", "user", "seed"),
)
_RECORDED = [
    request
    for request in (captures.load(name).request for name in captures.response_names())
    if request is not None
]


def fuzz_request_body(data: bytes) -> dict[str, int]:
    """
    Read a body, estimate its cost, and change it as an admitted one would be.

    Whatever it is, it becomes bounded numbers or a 400, and what the backend gets is the request that was counted.
    """
    if not data:
        return {}
    endpoint, body = _ENDPOINTS[data[0] % len(_ENDPOINTS)], data[1:]
    try:
        facts = parse_request(endpoint, body)
    except RequestError as error:
        _check_error(error, endpoint, _CODES)
        return {"refused": 1}
    _check_facts(facts, len(body))
    _check_cost(facts)
    if not endpoint.reads_body:
        return {"unread": 1}
    return {"accepted": 1, "changed": _check_change(endpoint, facts, body)}


def _check_error(error: RequestError, endpoint: Endpoint, codes: frozenset[str]) -> None:
    assert error.status == 400, error.status
    assert error.code in codes, error.code
    answer = error_answer(error, endpoint.dialect)
    assert len(answer.body) < 1_000, len(answer.body)
    json.loads(answer.body)
    assert all(text.isprintable() and text.isascii() for pair in answer.headers for text in pair)


def _check_facts(facts: RequestFacts, body_bytes: int) -> None:
    chars = sum(map(len, facts.texts)) + sum(map(len, facts.shared_texts))
    embeds_or_ids = body_bytes + 1
    bounds = (
        (facts.token_ids, embeds_or_ids * 4),
        (facts.overhead_tokens, 16 * MAX_PIECES),
        (facts.images, embeds_or_ids),
        (facts.audio_clips, embeds_or_ids),
        (facts.prompts - 1, embeds_or_ids),
        (facts.sequences - 1, MAX_SEQUENCES * max(MAX_PROMPTS, facts.prompts)),
        (facts.max_output_tokens or 0, MAX_OUTPUT_TOKENS),
        (len(facts.model or ""), MAX_MODEL_CHARS),
        (chars, embeds_or_ids * _MAX_TEXT_PER_BYTE),
    )
    for number, most in bounds:
        assert type(number) is int, facts
        assert 0 <= number <= most, facts
    assert all(type(text) is str and text for text in (*facts.texts, *facts.shared_texts))


def _check_cost(facts: RequestFacts) -> None:
    chars = sum(map(len, facts.texts)) + facts.prompts * sum(map(len, facts.shared_texts))
    prompt = chars + facts.token_ids + facts.overhead_tokens
    need = Need(prompt, facts.sequences, facts.max_output_tokens, facts.decodes, facts.prompts)
    for learned in (None, 40):
        try:
            cost = estimate(_POOL, _TENANT, need, learned)
        except RequestError as error:
            _check_error(error, facts.endpoint, _CODES_OF_COSTS)
            continue
        numbers = (cost.prompt_tokens, cost.output_tokens, cost.kv_bytes, cost.concurrency)
        assert all(type(number) is int and 0 <= number < 2**53 for number in numbers), cost
        assert cost.concurrency >= 1, cost


def _check_change(endpoint: Endpoint, facts: RequestFacts, body: bytes) -> int:
    """Whether it was changed: then to the same request, but for what is changed on purpose."""
    try:
        change = change_for(facts, _POOL, body, "")
    except RequestError as error:
        _check_error(error, endpoint, _CODES)
        return 0
    if change.body is None:
        assert not change.asks_usage
        return 0
    before, after = json.loads(body), json.loads(change.body)
    before.pop("priority", None)
    if change.asks_usage:
        assert after.pop("stream_options") == {"include_usage": True}
    # By their spelling: NaN is not equal to itself, and 1 is equal to True.
    assert json.dumps(before) == json.dumps(after)
    return 1


def request_body(rng: random.Random) -> bytes:
    """A body like those that clients send, with odd fields or odd values in some."""
    number = rng.randrange(len(_ENDPOINTS))
    fields: dict[str, Any] = dict(SMALLEST.get(_ENDPOINTS[number], {}))
    if rng.random() < 0.3:
        fields = dict(rng.choice(_RECORDED))
    for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
        fields[rng.choice(_FIELDS)] = value(rng)
    if rng.random() < 0.2:
        fields["stream"] = True
    if fields and rng.random() < 0.1:
        fields.pop(rng.choice(list(fields)))
    return bytes((number,)) + spelled(fields, rng)
