"""
What happens, as plain values: the events that the gate tells, and the report that it gives when asked.

Metrics, logs and the admin pages are made of these and of nothing else.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from envoy_tokenpools.core.admission import Resource
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.pool import EntitlementState, Limits, Mode, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.weight import Factors
from envoy_tokenpools.openai.usage import UsageSource


class Outcome(enum.Enum):
    """What became of a request at the gate."""

    ADMITTED = "admitted"
    SHED = "shed"
    REJECTED = "rejected"
    EVICTED = "evicted"
    BYPASSED = "bypassed"


class Ending(enum.Enum):
    """How an admitted request ended."""

    COMPLETED = "completed"
    CLIENT_GONE = "client_gone"
    BACKEND_ERROR = "backend_error"
    TRUNCATED = "truncated"
    EVICTED = "evicted"
    EXPIRED = "expired"


class WaitEnd(enum.Enum):
    """How the wait of a request for capacity ended."""

    ADMITTED = "admitted"
    SHED = "shed"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Decided:
    """
    A request was admitted, shed, rejected or let through unmetered.

    Attributes:
        outcome: what became of it.
        reason: why, from a small closed set (`core.admission.Reason`, error codes); empty when admitted. In shadow mode
            an admitted request carries the reason for which it would have been shed.
        pool: its pool; empty when it was rejected before one was known.
        entitlement: whose it was; empty when unknown.
        service_class: the class; None when unknown.
        estimated_prompt_tokens: our estimate of its prompt.
        reserved_tokens: what was reserved; 0 unless admitted.
        decision_us: time that the decision took, in microseconds; waiting for capacity is not among it.
    """

    outcome: Outcome
    reason: str = ""
    pool: str = ""
    entitlement: str = ""
    service_class: ServiceClass | None = None
    estimated_prompt_tokens: int = 0
    reserved_tokens: int = 0
    decision_us: int = 0


@dataclass(frozen=True, slots=True)
class Settled:
    """
    A lease ended and was charged.

    Attributes:
        pool: the pool.
        entitlement: whose lease it was.
        service_class: the class.
        ending: how the request ended.
        prompt_tokens: charged for the prompt.
        prompt_source: where that number comes from.
        completion_tokens: charged for the output.
        completion_source: where that number comes from.
        estimated_prompt_tokens: our estimate before, for the estimation error.
        held_ms: how long the lease was held.
    """

    pool: str
    entitlement: str
    service_class: ServiceClass
    ending: Ending
    prompt_tokens: int
    prompt_source: UsageSource
    completion_tokens: int
    completion_source: UsageSource
    estimated_prompt_tokens: int
    held_ms: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first generated text of an admitted request passed by, `elapsed_ms` after the request arrived."""

    pool: str
    service_class: ServiceClass
    elapsed_ms: int


@dataclass(frozen=True, slots=True)
class Waited:
    """A request waited for capacity for `waited_ms`, until it was admitted, was shed after all, or its client left."""

    pool: str
    service_class: ServiceClass
    end: WaitEnd
    waited_ms: int


class Observer(Protocol):
    """Takes events as they happen; must not block and must not raise."""

    def decided(self, event: Decided) -> None:
        """See `Decided`."""
        ...

    def settled(self, event: Settled) -> None:
        """See `Settled`."""
        ...

    def first_token(self, event: FirstToken) -> None:
        """See `FirstToken`."""
        ...

    def waited(self, event: Waited) -> None:
        """See `Waited`."""
        ...

    def store_failed(self, operation: str) -> None:
        """A call to the store failed; `operation` is its name (reserve, settle, ...)."""
        ...

    def config_reloaded(self, *, succeeded: bool) -> None:
        """A new configuration was put in force, or refused."""
        ...


@dataclass(frozen=True, slots=True)
class EntitlementReport:
    """One entitlement right now: what it was promised, may use and uses, and where it stands."""

    name: str
    service_class: ServiceClass
    state: EntitlementState
    baseline: Resources
    allocation: Resources
    in_flight: int
    concurrency: int
    reserved_tokens: int
    reserved_kv_bytes: int
    waiting: int
    weight: float
    debt: float
    burst: float


@dataclass(frozen=True, slots=True)
class PoolReport:
    """
    One pool right now; who waits, and how long the first of them has, is this replica's.
    """

    name: str
    models: tuple[str, ...]
    mode: Mode
    degraded: bool
    capacity: Resources
    usable: Resources
    in_flight: int
    concurrency: int
    reserved_tokens: int
    reserved_kv_bytes: int
    waiting: int = 0
    oldest_wait_ms: int = 0
    entitlements: Sequence[EntitlementReport] = ()
    prompt_ratios: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Priority:
    """
    Where an entitlement stood when a request of its was decided on.

    Attributes:
        weight: the product of its factors.
        factors: what each part contributes.
        debt: within [-1, 1].
        burst: at least 0.
        slo_target_ms: its target; None stands at the mean.
        mean_slo_ms: of the pool's targets; None without any.
    """

    weight: float
    factors: Factors
    debt: float
    burst: float
    slo_target_ms: int | None
    mean_slo_ms: float | None


@dataclass(frozen=True, slots=True)
class Shortage:
    """
    What was short when a request was refused.

    Attributes:
        resource: the limiting one.
        need: how much of it the request needed (tokens, bytes or sequences).
        available: how much it could have had.
        retry_after_ms: after what time it was expected to fit; what the client is told is up to a quarter longer.
    """

    resource: Resource
    need: int
    available: int
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How an admitted request ended, and what it was charged."""

    ending: Ending
    prompt_tokens: int
    prompt_source: UsageSource
    completion_tokens: int
    completion_source: UsageSource
    held_ms: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """
    Why a request was decided on as it was; its fields are the interface of `/explain` and of the log.

    Attributes:
        request_id: by which it was asked for.
        at_ms: pool time of the decision.
        age_ms: how long ago that was.
        pool: its pool.
        entitlement: whose it was.
        service_class: the class.
        state: the entitlement's.
        mode: `shadow` if it was not to be refused, or could not be any more.
        outcome: what became of it; `evicted` if it was admitted and ended early.
        reason: why, as the metrics have it; empty when admitted.
        rule: which rule of admission decided, in plain words.
        priority: weight, its factors, and what they come from; None if it got no further than its state.
        cost: what it needed; None if it got no further than its state.
        usable: the pool's capacity then.
        share: what its entitlement could use.
        guarantee: the reserved part of that.
        limits: its entitlement's own ceilings.
        inside_share: whether it was inside its share; None if that was not looked at.
        inside_guarantee: whether it was inside a reserved baseline; None if that was not looked at.
        shortage: what was short; None if nothing was. In shadow mode also of an admitted request.
        waited_ms: how long it waited for capacity.
        ended: how it ended; None while it runs, and if it was not admitted.
    """

    request_id: str
    at_ms: int
    age_ms: int
    pool: str
    entitlement: str
    service_class: ServiceClass
    state: EntitlementState
    mode: Mode
    outcome: Outcome
    reason: str
    rule: str
    priority: Priority | None
    cost: Cost | None
    usable: Resources | None
    share: Resources | None
    guarantee: Resources | None
    limits: Limits | None
    inside_share: bool | None
    inside_guarantee: bool | None
    shortage: Shortage | None
    waited_ms: int
    ended: Ended | None


class Reporter(Protocol):
    """Gives account of the pools."""

    async def refresh(self) -> None:
        """Bring the next `report` up to date; on a store failure it keeps the last one."""
        ...

    def report(self) -> Sequence[PoolReport]:
        """The pools as of the last `refresh`."""
        ...

    def explain(self, request_id: str) -> Explanation | None:
        """The newest decision on a request of this id; None if there was none here, or if it is forgotten."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether decisions can be made: configuration in force, and the store reachable or not needed."""
        ...

    @property
    def store_answers(self) -> bool:
        """Whether the store is reachable."""
        ...
