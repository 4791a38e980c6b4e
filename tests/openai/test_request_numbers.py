"""Numbers and flags of a request: only what a client can have meant becomes a reservation."""

import json
from typing import Any

import pytest

from envoy_tokenpools.openai.codes import ErrorCode
from envoy_tokenpools.openai.request import (
    MAX_OUTPUT_TOKENS,
    MAX_SEQUENCES,
    Endpoint,
    UsageWish,
    parse_request,
)
from tests.support.bodies import DECODING, SMALLEST, parse, refusal

ZERO_IS_A_LIMIT = (Endpoint.MESSAGES, Endpoint.GENERATE)


def with_raw(endpoint: Endpoint, name: str, raw: str) -> bytes:
    """The endpoint's smallest body with one more field, its value as written."""
    return f'{json.dumps(SMALLEST[endpoint])[:-1]},"{name}":{raw}}}'.encode()


@pytest.mark.parametrize("endpoint", DECODING)
@pytest.mark.parametrize("fields", [(1, 800), (800, 1), (800, None), (None, 800)])
def test_the_largest_of_several_limits_counts(
    endpoint: Endpoint, fields: tuple[int | None, int | None]
) -> None:
    """Which one a backend obeys is unknown, so the one that costs most is believed."""
    one, other = fields
    for names in (("max_tokens", "max_completion_tokens"), ("max_output_tokens", "max_tokens")):
        body = SMALLEST[endpoint] | dict(zip(names, (one, other), strict=True)) | {"n": 3}
        facts = parse(endpoint, **body)
        assert (facts.max_output_tokens, facts.sequences) == (800, 3)


@pytest.mark.parametrize("endpoint", DECODING)
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("1", 1),
        ("1e3", 1_000),
        ("1000.0", 1_000),
        ("2147483647", MAX_OUTPUT_TOKENS),
        ("null", None),
        (" 7 ", 7),
    ],
)
def test_whole_numbers_are_limits(
    endpoint: Endpoint, name: str, raw: str, value: int | None
) -> None:
    """However they are written; null is as good as absent."""
    facts = parse_request(endpoint, with_raw(endpoint, name, raw))
    assert facts.max_output_tokens == value
    assert type(facts.max_output_tokens) is type(value)


@pytest.mark.parametrize("endpoint", DECODING)
@pytest.mark.parametrize(
    "name", ["max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"]
)
@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ("-1", ErrorCode.INTEGER_TOO_SMALL),
        ("-239", ErrorCode.INTEGER_TOO_SMALL),
        ("-1e300", ErrorCode.INTEGER_TOO_SMALL),
        ("2147483648", ErrorCode.INTEGER_TOO_LARGE),
        ("9223372036854775808", ErrorCode.INTEGER_TOO_LARGE),
        ("1e300", ErrorCode.INTEGER_TOO_LARGE),
        ("9" * 4_000, ErrorCode.INTEGER_TOO_LARGE),
        ("true", ErrorCode.INVALID_TYPE),
        ("false", ErrorCode.INVALID_TYPE),
        ('"100"', ErrorCode.INVALID_TYPE),
        ('""', ErrorCode.INVALID_TYPE),
        ("1.5", ErrorCode.INVALID_TYPE),
        ("[5]", ErrorCode.INVALID_TYPE),
        ("[]", ErrorCode.INVALID_TYPE),
        ("{}", ErrorCode.INVALID_TYPE),
        ("NaN", ErrorCode.INVALID_JSON),
        ("Infinity", ErrorCode.INVALID_JSON),
        ("1e999", ErrorCode.INVALID_JSON),
        ("9" * 5_000, ErrorCode.INVALID_JSON),
    ],
)
def test_odd_numbers_are_refused(endpoint: Endpoint, name: str, raw: str, code: ErrorCode) -> None:
    """Nothing that is not a positive whole number of sane size becomes a reservation."""
    error = refusal(endpoint, with_raw(endpoint, name, raw))
    assert error.code == code
    assert error.param == (None if code is ErrorCode.INVALID_JSON else name)


@pytest.mark.parametrize("endpoint", DECODING)
@pytest.mark.parametrize("raw", ["0", "-0.0"])
def test_zero_is_never_taken_for_absent(endpoint: Endpoint, raw: str) -> None:
    """It is a limit where a backend takes it for one, and refused elsewhere; no sequences are none at all."""
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        body = with_raw(endpoint, name, raw)
        if endpoint in ZERO_IS_A_LIMIT:
            assert parse_request(endpoint, body).max_output_tokens == 0
        else:
            error = refusal(endpoint, body)
            assert (error.code, error.param) == (ErrorCode.INTEGER_TOO_SMALL, name)
    for name in ("n", "best_of"):
        error = refusal(endpoint, with_raw(endpoint, name, raw))
        assert (error.code, error.param) == (ErrorCode.INTEGER_TOO_SMALL, name)


@pytest.mark.parametrize("endpoint", DECODING)
@pytest.mark.parametrize("name", ["n", "best_of"])
def test_sequences_are_bounded(endpoint: Endpoint, name: str) -> None:
    """The bound of the widest backend, and not one more."""
    widest = with_raw(endpoint, name, str(MAX_SEQUENCES))
    assert parse_request(endpoint, widest).sequences == MAX_SEQUENCES
    for raw in (str(MAX_SEQUENCES + 1), "1000000000"):
        assert refusal(endpoint, with_raw(endpoint, name, raw)).code == ErrorCode.INTEGER_TOO_LARGE


def test_zero_is_a_limit_only_where_a_prompt_is_scored() -> None:
    """Echo with nothing generated reserves 0; zero is never taken for absent."""
    facts = parse(Endpoint.COMPLETIONS, prompt="hi", max_tokens=0, echo=True)
    assert (facts.max_output_tokens, facts.echo) == (0, True)
    for endpoint, echo in ((Endpoint.COMPLETIONS, False), (Endpoint.CHAT, True)):
        body = json.dumps(SMALLEST[endpoint] | {"max_tokens": 0, "echo": echo}).encode()
        assert refusal(endpoint, body).code == ErrorCode.INTEGER_TOO_SMALL


@pytest.mark.parametrize("stream", [True, False, None])
@pytest.mark.parametrize(
    ("fields", "wish"),
    [
        ({}, UsageWish.SILENT),
        ({"stream_options": None}, UsageWish.OTHERWISE),
        ({"stream_options": {}}, UsageWish.OTHERWISE),
        ({"stream_options": {"include_usage": False}}, UsageWish.OTHERWISE),
        ({"stream_options": {"include_usage": None}}, UsageWish.OTHERWISE),
        ({"stream_options": {"include_usage": 1}}, UsageWish.OTHERWISE),
        ({"stream_options": {"include_usage": "true"}}, UsageWish.OTHERWISE),
        ({"stream_options": {"continuous_usage_stats": True}}, UsageWish.OTHERWISE),
        ({"stream_options": "include_usage"}, UsageWish.OTHERWISE),
        ({"stream_options": [{"include_usage": True}]}, UsageWish.OTHERWISE),
        ({"stream_options": {"include_usage": True}}, UsageWish.ASKED),
        (
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            UsageWish.ASKED,
        ),
    ],
)
def test_a_wish_for_usage_is_asked_otherwise_or_silent(
    fields: dict[str, Any], wish: UsageWish, *, stream: bool | None
) -> None:
    """Whether there is a stream that it could mean anything to is another fact."""
    facts = parse(Endpoint.CHAT, **SMALLEST[Endpoint.CHAT], **fields, stream=stream)
    assert (facts.stream, facts.usage_wish) == (stream is True, wish)


@pytest.mark.parametrize(("raw", "stream"), [("true", True), ("false", False), ("null", False)])
@pytest.mark.parametrize("endpoint", DECODING)
def test_streams_are_asked_for_alike_everywhere(
    endpoint: Endpoint, raw: str, *, stream: bool
) -> None:
    """By the same flag."""
    assert parse_request(endpoint, with_raw(endpoint, "stream", raw)).stream is stream


@pytest.mark.parametrize("name", ["stream", "echo"])
@pytest.mark.parametrize("raw", ["1", "0", '"true"', "[]", "{}"])
def test_flags_are_true_or_false(name: str, raw: str) -> None:
    """Backends read other values differently."""
    error = refusal(Endpoint.COMPLETIONS, with_raw(Endpoint.COMPLETIONS, name, raw))
    assert (error.code, error.param) == (ErrorCode.INVALID_TYPE, name)
