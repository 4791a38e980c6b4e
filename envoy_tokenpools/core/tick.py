"""
The policy that runs once per tick: from what was demanded and delivered to debts, weights, allocations and terms.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from envoy_tokenpools.core.account import Meters
from envoy_tokenpools.core.admission import WHOLE_PPM, Terms, part
from envoy_tokenpools.core.allocation import Allocation, Want, allocate
from envoy_tokenpools.core.pool import (
    Entitlement,
    EntitlementState,
    Fairness,
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


_QUIET = Meters()


def first_tick(pool: Pool, usable: Resources, memory: Mapping[str, Standing] | None = None) -> Tick:
    """The terms before anything was asked for; `memory` brings debts and bursts back after a restart or reload."""
    return _tick(pool, 0, usable, memory or {}, {}, elapsed_ms=0)


def next_tick(
    pool: Pool, previous: Tick, usable: Resources, readings: Mapping[str, Meters], elapsed_ms: int
) -> Tick:
    """
    The terms after a tick of `elapsed_ms` in which `readings` were taken.

    Demand is the higher of the last two ticks', so that a tenant between two requests does not lose its share.
    """
    return _tick(pool, previous.number + 1, usable, previous.standings, readings, elapsed_ms)


def _tick(
    pool: Pool,
    number: int,
    usable: Resources,
    before: Mapping[str, Standing],
    readings: Mapping[str, Meters],
    elapsed_ms: int,
) -> Tick:
    served = [e for e in pool.entitlements.values() if is_served(e)]
    mean_slo = mean_slo_ms(served)
    standings: dict[str, Standing] = {}
    wants: list[Want] = []
    for entitlement in served:
        last = before.get(entitlement.name, Standing())
        now = last
        if elapsed_ms > 0:
            meters = readings.get(entitlement.name, _QUIET)
            now = _advance(entitlement, pool, last, meters, elapsed_ms)
        standing_weight = weight(
            entitlement.service_class,
            slo_target_ms=entitlement.slo_target_ms,
            mean_slo_ms=mean_slo,
            burst=now.burst,
            debt=now.debt,
            gains=pool.gains,
        )
        now = replace(now, weight=standing_weight)
        standings[entitlement.name] = now
        wants.append(_want(entitlement, now, _higher(now.demand, last.demand)))
    allocation = allocate(usable, wants)
    terms = [_terms(pool, e, standings[e.name], allocation) for e in served]
    return Tick(number, usable, standings, _with_reach(terms, pool.capacity), allocation.degraded)


def is_served(entitlement: Entitlement) -> bool:
    """Whether requests of this entitlement are served at all."""
    return entitlement.state in (EntitlementState.BOUND, EntitlementState.DEGRADED)


def _advance(
    entitlement: Entitlement, pool: Pool, last: Standing, meters: Meters, elapsed_ms: int
) -> Standing:
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
    return Standing(debt=debt, burst=burst, demand=demand)


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


def _with_reach(terms: Sequence[Terms], capacity: Resources) -> dict[str, Terms]:
    """
    By name, with what each could have if nobody else were there.

    Of the whole capacity, also while some of it is lost: what fits then is refused for now, not for ever.
    """
    # Rounded up as the ledger does it: sequences once for all, KV bytes one by one.
    kv_bytes = [part(each.guarantee.kv_bytes, each.withheld_ppm) for each in terms]
    sequences_ppm = [each.guarantee.concurrency * each.withheld_ppm for each in terms]
    all_kv_bytes, all_sequences_ppm = sum(kv_bytes), sum(sequences_ppm)
    return {
        each.entitlement: replace(
            each,
            reach=Resources(
                capacity.tokens_per_second,
                max(0, capacity.kv_bytes - (all_kv_bytes - own_kv_bytes)),
                max(0, capacity.concurrency + (own_ppm - all_sequences_ppm) // WHOLE_PPM),
            ),
        )
        for each, own_kv_bytes, own_ppm in zip(terms, kv_bytes, sequences_ppm, strict=True)
    }


def _class_now(entitlement: Entitlement) -> ServiceClass:
    """The class that an entitlement is served as: degraded, it lives from the surplus."""
    is_degraded = entitlement.state is EntitlementState.DEGRADED
    return ServiceClass.SPOT if is_degraded else entitlement.service_class


def _terms(
    pool: Pool, entitlement: Entitlement, standing: Standing, allocation: Allocation
) -> Terms:
    guarantee = allocation.guarantees.get(entitlement.name, Resources.NONE)
    withheld_ppm = 0
    if guarantee != Resources.NONE:
        withheld_ppm = round(pool.headroom * WHOLE_PPM) if entitlement.lends else WHOLE_PPM
    return Terms(
        entitlement=entitlement.name,
        weight=standing.weight,
        guarantee=guarantee,
        share=_higher(allocation.shares[entitlement.name], guarantee),
        limits=entitlement.ceilings,
        withheld_ppm=withheld_ppm,
        rank=_class_now(entitlement).rank,
        evictable=entitlement.reclaim is Reclaim.EVICT,
    )


def _higher(one: Resources, other: Resources) -> Resources:
    return Resources(
        max(one.tokens_per_second, other.tokens_per_second),
        max(one.kv_bytes, other.kv_bytes),
        max(one.concurrency, other.concurrency),
    )


def _cap(demand: Resources, entitlement: Entitlement) -> Resources:
    """Demand above an entitlement's own hard ceilings can never be served."""
    limits = entitlement.ceilings
    return Resources(
        _at_most(demand.tokens_per_second, limits.tokens_per_second),
        _at_most(demand.kv_bytes, limits.kv_bytes),
        _at_most(demand.concurrency, limits.concurrency),
    )


def _at_most(demand: int, limit: int | None) -> int:
    return demand if limit is None else min(demand, limit)
