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
    columns = [
        _allocate_one(
            total,
            ordered,
            weights,
            [pick(want.baseline) for want in ordered],
            [pick(want.demand) for want in ordered],
        )
        for pick, total in (
            (_tokens, capacity.tokens_per_second),
            (_kv, capacity.kv_bytes),
            (_sequences, capacity.concurrency),
        )
    ]
    shares = _rows(ordered, [column.granted for column in columns])
    guarantees = _rows(ordered, [column.guaranteed for column in columns])
    return Allocation(
        shares=shares,
        guarantees={w.name: guarantees[w.name] for w in ordered if w.service_class.is_reserved},
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


def _allocate_one(
    total: int,
    wants: Sequence[Want],
    weights: Sequence[int],
    baselines: Sequence[int],
    demands: Sequence[int],
) -> _Column:
    reserved = [want.service_class.is_reserved for want in wants]
    promised = [base if held else 0 for base, held in zip(baselines, reserved, strict=True)]
    degraded = sum(promised) > total
    # In proportion to the baselines: they are both the wish and the weight.
    guaranteed = share_out(total, promised, [max(1, base) for base in promised])
    granted = [
        min(standing, demand) if want.lends else standing
        for want, standing, demand in zip(wants, guaranteed, demands, strict=True)
    ]
    left = total - sum(granted)

    def pour(ceilings: list[int]) -> None:
        nonlocal left
        unmet = [max(0, top - got) for top, got in zip(ceilings, granted, strict=True)]
        for i, more in enumerate(share_out(left, unmet, weights)):
            granted[i] += more
            left -= more

    def ceilings(wish: Sequence[int], *classes: ServiceClass) -> list[int]:
        return [
            units if want.service_class in classes else 0
            for want, units in zip(wants, wish, strict=True)
        ]

    within = [min(base, demand) for base, demand in zip(baselines, demands, strict=True)]
    pour(ceilings(within, ServiceClass.DEDICATED, ServiceClass.GUARANTEED))  # when degraded
    pour(ceilings(within, ServiceClass.ELASTIC))
    pour(ceilings(demands, ServiceClass.DEDICATED, ServiceClass.ELASTIC))
    pour(ceilings(demands, ServiceClass.SPOT))
    pour(ceilings(demands, ServiceClass.PREEMPTIBLE))
    # Nobody's demand is unmet now: idle baselines are whole again, so that whoever wakes is inside its share.
    pour(ceilings(baselines, ServiceClass.GUARANTEED))
    pour(ceilings(baselines, ServiceClass.ELASTIC))
    return _Column(granted, guaranteed, degraded)


def _rows(wants: Sequence[Want], columns: Sequence[Sequence[int]]) -> dict[str, Resources]:
    tokens, kv_bytes, sequences = columns
    return {
        want.name: Resources(tokens[i], kv_bytes[i], sequences[i]) for i, want in enumerate(wants)
    }


def _tokens(amount: Resources) -> int:
    return amount.tokens_per_second


def _kv(amount: Resources) -> int:
    return amount.kv_bytes


def _sequences(amount: Resources) -> int:
    return amount.concurrency
