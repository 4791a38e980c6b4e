"""Answers that we give ourselves: what clients read in them."""

import json
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.openai.answers import (
    MAX_RETRY_AFTER_S,
    Answer,
    RateLimits,
    error_answer,
    go_duration,
    rate_limit_headers,
    shed_answer,
    unavailable_answer,
)
from envoy_tokenpools.openai.endpoint import Dialect

LIMITS = RateLimits(
    limit_requests=16,
    remaining_requests=3,
    reset_requests_ms=20,
    limit_tokens=2_400,
    remaining_tokens=150,
    reset_tokens_ms=9_375,
    window_ms=10_000,
)

ANY_LIMITS = st.builds(RateLimits, *[st.integers(-(2**70), 2**70)] * 7)


def shed(retry_after_ms: int = 200, **changes: Any) -> Answer:
    """A 429 with everything usual but what is changed."""
    usual: dict[str, Any] = {
        "reason": "pool_contended",
        "resource": "tokens",
        "message": "Tokens are short.",
        "limits": LIMITS,
    }
    return shed_answer(retry_after_ms=retry_after_ms, **(usual | changes))


def error_of(answer: Answer) -> dict[str, Any]:
    """The error object of an answer's body."""
    body = json.loads(answer.body)
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    return error


def seconds_of(duration: str) -> Fraction:
    """A Go duration read back, by the grammar of `time.ParseDuration` as far as we print it."""
    match = re.fullmatch(r"(\d+)ms|(?:(\d+)h)?(?:(\d+)m)?(\d+(?:\.\d+)?)s", duration, re.ASCII)
    assert match is not None, duration
    ms, hours, minutes, seconds = match.groups()
    if ms:
        return Fraction(int(ms), 1_000)
    return Fraction(seconds) + 60 * int(minutes or 0) + 3_600 * int(hours or 0)


@pytest.mark.parametrize(
    ("duration_ms", "printed"),
    [
        (0, "0s"),
        (-43_000, "0s"),
        (1, "1ms"),
        (20, "20ms"),
        (999, "999ms"),
        (1_000, "1s"),
        (1_001, "1.001s"),
        (1_010, "1.01s"),
        (1_500, "1.5s"),
        (59_999, "59.999s"),
        (60_000, "1m0s"),
        (61_500, "1m1.5s"),
        (360_000, "6m0s"),
        (3_600_000, "1h0m0s"),
        (3_600_050, "1h0m0.05s"),
        (90_061_000, "25h1m1s"),
    ],
)
def test_durations_are_printed_as_go_prints_them(duration_ms: int, printed: str) -> None:
    """The values are those of Go's `time.Duration.String`."""
    assert go_duration(duration_ms) == printed


@settings(deadline=None)
@given(st.integers(0, 2**53))
def test_a_printed_duration_reads_back_exactly(duration_ms: int) -> None:
    """Nothing is rounded away, and minutes and seconds stay below 60 where a larger unit exists."""
    printed = go_duration(duration_ms)
    assert seconds_of(printed) * 1_000 == duration_ms
    parts = re.findall(r"(\d+)(?:\.\d+)?(m?s|m|h)", printed)
    assert all(int(value) < 60 for value, unit in parts[1:] if unit in ("m", "s"))


def test_limits_are_reported_to_an_admitted_request_in_both_dialects() -> None:
    """OpenAI's six headers and the two fields of the IETF draft."""
    assert dict(rate_limit_headers(LIMITS)) == {
        "x-ratelimit-limit-requests": "16",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "20ms",
        "x-ratelimit-limit-tokens": "2400",
        "x-ratelimit-remaining-tokens": "150",
        "x-ratelimit-reset-tokens": "9.375s",
        "ratelimit-policy": '"default";q=2400;w=10;qu="tokens"',
        "ratelimit": '"default";r=150;t=10',
    }


def test_a_bucket_in_debt_is_reported_as_empty() -> None:
    """A bucket below zero after settlement is never printed as a negative number."""
    headers = dict(rate_limit_headers(RateLimits(1, -1, -5, 1_000, -200, 12_000, 500)))
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"] == "0s"
    assert headers["x-ratelimit-remaining-tokens"] == "0"
    assert headers["ratelimit"] == '"default";r=0;t=12'
    assert headers["ratelimit-policy"] == '"default";q=1000;w=1;qu="tokens"'


@settings(deadline=None)
@given(ANY_LIMITS)
def test_limit_headers_are_well_formed_whatever_the_numbers(limits: RateLimits) -> None:
    """Plain non-negative integers, Go durations, and structured-field integers of 15 digits."""
    for name, value in rate_limit_headers(limits):
        if name.startswith("x-ratelimit-reset"):
            assert seconds_of(value) >= 0
        elif name.startswith("x-ratelimit"):
            assert re.fullmatch(r"\d+", value, re.ASCII)
        elif name == "ratelimit":
            assert re.fullmatch(r'"default";r=\d{1,15};t=\d{1,15}', value, re.ASCII)
        else:
            shape = r'"default";q=\d{1,15};w=[1-9]\d{0,14};qu="tokens"'
            assert re.fullmatch(shape, value, re.ASCII)


@pytest.mark.parametrize(
    ("retry_after_ms", "seconds", "ms"),
    [
        (200, "1", "200"),
        (1_000, "1", "1000"),
        (1_001, "2", "1001"),
        (43_000, "43", "43000"),
        (3_600_000, "120", "120000"),
        (0, "1", "1"),
        (-43_000, "1", "1"),
        (10**30, "120", "120000"),
    ],
)
def test_a_shed_request_is_told_when_to_come_back(
    retry_after_ms: int, seconds: str, ms: str
) -> None:
    """Seconds are rounded up and at least 1, both headers agree, and neither passes the SDKs' ceiling."""
    headers = dict(shed(retry_after_ms).headers)
    assert headers["retry-after"] == seconds
    assert headers["retry-after-ms"] == ms
    assert headers["ratelimit"].endswith(f";t={seconds}")


@settings(deadline=None)
@given(st.integers(-(2**70), 2**70), ANY_LIMITS)
def test_waits_are_positive_and_agree(retry_after_ms: int, limits: RateLimits) -> None:
    """0 < retry-after-ms <= retry-after * 1000 < retry-after-ms + 1000, up to the ceiling."""
    headers = dict(shed(retry_after_ms, limits=limits).headers)
    seconds, ms = int(headers["retry-after"]), int(headers["retry-after-ms"])
    assert 0 < ms <= seconds * 1_000 < ms + 1_000
    assert seconds <= MAX_RETRY_AFTER_S


def test_a_shed_answer_says_what_was_short_and_why() -> None:
    """The body is OpenAI's rate-limit error and the reason is a header."""
    answer = shed(message='Tokens are "short": need 90, have 10.\nCome back in 1 s.')
    assert answer.status == 429
    assert error_of(answer) == {
        "message": 'Tokens are "short": need 90, have 10.\nCome back in 1 s.',
        "type": "tokens",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    headers = dict(answer.headers)
    assert headers["content-type"] == "application/json"
    assert headers["x-tokenpools-reason"] == "pool_contended"
    assert headers["x-ratelimit-limit-tokens"] == "2400"
    assert "x-should-retry" not in headers


@pytest.mark.parametrize(
    ("resource", "kind"),
    [("tokens", "tokens"), ("kv_cache", "tokens"), ("concurrency", "requests")],
)
def test_the_error_type_follows_the_short_resource(resource: str, kind: str) -> None:
    """KV cache is made of tokens; sequences are requests to a client."""
    assert error_of(shed(resource=resource))["type"] == kind


def test_where_waiting_cannot_help_the_sdk_is_told_not_to_retry() -> None:
    """`x-should-retry: false` overrules the SDKs' habit of retrying every 429."""
    headers = dict(shed(should_retry=False).headers)
    assert headers["x-should-retry"] == "false"
    assert headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("status", "code", "param"),
    [
        (400, "invalid_type", "max_tokens"),
        (404, "model_not_found", "model"),
        (413, "request_too_large", None),
        (415, "unsupported_encoding", None),
    ],
)
def test_a_request_error_keeps_its_status_code_and_param(
    status: int, code: str, param: str | None
) -> None:
    """Every 4xx is an `invalid_request_error` that the SDKs must not repeat."""
    answer = error_answer(RequestError(status, code, "No.", param))
    assert answer.status == status
    assert error_of(answer) == {
        "message": "No.",
        "type": "invalid_request_error",
        "param": param,
        "code": code,
    }
    assert answer.headers == (("content-type", "application/json"), ("x-should-retry", "false"))


def test_an_unknown_key_is_challenged() -> None:
    """A 401 names the authentication scheme, as HTTP demands."""
    answer = error_answer(RequestError(401, "invalid_api_key", "Unknown key."))
    assert dict(answer.headers)["www-authenticate"] == "Bearer"
    assert error_of(answer)["code"] == "invalid_api_key"
    assert error_of(answer)["type"] == "invalid_request_error"


def test_no_capacity_is_a_503_with_a_reason() -> None:
    """Contended capacity is 429; capacity that does not exist is 503, and may come back."""
    answer = unavailable_answer(reason="pending", message="Not bound yet.", retry_after_ms=5_000)
    assert answer.status == 503
    assert answer.headers == (
        ("content-type", "application/json"),
        ("x-tokenpools-reason", "pending"),
        ("retry-after", "5"),
        ("retry-after-ms", "5000"),
    )
    assert error_of(answer) == {
        "message": "Not bound yet.",
        "type": "server_error",
        "param": None,
        "code": "service_unavailable",
    }


def test_a_503_without_a_known_end_promises_no_time() -> None:
    """Unknown waits are left to the client; hopeless ones are said to be hopeless."""
    unknown = dict(unavailable_answer(reason="store", message="", retry_after_ms=None).headers)
    assert not {"retry-after", "retry-after-ms", "x-should-retry"} & set(unknown)
    hopeless = unavailable_answer(
        reason="expired", message="", retry_after_ms=None, should_retry=False
    )
    assert ("x-should-retry", "false") in hopeless.headers


def anthropic_error_of(answer: Answer) -> dict[str, Any]:
    """The error of a body in Anthropic's shape."""
    body = json.loads(answer.body)
    assert list(body) == ["type", "error"]
    assert body["type"] == "error"
    error: dict[str, Any] = body["error"]
    return error


def test_anthropics_clients_are_shed_in_their_own_shape() -> None:
    """The body is another one; what their SDK acts on are the same headers."""
    answer = shed(message="No.", dialect=Dialect.ANTHROPIC)
    assert anthropic_error_of(answer) == {"type": "rate_limit_error", "message": "No."}
    assert (answer.status, answer.headers) == (429, shed(message="No.").headers)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (422, "invalid_request_error"),
    ],
)
def test_anthropics_error_types_follow_the_status(status: int, kind: str) -> None:
    """As its API reference lists them; the SDK is told not to retry."""
    error = RequestError(status, "any_code", "No.", "any_param")
    answer = error_answer(error, Dialect.ANTHROPIC)
    assert anthropic_error_of(answer) == {"type": kind, "message": "No."}
    assert (answer.status, answer.headers) == (status, error_answer(error).headers)


def test_no_capacity_is_overload_to_anthropics_clients() -> None:
    """Their API has no 503 of its own; with the status ours, the type is that of its 529."""
    usual = unavailable_answer(reason="pending", message="No.", retry_after_ms=5_000)
    answer = unavailable_answer(
        reason="pending", message="No.", retry_after_ms=5_000, dialect=Dialect.ANTHROPIC
    )
    assert anthropic_error_of(answer) == {"type": "overloaded_error", "message": "No."}
    assert (answer.status, answer.headers) == (503, usual.headers)
