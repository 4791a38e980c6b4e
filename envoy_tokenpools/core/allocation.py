"""
Who may use how much of a pool: a pure function, specified by its properties.

`allocate` holds, for every input (each is one property test, in this order):

1. Feasible: allocations sum to at most the capacity; each is at least 0.
2. dedicated entitlements, and guaranteed ones that do not lend, get at least their baseline whenever the
   reserved baselines fit; lending ones at least what they demand of it. Where the baselines do not fit, they are scaled
   together in proportion, and the result is `degraded`.
3. elastic get up to min(demand, baseline) by weighted max-min; when it does not all fit, a higher weight never
   gets less.
4. What is left goes to bursts (dedicated and elastic), then spot, then preemptible, by weighted max-min inside each
   tier.
5. Work conserving: no unmet demand while capacity is free, except what is withheld for those that do not lend.
6. Monotone: raising one weight never lowers that entitlement's allocation; the order of the input does not matter.
7. (The ramp after a loss is in `ramp.py`.)
8. Whole units by largest remainder, ties by weight: the parts add up, nobody is rounded up at another's cost.

All arithmetic is exact on integers; weights are scaled to integers once.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.core.resources import Resources

WEIGHT_SCALE = 1_000_000_000
"""Weights become integers of a billionth: the smallest that the formula yields is about 1e-5."""


@dataclass(frozen=True, slots=True)
class Want:
    """What one entitlement brings to the table: its rank, its promise and its demand."""

    name: str
    service_class: ServiceClass
    baseline: Resources
    demand: Resources
    weight: float
    lends: bool = True


@dataclass(frozen=True, slots=True)
class Allocation:
    """
    The outcome for one pool.

    Attributes:
        shares: what each entitlement may use.
        guarantees: the part of each reserved baseline that stands; smaller than the baseline only if degraded.
        degraded: whether reserved baselines had to be scaled down.
    """

    shares: Mapping[str, Resources]
    guarantees: Mapping[str, Resources]
    degraded: bool


def allocate(capacity: Resources, wants: Sequence[Want]) -> Allocation:
    """
    Divide `capacity` among `wants`; see the module's properties.

    Args:
        capacity: what is usable now.
        wants: one per entitlement, names unique.
    """
    ordered = sorted(wants, key=lambda want: want.name)
    weights = [max(1, round(want.weight * WEIGHT_SCALE)) for want in ordered]
    tiers = _tiers(ordered)
    columns = [
        _allocate_one(
            total,
            ordered,
            weights,
            [getattr(want.baseline, resource) for want in ordered],
            [getattr(want.demand, resource) for want in ordered],
            tiers,
        )
        for resource, total in (
            ("tokens_per_second", capacity.tokens_per_second),
            ("kv_bytes", capacity.kv_bytes),
            ("concurrency", capacity.concurrency),
        )
    ]
    return Allocation(
        shares=_rows(ordered, [column.granted for column in columns], range(len(ordered))),
        guarantees=_rows(ordered, [column.guaranteed for column in columns], tiers.reserved),
        degraded=any(column.degraded for column in columns),
    )


def share_out(total: int, wanted: Sequence[int], weights: Sequence[int]) -> list[int]:
    """
    Weighted max-min of `total` units over `wanted`, in whole units by largest remainder.

    Whoever wants less than its weighted share gets what it wants; the others divide the rest by weight. Hands out
    exactly `min(total, sum(wanted))`. Ties of remainders go to the higher weight, then to the earlier position.
    """
    granted = [0] * len(wanted)
    if total == 0:
        return granted
    if sum(wanted) <= total:
        return list(wanted)
    # Ascending by wanted / weight: fine enough to tell any two such ratios apart while weights are below 2**63.
    order = deque(
        sorted(
            (i for i, units in enumerate(wanted) if units > 0),
            key=lambda i: ((wanted[i] << 128) // weights[i], -weights[i], i),
        )
    )
    rest, weight_sum = total, sum(weights[i] for i in order)
    # Ends before `order` does, as more is wanted than there is.
    while wanted[order[0]] * weight_sum <= rest * weights[order[0]]:
        i = order.popleft()
        granted[i] = wanted[i]
        rest -= wanted[i]
        weight_sum -= weights[i]
    _divide(rest, weight_sum, order, weights, granted)
    return granted


def _divide(
    rest: int,
    weight_sum: int,
    hungry: Iterable[int],
    weights: Sequence[int],
    granted: list[int],
) -> None:
    """Split `rest` by weight among those who all want more than their part."""
    remainders: list[tuple[int, int, int]] = []
    left = rest
    for i in hungry:
        quota, remainder = divmod(rest * weights[i], weight_sum)
        granted[i] = quota
        left -= granted[i]
        remainders.append((-remainder, -weights[i], i))
    for _, _, i in sorted(remainders)[:left]:
        granted[i] += 1


@dataclass(slots=True)
class _Column:
    """One resource: what everybody got of it."""

    granted: list[int]
    guaranteed: list[int]
    degraded: bool


@dataclass(frozen=True, slots=True)
class _Tiers:
    """Positions of the wants that are served together, in the order of the names."""

    reserved: Sequence[int]
    guaranteed: Sequence[int]
    elastic: Sequence[int]
    bursting: Sequence[int]
    spot: Sequence[int]
    preemptible: Sequence[int]


def _tiers(wants: Sequence[Want]) -> _Tiers:
    of: dict[ServiceClass, list[int]] = {service_class: [] for service_class in ServiceClass}
    for i, want in enumerate(wants):
        of[want.service_class].append(i)
    dedicated, guaranteed = of[ServiceClass.DEDICATED], of[ServiceClass.GUARANTEED]
    elastic = of[ServiceClass.ELASTIC]
    return _Tiers(
        reserved=sorted(dedicated + guaranteed),
        guaranteed=guaranteed,
        elastic=elastic,
        bursting=sorted(dedicated + elastic),
        spot=of[ServiceClass.SPOT],
        preemptible=of[ServiceClass.PREEMPTIBLE],
    )


def _allocate_one(
    total: int,
    wants: Sequence[Want],
    weights: Sequence[int],
    baselines: Sequence[int],
    demands: Sequence[int],
    tiers: _Tiers,
) -> _Column:
    granted, guaranteed = [0] * len(wants), [0] * len(wants)
    promised = [baselines[i] for i in tiers.reserved]
    # In proportion to the baselines: they are both the wish and the weight.
    standing = share_out(total, promised, [max(1, base) for base in promised])
    for i, stands in zip(tiers.reserved, standing, strict=True):
        guaranteed[i] = stands
        granted[i] = min(stands, demands[i]) if wants[i].lends else stands
    left = total - sum(granted)

    def pour(tier: Sequence[int], wish: Sequence[int]) -> None:
        nonlocal left
        hungry = [i for i in tier if wish[i] > granted[i]]
        if not hungry or not left:
            return
        unmet = [wish[i] - granted[i] for i in hungry]
        for i, more in zip(
            hungry, share_out(left, unmet, [weights[i] for i in hungry]), strict=True
        ):
            granted[i] += more
            left -= more

    within = list(map(min, baselines, demands))
    pour(tiers.reserved, within)  # when degraded
    pour(tiers.elastic, within)
    pour(tiers.bursting, demands)
    pour(tiers.spot, demands)
    pour(tiers.preemptible, demands)
    # Nobody's demand is unmet now: idle baselines are whole again, so that whoever wakes is inside its share.
    pour(tiers.guaranteed, baselines)
    pour(tiers.elastic, baselines)
    return _Column(granted, guaranteed, degraded=sum(promised) > total)


def _rows(
    wants: Sequence[Want], columns: Sequence[Sequence[int]], whose: Iterable[int]
) -> dict[str, Resources]:
    tokens, kv_bytes, sequences = columns
    return {wants[i].name: Resources(tokens[i], kv_bytes[i], sequences[i]) for i in whose}
