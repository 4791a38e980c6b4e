"""
How a refusal is told to the client: what was short, by which rule, and when to come back.
"""

import zlib

from envoy_tokenpools.core.admission import Balance, Reason, Refusal, Resource
from envoy_tokenpools.core.judging import NEVER_MS
from envoy_tokenpools.core.pool import Pool
from envoy_tokenpools.gate.order import Admitted, Order
from envoy_tokenpools.openai.answers import (
    Answer,
    RateLimits,
    go_duration,
    shed_answer,
    unavailable_answer,
)

JITTER = 0.25
"""A wait is lengthened by up to this share, so that clients shed together do not come back together."""

EVICTED_WAIT_MS = 1_000
"""An evicted request would be evicted again if it came back at once."""

_UNIT = {
    Resource.TOKENS: "tokens",
    Resource.KV_CACHE: "bytes of KV cache",
    Resource.CONCURRENCY: "concurrent sequences",
}

_RULE = {
    Reason.CONCURRENCY_LIMIT: "this entitlement's concurrency limit is reached",
    Reason.KV_CACHE_LIMIT: "this entitlement's KV cache limit is reached",
    Reason.TOKEN_RATE_LIMIT: "this entitlement's token rate is used up",
    Reason.POOL_CONTENDED: "the pool has no free capacity for it",
    Reason.LOW_PRIORITY: "it is beyond this entitlement's share, and requests with a better claim wait",
}


def _lengthened(wait_ms: int, jitter: float) -> int:
    """By up to `JITTER`; `jitter` is within [0, 1)."""
    return round(wait_ms * (1.0 + JITTER * jitter))


def rate_limits(balance: Balance, pool: Pool) -> RateLimits:
    """The balance as `x-ratelimit-*` tell it: requests are sequences at once, tokens are the bucket."""
    return RateLimits(
        limit_requests=balance.limit_concurrency,
        remaining_requests=balance.remaining_concurrency,
        reset_requests_ms=balance.reset_concurrency_ms,
        limit_tokens=balance.limit_tokens,
        remaining_tokens=balance.remaining_tokens,
        reset_tokens_ms=balance.reset_tokens_ms,
        window_ms=pool.window_ms,
    )


def shed(refusal: Refusal, balance: Balance, order: Order, jitter: float) -> Answer:
    """
    The 429 for a refusal.

    Args:
        refusal: what the store said.
        balance: what the entitlement has left.
        order: what was asked.
        jitter: within [0, 1); lengthens the wait by up to `JITTER`.
    """
    pool, entitlement = order.pool, order.entitlement
    retry_after_ms = _lengthened(refusal.retry_after_ms, jitter)
    message = (
        f"Request shed by token pool '{pool.name}': {_RULE[refusal.reason]} "
        f"({refusal.reason.value}). It needs {refusal.need} {_UNIT[refusal.resource]}, "
        f"{refusal.available} available to entitlement '{entitlement.name}' "
        f"({entitlement.service_class.value}). Try again in {go_duration(retry_after_ms)}."
    )
    return shed_answer(
        reason=refusal.reason.value,
        resource=refusal.resource.value,
        message=message,
        retry_after_ms=retry_after_ms,
        limits=rate_limits(balance, pool),
        should_retry=refusal.retry_after_ms < NEVER_MS,
        dialect=order.facts.endpoint.dialect,
    )


def evicted(admitted: Admitted) -> Answer:
    """The 429 for a request that was ended, before any answer, to give its capacity back."""
    pool, entitlement = admitted.order.pool, admitted.order.entitlement
    wait_ms = max(EVICTED_WAIT_MS, admitted.balance.reset_concurrency_ms)
    retry_after_ms = _lengthened(wait_ms, zlib.crc32(admitted.lease.lease_id.encode()) / 2**32)
    return shed_answer(
        reason="evicted",
        resource=Resource.CONCURRENCY.value,
        message=f"Request evicted from token pool '{pool.name}': its capacity was needed for a reserved baseline, "
        f"and requests of entitlement '{entitlement.name}' ({entitlement.service_class.value}) give theirs back. "
        f"Try again in {go_duration(retry_after_ms)}.",
        retry_after_ms=retry_after_ms,
        limits=rate_limits(admitted.balance, pool),
        dialect=admitted.order.facts.endpoint.dialect,
    )


def not_served(order: Order) -> Answer:
    """The 503 for an entitlement without capacity behind it (admission rule 3)."""
    state = order.entitlement.state.value
    return unavailable_answer(
        reason=f"entitlement_{state.lower()}",
        message=f"Entitlement '{order.entitlement.name}' of token pool '{order.pool.name}' is {state}: "
        "no capacity stands behind it.",
        retry_after_ms=None,
        dialect=order.facts.endpoint.dialect,
    )


def store_away(order: Order) -> Answer:
    """The 503 when the shared state cannot be asked."""
    return unavailable_answer(
        reason="store_unavailable",
        message=f"Token pool '{order.pool.name}' cannot decide now: its shared state is not reachable.",
        retry_after_ms=1_000,
        dialect=order.facts.endpoint.dialect,
    )
