"""
What an operator declares: pools, entitlements and their service classes. Validated, frozen, no behaviour.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from envoy_tokenpools.core.resources import Resources


class ServiceClass(enum.Enum):
    """The five service classes (paper Table 1); order is rank, highest first."""

    DEDICATED = "dedicated"
    GUARANTEED = "guaranteed"
    ELASTIC = "elastic"
    SPOT = "spot"
    PREEMPTIBLE = "preemptible"

    @property
    def class_weight(self) -> float:
        """The class's factor of the weight (paper Table 1)."""
        return _CLASS_WEIGHTS[self]

    @property
    def rank(self) -> int:
        """The class's place in the order in which capacity is shared out, higher first; reserved classes are equal."""
        return _RANKS[self]

    @property
    def is_reserved(self) -> bool:
        """Whether the baseline is held ready and served whatever the others do."""
        return self in (ServiceClass.DEDICATED, ServiceClass.GUARANTEED)

    @property
    def has_baseline(self) -> bool:
        """Whether the class is promised anything at all."""
        return self not in (ServiceClass.SPOT, ServiceClass.PREEMPTIBLE)

    @property
    def may_burst(self) -> bool:
        """Whether use above the baseline is allowed when capacity is free."""
        return self is not ServiceClass.GUARANTEED


_CLASS_WEIGHTS = {
    ServiceClass.DEDICATED: 1000.0,
    ServiceClass.GUARANTEED: 1000.0,
    ServiceClass.ELASTIC: 100.0,
    ServiceClass.SPOT: 1.0,
    ServiceClass.PREEMPTIBLE: 0.1,
}


_RANKS = {
    ServiceClass.DEDICATED: 3,
    ServiceClass.GUARANTEED: 3,
    ServiceClass.ELASTIC: 2,
    ServiceClass.SPOT: 1,
    ServiceClass.PREEMPTIBLE: 0,
}


class EntitlementState(enum.Enum):
    """Whether capacity stands behind an entitlement (paper section 4.2)."""

    PENDING = "Pending"
    BOUND = "Bound"
    DEGRADED = "Degraded"
    EXPIRED = "Expired"


class Mode(enum.Enum):
    """`enforce` sheds; `shadow` decides and counts, and lets pass what it would shed."""

    ENFORCE = "enforce"
    SHADOW = "shadow"


class OutputEstimate(enum.Enum):
    """What is reserved for a request's output: what was learned, or all that it may generate."""

    P95 = "p95"
    MAX_TOKENS = "max_tokens"


class Reclaim(enum.Enum):
    """How capacity comes back from a class without a baseline: refuse it more, or end what it runs."""

    THROTTLE = "throttle"
    EVICT = "evict"


class OnStoreError(enum.Enum):
    """What becomes of a class's requests while the shared store is away: decided by this replica alone, or refused."""

    ALLOW = "allow"
    DENY = "deny"


class Fairness(enum.Enum):
    """
    What counts as demanded where debt is kept, which is the paper's average of service gaps (equation 2) either way.

    `ewma` counts every request once, when it was first sent. `backlog` counts what was delivered and, in
    every tick anew, what was asked for and not: a closed-loop client that waits outside demands all the while.
    """

    BACKLOG = "backlog"
    EWMA = "ewma"


@dataclass(frozen=True, slots=True)
class Limits:
    """Hard ceilings of one entitlement; None leaves a resource to the pool."""

    tokens_per_second: int | None = None
    kv_bytes: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Entitlement:
    """
    One tenant's right to a share of one pool.

    Attributes:
        name: unique within its pool.
        service_class: the service class.
        slo_target_ms: wanted time to first token; None stands at the pool's mean.
        baseline: what is promised; `Resources.NONE` for spot and preemptible.
        limits: hard ceilings. A guaranteed entitlement's baseline is one by itself.
        lend: whether the idle part of a guaranteed baseline may be used by others.
        reclaim: whether its running requests may be ended to give a reserved baseline back; spot and preemptible only.
        max_wait_ms: how long a request may wait for capacity instead of being shed; 0 is not at all.
        state: only `Bound` and `Degraded` entitlements are served.
    """

    name: str
    service_class: ServiceClass
    slo_target_ms: int | None = None
    baseline: Resources = Resources.NONE
    limits: Limits = Limits()
    lend: bool = True
    reclaim: Reclaim = Reclaim.THROTTLE
    max_wait_ms: int = 0
    state: EntitlementState = EntitlementState.BOUND

    @property
    def lends(self) -> bool:
        """Whether others may use this baseline while it is idle: never of a dedicated one."""
        return self.service_class is not ServiceClass.DEDICATED and self.lend

    @property
    def ceilings(self) -> Limits:
        """The hard ceilings in force: what was configured, and the baseline of a class that may not burst."""
        if self.service_class.may_burst:
            return self.limits
        return Limits(
            _lower(self.limits.tokens_per_second, self.baseline.tokens_per_second),
            _lower(self.limits.kv_bytes, self.baseline.kv_bytes),
            _lower(self.limits.concurrency, self.baseline.concurrency),
        )


def _lower(limit: int | None, baseline: int) -> int:
    return baseline if limit is None else min(limit, baseline)


@dataclass(frozen=True, slots=True)
class Gains:
    """
    The constants of weight, burst and debt (paper section 3.3, experiment 2).

    Attributes:
        slo: alpha_slo.
        burst: alpha_burst.
        debt: alpha_debt.
        gamma: what an EWMA keeps of its value over `EWMA_PERIOD_MS`.
    """

    slo: float = 2.0
    burst: float = 1.0
    debt: float = 4.0
    gamma: float = 0.7


@dataclass(frozen=True, slots=True)
class Pool:
    """
    The capacity of one model's backend and who is entitled to it.

    Attributes:
        name: unique among pools.
        models: names that clients may use for it.
        capacity: of all replicas together.
        kv_bytes_per_token: KV cache bytes that one token of context occupies.
        tokenizer: vocabulary that estimates this pool's prompts.
        default_max_tokens: output assumed where a request states no maximum.
        image_tokens: what one image of a prompt counts.
        audio_tokens: what one audio clip or file of a prompt counts.
        flat_tokens: what a request counts whose work is not text: a picture made, a file transcribed.
        inject_usage: whether streams that say nothing about usage ask the backend for it.
        output_estimate: how a request's output is reserved.
        mode: enforce or shadow.
        window_ms: depth of the token buckets, as time at their rate.
        tick_ms: how often weights, debts and allocations are recomputed.
        headroom: share (0 to 1) of idle guaranteed baselines that is kept free for them.
        ramp_per_second: share of restored capacity that becomes usable per second.
        max_waiting: requests that may wait at the same time; beyond it the least of them is shed.
        fairness: how debt is kept.
        on_store_error: by class, whether requests are admitted while the shared store is away.
        gains: constants of the weight.
        entitlements: by name.
    """

    name: str
    models: tuple[str, ...]
    capacity: Resources
    kv_bytes_per_token: int
    tokenizer: str = "o200k_base"
    default_max_tokens: int = 256
    image_tokens: int = 1_024
    audio_tokens: int = 1_024
    flat_tokens: int = 1_024
    inject_usage: bool = True
    output_estimate: OutputEstimate = OutputEstimate.P95
    mode: Mode = Mode.ENFORCE
    window_ms: int = 10_000
    tick_ms: int = 5_000
    headroom: float = 0.0
    ramp_per_second: float = 0.25
    max_waiting: int = 256
    fairness: Fairness = Fairness.BACKLOG
    on_store_error: Mapping[ServiceClass, OnStoreError] = field(
        default_factory=lambda: Pool.DEFAULT_ON_STORE_ERROR
    )
    gains: Gains = Gains()
    entitlements: Mapping[str, Entitlement] = field(default_factory=dict)

    DEFAULT_ON_STORE_ERROR: ClassVar[Mapping[ServiceClass, OnStoreError]] = {
        each: OnStoreError.ALLOW if each.has_baseline else OnStoreError.DENY
        for each in ServiceClass
    }

    @property
    def kv_capacity_tokens(self) -> int:
        """How many tokens of context the KV cache can hold at once."""
        return self.capacity.kv_bytes // self.kv_bytes_per_token

    @property
    def window_tokens(self) -> int:
        """Depth of the pool's token bucket."""
        return self.capacity.tokens_per_second * self.window_ms // 1_000
