"""
The answers that we give ourselves, in the error shape of the endpoint, with headers that SDKs act on.

OpenAI's and Anthropic's SDKs obey the same headers in the same order: `x-should-retry`, then
`retry-after-ms`, then `retry-after`. Every number in a header is a plain decimal integer or a Go
duration, never negative: the SDKs ignore zero, negative and non-finite waits and then guess their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.openai.endpoint import Dialect

MAX_RETRY_AFTER_S = 120
"""OpenAI's SDKs do not retry at all when told to wait longer than this; older ones guess above 60 s."""

MAX_STRUCTURED_INTEGER = 999_999_999_999_999
"""Largest integer of an HTTP structured field (RFC 9651 section 3.3.1)."""

_TOKEN_RESOURCES = frozenset({"tokens", "kv_cache"})

Headers = tuple[tuple[str, str], ...]

_JSON = ("content-type", "application/json")
_NO_RETRY = ("x-should-retry", "false")

_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""
`error.type` by status (Anthropic, API reference, errors). Every other 4xx is an `invalid_request_error`
there; 503 is not listed, and `overloaded_error` (of their own 529) is what it means.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP response; header names are in lower case."""

    status: int
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class RateLimits:
    """
    Where one entitlement stands, for the rate-limit headers. Negative values are reported as 0.

    Attributes:
        limit_requests: requests it may have in flight.
        remaining_requests: how many more it may start now.
        reset_requests_ms: until all of them are free again.
        limit_tokens: depth of its token bucket.
        remaining_tokens: tokens in it now.
        reset_tokens_ms: until it is full again.
        window_ms: time in which the bucket fills from empty.
    """

    limit_requests: int
    remaining_requests: int
    reset_requests_ms: int
    limit_tokens: int
    remaining_tokens: int
    reset_tokens_ms: int
    window_ms: int


def rate_limit_headers(limits: RateLimits) -> Headers:
    """OpenAI's `x-ratelimit-*` and the IETF draft's two fields, for a request that was admitted."""
    return _limit_headers(limits, _seconds(limits.reset_tokens_ms))


def shed_answer(
    *,
    reason: str,
    resource: str,
    message: str,
    retry_after_ms: int,
    limits: RateLimits,
    should_retry: bool = True,
    dialect: Dialect = Dialect.OPENAI,
) -> Answer:
    """
    The 429 of a request that was shed or evicted.

    Args:
        reason: why, as in the metrics; sent as `x-tokenpools-reason`.
        resource: what was short: `tokens`, `kv_cache` or `concurrency`.
        message: what was short and when to come back, for people.
        retry_after_ms: when to come back; kept within 1 ms and `MAX_RETRY_AFTER_S`.
        limits: where the entitlement stands.
        should_retry: False where waiting cannot help.
        dialect: the endpoint's; it shapes the body.
    """
    kind = "tokens" if resource in _TOKEN_RESOURCES else "requests"
    retry_ms = _retry_ms(retry_after_ms)
    headers = (
        *_answer_headers(retry_ms, reason=reason, should_retry=should_retry),
        *_limit_headers(limits, _seconds(retry_ms)),
    )
    body = _error_body(dialect, 429, message, kind, "rate_limit_exceeded")
    return Answer(429, headers, body)


def error_answer(error: RequestError, dialect: Dialect = Dialect.OPENAI) -> Answer:
    """The 4xx of a request that can never be served as it stands; the SDKs are told not to retry."""
    headers: Headers = (_JSON, _NO_RETRY)
    if error.status == 401:
        headers = (*headers, ("www-authenticate", "Bearer"))
    kind = "invalid_request_error"
    body = _error_body(dialect, error.status, str(error), kind, error.code, error.param)
    return Answer(error.status, headers, body)


def unavailable_answer(
    *,
    reason: str,
    message: str,
    retry_after_ms: int | None,
    should_retry: bool = True,
    dialect: Dialect = Dialect.OPENAI,
) -> Answer:
    """
    The 503 where no capacity stands behind the request.

    Args:
        reason: why, as in the metrics; sent as `x-tokenpools-reason`.
        message: the same for people.
        retry_after_ms: when to come back, kept as in `shed_answer`; None where nobody knows, and the
            SDKs back off by themselves.
        should_retry: False where waiting cannot help.
        dialect: the endpoint's; it shapes the body.
    """
    retry_ms = None if retry_after_ms is None else _retry_ms(retry_after_ms)
    headers = _answer_headers(retry_ms, reason=reason, should_retry=should_retry)
    body = _error_body(dialect, 503, message, "server_error", "service_unavailable")
    return Answer(503, headers, body)


def go_duration(duration_ms: int) -> str:
    """Milliseconds as Go prints a `time.Duration`: `0s`, `20ms`, `1.5s`, `6m0s`, `1h0m0s`."""
    if duration_ms <= 0:
        return "0s"
    if duration_ms < 1_000:
        return f"{duration_ms}ms"
    seconds, fraction_ms = divmod(duration_ms, 1_000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{fraction_ms:03d}".rstrip("0") if fraction_ms else ""
    if hours:
        return f"{hours}h{minutes}m{seconds}{fraction}s"
    return f"{minutes}m{seconds}{fraction}s" if minutes else f"{seconds}{fraction}s"


def _answer_headers(retry_ms: int | None, *, reason: str, should_retry: bool) -> Headers:
    headers: Headers = (_JSON, ("x-tokenpools-reason", reason))
    if retry_ms is not None:
        retry = (("retry-after", str(_seconds(retry_ms))), ("retry-after-ms", str(retry_ms)))
        headers = (*headers, *retry)
    return headers if should_retry else (*headers, _NO_RETRY)


def _limit_headers(limits: RateLimits, reset_s: int) -> Headers:
    quota = _structured(limits.limit_tokens)
    window_s = _structured(max(1, _seconds(limits.window_ms)))
    remaining = _structured(limits.remaining_tokens)
    return (
        ("x-ratelimit-limit-requests", str(max(0, limits.limit_requests))),
        ("x-ratelimit-remaining-requests", str(max(0, limits.remaining_requests))),
        ("x-ratelimit-reset-requests", go_duration(limits.reset_requests_ms)),
        ("x-ratelimit-limit-tokens", str(max(0, limits.limit_tokens))),
        ("x-ratelimit-remaining-tokens", str(max(0, limits.remaining_tokens))),
        ("x-ratelimit-reset-tokens", go_duration(limits.reset_tokens_ms)),
        ("ratelimit-policy", f'"default";q={quota};w={window_s};qu="tokens"'),
        ("ratelimit", f'"default";r={remaining};t={_structured(reset_s)}'),
    )


def _retry_ms(wait_ms: int) -> int:
    return min(max(1, wait_ms), MAX_RETRY_AFTER_S * 1_000)


def _seconds(duration_ms: int) -> int:
    """Whole seconds, rounded up, so that nobody comes back too early."""
    return -(-max(0, duration_ms) // 1_000)


def _structured(value: int) -> int:
    return min(max(0, value), MAX_STRUCTURED_INTEGER)


def _error_body(
    dialect: Dialect, status: int, message: str, kind: str, code: str, param: str | None = None
) -> bytes:
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})
