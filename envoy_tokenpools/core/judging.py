"""
The comparisons of an admission: does a cost fit, and if not, what is short and when to come back.

Integers only, and no state of its own: a store that keeps its books elsewhere mirrors these in its own language.
"""

from collections.abc import Callable

from envoy_tokenpools.core.account import Account
from envoy_tokenpools.core.admission import Reason, Refusal, Resource
from envoy_tokenpools.core.bucket import TokenBucket
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.resources import Resources

Wait = Callable[[], int]
"""When to come back, in milliseconds; asked only of those that are refused."""

NEVER_MS = 3_600_000
"""Stands for a bucket that does not fill at all: come back in an hour, when somebody has changed the configuration."""


def fits(account: Account, amount: Resources, bucket: TokenBucket, cost: Cost) -> bool:
    """Whether the account stays within `amount` with this cost; tokens by the bucket of that amount."""
    return (
        account.concurrency + cost.concurrency <= amount.concurrency
        and account.kv_bytes + cost.kv_bytes <= amount.kv_bytes
        and bucket.fits(cost.tokens)
    )


def fits_share(account: Account, share: Resources, cost: Cost) -> bool:
    """
    Whether the account stays within its share; the first request always does, while there is a share at all.

    As an untouched bucket admits a cost deeper than itself: else a share smaller than any one request would be none.
    """
    if account.in_flight == 0 and share.concurrency and share.kv_bytes:
        return account.share.fits(cost.tokens)
    return fits(account, share, account.share, cost)


def own_refusal(account: Account, cost: Cost, wait_ms: Wait) -> Refusal | None:
    """Rule 4: the entitlement's own ceilings. `wait_ms` tells when one of its leases is expected to end."""
    limits = account.terms.limits
    if limits.concurrency is not None:
        free = limits.concurrency - account.concurrency
        if cost.concurrency > free:
            reason = Reason.CONCURRENCY_LIMIT
            return _refuse(reason, Resource.CONCURRENCY, cost.concurrency, free, wait_ms())
    if limits.kv_bytes is not None:
        free = limits.kv_bytes - account.kv_bytes
        if cost.kv_bytes > free:
            reason = Reason.KV_CACHE_LIMIT
            return _refuse(reason, Resource.KV_CACHE, cost.kv_bytes, free, wait_ms())
    if account.limit is not None and not account.limit.fits(cost.tokens):
        return short_of_tokens(Reason.TOKEN_RATE_LIMIT, account.limit, cost)
    return None


def too_many_leases(cost: Cost, wait_ms: int) -> Refusal:
    """The entitlement holds as many leases as the books have pages for."""
    return _refuse(Reason.CONCURRENCY_LIMIT, Resource.CONCURRENCY, cost.concurrency, 0, wait_ms)


def room_refusal(
    cost: Cost, *, free_sequences: int, free_kv_bytes: int, wait_ms: Wait
) -> Refusal | None:
    """Rule 5, first half: what the pool has free of sequences and KV cache."""
    reason = Reason.POOL_CONTENDED
    if cost.concurrency > free_sequences:
        return _refuse(reason, Resource.CONCURRENCY, cost.concurrency, free_sequences, wait_ms())
    if cost.kv_bytes > free_kv_bytes:
        return _refuse(reason, Resource.KV_CACHE, cost.kv_bytes, free_kv_bytes, wait_ms())
    return None


def short_of_tokens(
    reason: Reason, bucket: TokenBucket, cost: Cost, other: TokenBucket | None = None
) -> Refusal:
    """Neither `bucket` nor the `other` one has enough; whichever has first is waited for."""
    buckets = (bucket,) if other is None else (bucket, other)
    waits = [wait for one in buckets if (wait := one.wait_ms(cost.tokens)) is not None]
    available = max(one.remaining for one in buckets)
    return _refuse(reason, Resource.TOKENS, cost.tokens, available, min(waits, default=NEVER_MS))


def beyond_share(account: Account, cost: Cost, wait_ms: int) -> Refusal:
    """Rule 5, second half: beyond its share, of which the first resource that is short is named."""
    share, reason = account.terms.share, Reason.LOW_PRIORITY
    free = share.concurrency - account.concurrency
    if cost.concurrency > free:
        return _refuse(reason, Resource.CONCURRENCY, cost.concurrency, free, wait_ms)
    free = share.kv_bytes - account.kv_bytes
    if cost.kv_bytes > free:
        return _refuse(reason, Resource.KV_CACHE, cost.kv_bytes, free, wait_ms)
    return _refuse(reason, Resource.TOKENS, cost.tokens, account.share.remaining, wait_ms)


def release_wait_ms(hold_us: int, in_flight: int, oldest_ms: int, ahead: int = 0) -> int:
    """
    Expected time until a lease ends for whoever has `ahead` others before it.

    The oldest, held for `oldest_ms`, ends when it has been held as long as leases are on average; from then on one ends
    every average holding time over `in_flight`. One that is held longer may end at any time.
    """
    step_us = hold_us // max(1, in_flight)
    first_us = max(hold_us - oldest_ms * 1_000, step_us)
    return max(1, (first_us + step_us * max(0, ahead - 1) + 500) // 1_000)


def _refuse(reason: Reason, resource: Resource, need: int, free: int, wait_ms: int) -> Refusal:
    return Refusal(reason, resource, need, max(0, free), max(1, wait_ms))
