"""What a refusal tells its client."""

import re
from dataclasses import replace

import msgspec
import pytest

from envoy_tokenpools.core.admission import Balance, Reason, Refusal, Resource
from envoy_tokenpools.core.judging import NEVER_MS
from envoy_tokenpools.core.pool import Entitlement, EntitlementState, ServiceClass
from envoy_tokenpools.gate import answering
from envoy_tokenpools.gate.order import Order
from envoy_tokenpools.openai.answers import Answer
from envoy_tokenpools.openai.endpoint import Endpoint
from tests.support.gate import configured, order_for
from tests.support.pools import amount, entitlement, pool

OWNER = entitlement("batch", ServiceClass.SPOT)
BALANCE = Balance(
    limit_tokens=10_000,
    remaining_tokens=120,
    reset_tokens_ms=9_880,
    limit_concurrency=4,
    remaining_concurrency=0,
    reset_concurrency_ms=700,
)


def refused(
    reason: Reason = Reason.POOL_CONTENDED,
    resource: Resource = Resource.TOKENS,
    retry_after_ms: int = 1_500,
    jitter: float = 0.0,
) -> Answer:
    """The answer to a request for 300 of which 120 are there."""
    refusal = Refusal(reason, resource, 300, 120, retry_after_ms)
    return answering.shed(refusal, BALANCE, order(), jitter)


def order(owner: Entitlement = OWNER, endpoint: Endpoint = Endpoint.COMPLETIONS) -> Order:
    """What was asked."""
    config = configured(pool(amount(1_000), owner))
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "prompt": "hi", "messages": messages, "max_tokens": 4}
    return order_for(config, msgspec.json.encode(body), owner.name, endpoint=endpoint)


def message_of(answer: Answer) -> str:
    """The text for people."""
    message: str = msgspec.json.decode(answer.body)["error"]["message"]
    return message


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("resource", Resource)
def test_a_refusal_says_what_was_short_and_why(reason: Reason, resource: Resource) -> None:
    """Every reason with every resource has its words; numbers, owner and pool are named."""
    answer = refused(reason, resource)
    message = message_of(answer)
    headers = dict(answer.headers)
    assert answer.status == 429
    assert headers["x-tokenpools-reason"] == reason.value
    assert f"({reason.value})" in message
    for part in ("'pool'", "'batch' (spot)", "needs 300", "120 available", "1.5s"):
        assert part in message
    error = msgspec.json.decode(answer.body)["error"]
    assert error["code"] == "rate_limit_exceeded"
    assert error["type"] == ("requests" if resource is Resource.CONCURRENCY else "tokens")


@pytest.mark.parametrize(
    ("wait_ms", "seconds", "shown"),
    [
        (1, "1", "1ms"),
        (200, "1", "200ms"),
        (1_000, "1", "1s"),
        (1_001, "2", "1.001s"),
        (43_000, "43", "43s"),
        (119_999, "120", "1m59.999s"),
        (3_599_999, "120", "59m59.999s"),
    ],
)
def test_the_wait_is_whole_seconds_at_least_one(wait_ms: int, seconds: str, shown: str) -> None:
    """Rounded up, and cut where the SDKs would give up; people read it as a duration."""
    answer = refused(retry_after_ms=wait_ms)
    headers = dict(answer.headers)
    assert headers["retry-after"] == seconds
    assert 0 < int(headers["retry-after-ms"]) <= int(seconds) * 1_000
    assert f"in {shown}." in message_of(answer)


@pytest.mark.parametrize("wait_ms", [1, 999, 10**6, NEVER_MS - 1, NEVER_MS, 10**12])
def test_no_wait_is_told_in_powers_of_ten(wait_ms: int) -> None:
    """Nor as infinite, nor negative."""
    answer = refused(retry_after_ms=wait_ms, jitter=0.999)
    assert not re.search(r"\de[+-]?\d|inf|nan|-\d", message_of(answer))
    for name, value in answer.headers:
        if name.startswith("retry-after"):
            assert re.fullmatch(r"[1-9][0-9]*", value)


def test_a_wait_that_cannot_help_is_not_advised() -> None:
    """A pool that never fills: the SDKs are told not to try, whatever the jitter."""
    for jitter in (0.0, 0.999):
        assert (
            dict(refused(retry_after_ms=NEVER_MS, jitter=jitter).headers)["x-should-retry"]
            == "false"
        )
    assert "x-should-retry" not in dict(refused(retry_after_ms=NEVER_MS - 1, jitter=0.999).headers)


def test_jitter_lengthens_the_wait_by_a_quarter_at_most() -> None:
    """Never shortens it; those who were shed together come back apart."""
    waits = [
        int(dict(refused(retry_after_ms=40_000, jitter=jitter / 10).headers)["retry-after-ms"])
        for jitter in range(10)
    ]
    assert waits[0] == 40_000
    assert waits == sorted(set(waits))
    assert waits[-1] < 50_000


def test_a_refusal_carries_the_rate_limits() -> None:
    """What is left, with `RateLimit` agreeing with `Retry-After`."""
    headers = dict(refused(retry_after_ms=1_500).headers)
    assert headers["x-ratelimit-limit-requests"] == "4"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"] == "700ms"
    assert headers["x-ratelimit-limit-tokens"] == "10000"
    assert headers["x-ratelimit-remaining-tokens"] == "120"
    assert headers["x-ratelimit-reset-tokens"] == "9.88s"
    assert headers["ratelimit"] == '"default";r=120;t=2'
    assert headers["ratelimit-policy"] == '"default";q=10000;w=10;qu="tokens"'


@pytest.mark.parametrize("state", [EntitlementState.PENDING, EntitlementState.EXPIRED])
def test_an_entitlement_without_capacity_is_unavailable(state: EntitlementState) -> None:
    """503 that names the state; when it changes nobody knows."""
    answer = answering.not_served(order(replace(OWNER, state=state)))
    headers = dict(answer.headers)
    assert answer.status == 503
    assert headers["x-tokenpools-reason"] == f"entitlement_{state.value.lower()}"
    assert "retry-after" not in headers
    assert state.value in message_of(answer)


def test_a_store_that_is_away_is_unavailable_for_a_second() -> None:
    """503, to be tried again soon."""
    answer = answering.store_away(order())
    headers = dict(answer.headers)
    assert (answer.status, headers["retry-after"]) == (503, "1")
    assert headers["x-tokenpools-reason"] == "store_unavailable"


def test_answers_follow_the_dialect_of_their_endpoint() -> None:
    """Anthropic's clients read another shape, for every answer of ours."""
    asked = order(endpoint=Endpoint.MESSAGES)
    refusal = Refusal(Reason.POOL_CONTENDED, Resource.TOKENS, 300, 120, 1_500)
    for answer, kind in (
        (answering.shed(refusal, BALANCE, asked, 0.0), "rate_limit_error"),
        (answering.not_served(asked), "overloaded_error"),
        (answering.store_away(asked), "overloaded_error"),
    ):
        body = msgspec.json.decode(answer.body)
        assert body["type"] == "error"
        assert body["error"]["type"] == kind
        assert "'pool'" in body["error"]["message"]
