"""
The policy that runs once per tick: from what was demanded and delivered to debts, weights, allocations and terms.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envoy_tokenpools.core.account import QUIET, Meters
from envoy_tokenpools.core.admission import WHOLE_PPM, Terms, part
from envoy_tokenpools.core.allocation import Allocation, Want, allocate
from envoy_tokenpools.core.pool import (
    Entitlement,
    EntitlementState,
    Fairness,
    Limits,
    Pool,
    Reclaim,
    ServiceClass,
)
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.weight import (
    burst_sample,
    ewma,
    mean_slo_ms,
    next_debt,
    service_gap,
    weight,
)


@dataclass(frozen=True, slots=True)
class Standing:
    """
    Where an entitlement stands: what a tick remembers of it for the next one, and shows.

    Attributes:
        debt: within [-1, 1]; 0 for classes that accumulate none.
        burst: at least 0.
        weight: its weight.
        demand: what it asked for in the last tick.
    """

    debt: float = 0.0
    burst: float = 0.0
    weight: float = 0.0
    demand: Resources = Resources.NONE

    @property
    def is_quiet(self) -> bool:
        """Whether a tick in which nothing happens leaves it as it is."""
        return self.debt == 0 and self.burst == 0 and self.demand == Resources.NONE


@dataclass(frozen=True, slots=True)
class Tick:
    """
    The outcome of one tick for one pool.

    Attributes:
        number: counts up from 0.
        usable: the capacity that was divided.
        standings: per entitlement that is served.
        terms: what each may use until the next tick.
        degraded: whether reserved baselines did not fit.
    """

    number: int
    usable: Resources
    standings: Mapping[str, Standing]
    terms: Mapping[str, Terms]
    degraded: bool


NEW_STANDING = Standing()
"""Of an entitlement that no tick has seen yet."""

_NO_LIMITS = Limits()

SMALLEST = 1e-6
"""An average below this is over: it would never reach 0 by itself."""


def first_tick(pool: Pool, usable: Resources, memory: Mapping[str, Standing] | None = None) -> Tick:
    """The terms before anything was asked for; `memory` brings debts and bursts back after a restart or reload."""
    return _tick(pool, 0, usable, memory or {}, {}, {}, elapsed_ms=0)


def next_tick(
    pool: Pool, previous: Tick, usable: Resources, readings: Mapping[str, Meters], elapsed_ms: int
) -> Tick:
    """
    The terms after a tick of `elapsed_ms` in which `readings` were taken.

    Demand is the higher of the last two ticks', so that a tenant between two requests does not lose its share.
    """
    return _tick(
        pool,
        previous.number + 1,
        usable,
        previous.standings,
        previous.terms,
        readings,
        elapsed_ms,
    )


def _tick(
    pool: Pool,
    number: int,
    usable: Resources,
    before: Mapping[str, Standing],
    terms_before: Mapping[str, Terms],
    readings: Mapping[str, Meters],
    elapsed_ms: int,
) -> Tick:
    served = [e for e in pool.entitlements.values() if is_served(e)]
    mean_slo = mean_slo_ms(served)
    standings: dict[str, Standing] = {}
    wants: list[Want] = []
    for entitlement in served:
        last = before.get(entitlement.name, NEW_STANDING)
        meters = readings.get(entitlement.name, QUIET)
        debt, burst, asked = last.debt, last.burst, last.demand
        if elapsed_ms > 0 and not (meters is QUIET and last.is_quiet):
            debt, burst, asked = _advance(entitlement, pool, last, meters, elapsed_ms)
        weight_now = weight(
            entitlement.service_class,
            slo_target_ms=entitlement.slo_target_ms,
            mean_slo_ms=mean_slo,
            burst=burst,
            debt=debt,
            gains=pool.gains,
        )
        now = last
        if asked is not last.demand or weight_now != last.weight:
            now = Standing(debt, burst, weight_now, asked)
        standings[entitlement.name] = now
        demand = now.demand if now is last else _higher(now.demand, last.demand)
        wants.append(_want(entitlement, now, demand))
    allocation = allocate(usable, wants)
    terms = _all_terms(pool, served, standings, allocation, terms_before)
    return Tick(number, usable, standings, terms, allocation.degraded)


def is_served(entitlement: Entitlement) -> bool:
    """Whether requests of this entitlement are served at all."""
    return entitlement.state in (EntitlementState.BOUND, EntitlementState.DEGRADED)


def _advance(
    entitlement: Entitlement, pool: Pool, last: Standing, meters: Meters, elapsed_ms: int
) -> tuple[float, float, Resources]:
    """Debt, burst and demand after `elapsed_ms` with these meters."""
    gamma = pool.gains.gamma
    delivered = max(0, meters.delivered_tokens) * 1_000 / elapsed_ms
    pending = max(0, meters.pending_tokens) * 1_000 / elapsed_ms
    demanded = delivered + pending
    if pool.fairness is Fairness.EWMA:
        demanded = max(0, meters.demanded_tokens) * 1_000 / elapsed_ms
    used = Resources(
        round(delivered), meters.kv_byte_ms // elapsed_ms, round(meters.sequence_ms / elapsed_ms)
    )
    baseline = entitlement.baseline
    debt = 0.0
    if entitlement.service_class is ServiceClass.ELASTIC:
        gap = service_gap(
            baseline=baseline.tokens_per_second, demanded=demanded, delivered=delivered
        )
        debt = next_debt(last.debt, gap, gamma=gamma, elapsed_ms=elapsed_ms)
    burst = ewma(last.burst, burst_sample(baseline, used), gamma=gamma, elapsed_ms=elapsed_ms)
    demand = Resources(
        math.ceil(delivered + pending),
        meters.peak_kv_bytes + max(0, meters.pending_kv_bytes),
        meters.peak_concurrency + max(0, meters.pending_concurrency),
    )
    return _over(debt), _over(burst), demand


def _over(average: float) -> float:
    return average if abs(average) >= SMALLEST else 0.0


def _want(entitlement: Entitlement, standing: Standing, demand: Resources) -> Want:
    """A degraded entitlement has lost its baseline: it stands among those who live from the surplus."""
    is_degraded = entitlement.state is EntitlementState.DEGRADED
    return Want(
        name=entitlement.name,
        service_class=_class_now(entitlement),
        baseline=Resources.NONE if is_degraded else entitlement.baseline,
        demand=_cap(demand, entitlement),
        weight=standing.weight,
        lends=entitlement.lends,
    )


def _class_now(entitlement: Entitlement) -> ServiceClass:
    """The class that an entitlement is served as: degraded, it lives from the surplus."""
    is_degraded = entitlement.state is EntitlementState.DEGRADED
    return ServiceClass.SPOT if is_degraded else entitlement.service_class


def _all_terms(
    pool: Pool,
    served: Sequence[Entitlement],
    standings: Mapping[str, Standing],
    allocation: Allocation,
    before: Mapping[str, Terms],
) -> dict[str, Terms]:
    """
    The terms of everybody, by name; those that did not change are the same objects as before.

    Each has its reach: what it could have if nobody else were there. That is of the whole capacity, also while some of
    it is lost: what fits then is refused for now, not for ever.
    """
    guarantees = [allocation.guarantees.get(e.name, Resources.NONE) for e in served]
    ppms = [_withheld_ppm(pool, e, each) for e, each in zip(served, guarantees, strict=True)]
    # Rounded up as the ledger does it: sequences once for all, KV bytes one by one.
    kv_bytes = [part(each.kv_bytes, ppm) for each, ppm in zip(guarantees, ppms, strict=True)]
    sequences = [each.concurrency * ppm for each, ppm in zip(guarantees, ppms, strict=True)]
    all_kv_bytes, all_sequences = sum(kv_bytes), sum(sequences)
    terms: dict[str, Terms] = {}
    for i, entitlement in enumerate(served):
        name, share = entitlement.name, allocation.shares[entitlement.name]
        if guarantees[i] is not Resources.NONE:
            share = _higher(share, guarantees[i])
        reach = Resources(
            pool.capacity.tokens_per_second,
            max(0, pool.capacity.kv_bytes - (all_kv_bytes - kv_bytes[i])),
            max(0, pool.capacity.concurrency + (sequences[i] - all_sequences) // WHOLE_PPM),
        )
        weight_now, old = standings[name].weight, before.get(name)
        if (
            old is not None
            and old.weight == weight_now
            and old.share == share
            and old.guarantee == guarantees[i]
            and old.reach == reach
            and old.withheld_ppm == ppms[i]
            and old.limits == entitlement.ceilings
            and old.rank == _class_now(entitlement).rank
            and old.evictable == (entitlement.reclaim is Reclaim.EVICT)
        ):
            terms[name] = old
            continue
        terms[name] = Terms(
            entitlement=name,
            weight=weight_now,
            guarantee=guarantees[i],
            share=share,
            limits=entitlement.ceilings,
            withheld_ppm=ppms[i],
            rank=_class_now(entitlement).rank,
            evictable=entitlement.reclaim is Reclaim.EVICT,
            reach=reach,
        )
    return terms


def _withheld_ppm(pool: Pool, entitlement: Entitlement, guarantee: Resources) -> int:
    """Millionths of an idle guarantee that nobody else may use."""
    if guarantee == Resources.NONE:
        return 0
    return round(pool.headroom * WHOLE_PPM) if entitlement.lends else WHOLE_PPM


def _higher(one: Resources, other: Resources) -> Resources:
    if other.within(one):
        return one
    return Resources(
        max(one.tokens_per_second, other.tokens_per_second),
        max(one.kv_bytes, other.kv_bytes),
        max(one.concurrency, other.concurrency),
    )


def _cap(demand: Resources, entitlement: Entitlement) -> Resources:
    """Demand above an entitlement's own hard ceilings can never be served."""
    limits = entitlement.ceilings
    if limits == _NO_LIMITS or demand == Resources.NONE:
        return demand
    return Resources(
        _at_most(demand.tokens_per_second, limits.tokens_per_second),
        _at_most(demand.kv_bytes, limits.kv_bytes),
        _at_most(demand.concurrency, limits.concurrency),
    )


def _at_most(demand: int, limit: int | None) -> int:
    return demand if limit is None else min(demand, limit)
