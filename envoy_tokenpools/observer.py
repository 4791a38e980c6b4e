"""
What happens, as plain values: the events that the gate tells, and the report that it gives when asked.

Metrics, logs and the admin pages are made of these and of nothing else.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from envoy_tokenpools.core.pool import EntitlementState, Mode, ServiceClass
from envoy_tokenpools.core.resources import Resources
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
        decision_us: time that the decision took, in microseconds.
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
    """One pool right now."""

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
    entitlements: Sequence[EntitlementReport] = ()
    prompt_ratios: Mapping[str, float] = field(default_factory=dict)


class Reporter(Protocol):
    """Gives account of the pools."""

    async def refresh(self) -> None:
        """Bring the next `report` up to date; on a store failure it keeps the last one."""
        ...

    def report(self) -> Sequence[PoolReport]:
        """The pools as of the last `refresh`."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether decisions can be made: configuration in force and store reachable."""
        ...
