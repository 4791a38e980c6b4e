"""
The words of an admission: terms, claims, leases, refusals and settlements.

All policy (weights, allocations, what is withheld) is decided when the `Terms` are written, once per tick. What is left
for the moment of a claim only compares and adds integers, so that a store can do it atomically (`ledger.py`).
"""

import enum
from dataclasses import dataclass

from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.pool import Limits
from envoy_tokenpools.core.resources import Resources

WHOLE_PPM = 1_000_000
"""All of it, in millionths."""


def part(amount: int, ppm: int) -> int:
    """`ppm` millionths of `amount`, rounded up: half a sequence withheld is one withheld."""
    return -(-amount * ppm // WHOLE_PPM)


class Reason(enum.Enum):
    """Why a request was shed: a small closed set, used as metric label and in `x-tokenpools-reason`."""

    CONCURRENCY_LIMIT = "concurrency_limit"
    KV_CACHE_LIMIT = "kv_cache_limit"
    TOKEN_RATE_LIMIT = "token_rate_limit"  # noqa: S105
    POOL_CONTENDED = "pool_contended"
    LOW_PRIORITY = "low_priority"


class Resource(enum.Enum):
    """The resource that was short."""

    TOKENS = "tokens"
    KV_CACHE = "kv_cache"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class Terms:
    """
    What one entitlement may use until the next tick.

    Attributes:
        entitlement: its name.
        weight: its weight now.
        guarantee: the part of a reserved baseline that stands; NONE for the other classes.
        share: its allocation. For reserved classes at least the guarantee.
        limits: its hard ceilings.
        withheld_ppm: millionths of its idle guarantee that nobody else may use: all of it for those that do not
            lend, the pool's headroom for those that do.
        rank: of its class; higher goes before lower, whatever the weights.
        evictable: whether its leases may be taken back to make room for a guarantee.
        reach: what of the pool it could have if nobody else were there: all but what is withheld for others. None is
            all of it.
    """

    entitlement: str
    weight: float
    guarantee: Resources
    share: Resources
    limits: Limits
    withheld_ppm: int = 0
    rank: int = 0
    evictable: bool = False
    reach: Resources | None = None

    @property
    def precedence(self) -> tuple[int, float]:
        """Who comes before whom where both were refused: class order is a rule, the weight decides inside a class."""
        return self.rank, self.weight


@dataclass(frozen=True, slots=True)
class Claim:
    """
    One request that asks for capacity.

    Attributes:
        lease_id: unique id of the lease that it would get; replaying a claim with a known id changes nothing.
        terms: what its entitlement may use.
        cost: what it needs.
        usable: the pool's capacity now.
        window_ms: depth of the token buckets.
        ttl_ms: how long the lease lives without being renewed.
        fingerprint: same entitlement and same fingerprint is the same request tried again.
        is_retry: the client says that it tried before.
        enforce: False records a refusal but reserves all the same (shadow mode).
    """

    lease_id: str
    terms: Terms
    cost: Cost
    usable: Resources
    window_ms: int
    ttl_ms: int
    fingerprint: int = 0
    is_retry: bool = False
    enforce: bool = True


@dataclass(frozen=True, slots=True)
class Refusal:
    """
    Why a claim was refused.

    Attributes:
        reason: which rule refused.
        resource: what was short.
        need: how much of it the request needs (tokens, bytes or sequences).
        available: how much it could have had.
        retry_after_ms: when it may fit, at least 1; before jitter.
    """

    reason: Reason
    resource: Resource
    need: int
    available: int
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class Lease:
    """
    The reservation of a cost for one admitted request; settled exactly once.

    Attributes:
        lease_id: its id.
        entitlement: whose it is.
        cost: what is reserved.
        within_share: taken inside the entitlement's allocation; its tokens count against that.
        within_guarantee: taken inside a reserved baseline; admitted whatever the pool held.
        tokens_guaranteed: its tokens count against the rate of a reserved baseline.
        pool_ppm: millionths of its tokens that count against what the pool's members share.
        admitted_at_ms: store time of admission.
        expires_at_ms: store time at which it returns by itself unless renewed.
        eviction_rank: the lower, the sooner it is taken back to make room for a guarantee; None is never.
        shadowed: the refusal that it would have got, in shadow mode.
    """

    lease_id: str
    entitlement: str
    cost: Cost
    within_share: bool
    within_guarantee: bool
    tokens_guaranteed: bool
    pool_ppm: int
    admitted_at_ms: int
    expires_at_ms: int
    eviction_rank: int | None = None
    shadowed: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """
    What settling a lease changed.

    Attributes:
        lease: the lease that ended.
        charged_tokens: what was charged in place of the reserved tokens.
        held_ms: how long it was held.
        late: it had expired before; only the tokens were corrected.
    """

    lease: Lease
    charged_tokens: int
    held_ms: int
    late: bool


@dataclass(frozen=True, slots=True)
class Balance:
    """
    What an entitlement has left right after a decision, for `x-ratelimit-*`.

    Attributes:
        limit_tokens: depth of its token bucket.
        remaining_tokens: what is left in it.
        reset_tokens_ms: until it is full again.
        limit_concurrency: sequences that it may run at once.
        remaining_concurrency: of those, free ones.
        reset_concurrency_ms: until one is expected to be free; 0 if one is.
    """

    limit_tokens: int
    remaining_tokens: int
    reset_tokens_ms: int
    limit_concurrency: int
    remaining_concurrency: int
    reset_concurrency_ms: int
