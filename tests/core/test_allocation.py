"""The properties of `allocate`, in the order of its docstring, and water filling against an oracle in fractions."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envoy_tokenpools.core.allocation import Allocation, Want, allocate, share_out
from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.core.ramp import Ramp
from envoy_tokenpools.core.resources import Resources

DEDICATED, GUARANTEED, ELASTIC, SPOT, PREEMPTIBLE = ServiceClass

PROPERTY = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)

Pick = Callable[[Resources], int]

RESOURCES: dict[str, Pick] = {
    "tokens": lambda amount: amount.tokens_per_second,
    "kv": lambda amount: amount.kv_bytes,
    "concurrency": lambda amount: amount.concurrency,
}


Parts = tuple[int, int, int]

Member = tuple[ServiceClass, Parts, Parts, int, bool]


def parts(largest: int) -> st.SearchStrategy[Parts]:
    """Tokens, KV bytes (of another magnitude) and sequences."""
    return st.tuples(
        st.integers(0, largest), st.integers(0, largest * 10**9), st.integers(0, largest // 8)
    )


MEMBERS = st.lists(
    st.tuples(
        st.sampled_from(ServiceClass),
        parts(60),
        parts(120),
        st.integers(1, 5_000_000),
        st.booleans(),
    ),
    min_size=1,
    max_size=30,
)


def want_of(position: int, member: Member) -> Want:
    """One entitlement of any class; its weight is exact in thousandths."""
    service_class, baseline, demand, weight, lend = member
    return Want(
        name=f"tenant-{position:02}",
        service_class=service_class,
        baseline=Resources(*baseline) if service_class.has_baseline else Resources.NONE,
        demand=Resources(*demand),
        weight=weight / 1_000,
        lends=service_class is not DEDICATED and (lend or service_class is not GUARANTEED),
    )


def pools() -> st.SearchStrategy[tuple[Resources, list[Want]]]:
    """A capacity and 1 to 30 entitlements; it is anything from nothing to more than they all could use."""

    def shape(case: tuple[list[Member], Parts, Parts]) -> tuple[Resources, list[Want]]:
        members = [want_of(i, one) for i, one in enumerate(case[0])]
        promised = [sum(pick(want.baseline) for want in members) for pick in RESOURCES.values()]
        wanted = [sum(pick(want.demand) for want in members) for pick in RESOURCES.values()]
        tokens, kv_bytes, sequences = (
            (base * of_base + demand * of_demand) // 16
            for base, demand, of_base, of_demand in zip(promised, wanted, *case[1:], strict=True)
        )
        return Resources(tokens, kv_bytes, sequences), members

    sixteenths = st.tuples(*[st.integers(0, 12)] * 3)
    return st.tuples(MEMBERS, sixteenths, sixteenths).map(shape)


def water_level(
    total: Fraction, wanted: Sequence[Fraction], weights: Sequence[Fraction]
) -> list[Fraction]:
    """Weighted max-min in exact fractions, by raising the level until nobody more is satisfied below it."""
    got = [Fraction(0)] * len(wanted)
    thirsty = {i for i, units in enumerate(wanted) if units > 0}
    while thirsty:
        level = total / sum(weights[i] for i in thirsty)
        satisfied = {i for i in thirsty if wanted[i] <= level * weights[i]}
        if not satisfied:
            for i in thirsty:
                got[i] = level * weights[i]
            break
        for i in satisfied:
            got[i] = wanted[i]
            total -= wanted[i]
        thirsty -= satisfied
    return got


def oracle(total: int, members: Sequence[Want], pick: Pick) -> list[Fraction]:
    """
    What the tiers of properties 2 to 4 give of one resource, where the reserved baselines fit.

    Left out: baselines of those who ask for nothing, which are made whole from what nobody wants.
    """
    zero, left = Fraction(0), Fraction(total)
    got = [zero] * len(members)

    def serve(ceiling: Callable[[Want], int], *classes: ServiceClass) -> None:
        nonlocal left
        unmet = [
            max(zero, ceiling(want) - got[i]) if want.service_class in classes else zero
            for i, want in enumerate(members)
        ]
        more = water_level(left, unmet, [Fraction(round(w.weight * 1_000)) for w in members])
        for i, units in enumerate(more):
            got[i] += units
        left -= sum(more)

    for i, want in enumerate(members):
        if want.service_class.is_reserved:
            base, demand = pick(want.baseline), pick(want.demand)
            got[i] = Fraction(min(base, demand) if want.lends else base)
            left -= got[i]
    assert left >= 0
    serve(lambda w: min(pick(w.baseline), pick(w.demand)), ELASTIC)
    serve(lambda w: pick(w.demand), DEDICATED, ELASTIC)
    serve(lambda w: pick(w.demand), SPOT)
    serve(lambda w: pick(w.demand), PREEMPTIBLE)
    return got


def reserved(members: Sequence[Want], pick: Pick) -> int:
    """The sum of the reserved baselines."""
    return sum(pick(want.baseline) for want in members if want.service_class.is_reserved)


def usable_demand(want: Want, pick: Pick) -> int:
    """What this entitlement could use: a guaranteed one may not burst."""
    demand = pick(want.demand)
    return demand if want.service_class.may_burst else min(demand, pick(want.baseline))


def of(allocation: Allocation, want: Want, pick: Pick) -> int:
    """What `want` got of a resource."""
    return pick(allocation.shares[want.name])


# ---------------------------------------------------------------- the properties, in order


@PROPERTY
@given(pools())
def test_1_feasible(case: tuple[Resources, list[Want]]) -> None:
    """Allocations sum to at most the capacity, nobody's is negative, and everybody has one."""
    capacity, members = case
    allocation = allocate(capacity, members)
    assert set(allocation.shares) == {want.name for want in members}
    for pick in RESOURCES.values():
        parts = [of(allocation, want, pick) for want in members]
        assert min(parts) >= 0
        assert sum(parts) <= pick(capacity)


@PROPERTY
@given(pools())
def test_2_reserved_baselines_stand_while_they_fit(case: tuple[Resources, list[Want]]) -> None:
    """Whole baselines where they fit; else scaled together, and the result says that it is degraded."""
    capacity, members = case
    allocation = allocate(capacity, members)
    held = [want for want in members if want.service_class.is_reserved]
    assert set(allocation.guarantees) == {want.name for want in held}
    degraded = False
    for pick in RESOURCES.values():
        promised, total = reserved(members, pick), pick(capacity)
        degraded |= promised > total
        for want in held:
            base, guarantee = pick(want.baseline), pick(allocation.guarantees[want.name])
            if promised <= total:
                assert guarantee == base
            else:
                assert abs(guarantee - Fraction(base * total, promised)) < 1
            owed = min(guarantee, pick(want.demand)) if want.lends else guarantee
            assert of(allocation, want, pick) >= owed
        if promised > total:
            assert sum(pick(allocation.guarantees[want.name]) for want in held) == total
    assert allocation.degraded is degraded


@PROPERTY
@given(pools())
def test_3_elastic_get_their_baseline_by_weighted_max_min(
    case: tuple[Resources, list[Want]],
) -> None:
    """Up to min(demand, baseline), within a unit of the oracle; where it is short, the higher weight has the more."""
    capacity, members = case
    allocation = allocate(capacity, members)
    elastic = [want for want in members if want.service_class is ELASTIC]
    for pick in RESOURCES.values():
        if reserved(members, pick) > pick(capacity):
            continue
        expected = oracle(pick(capacity), members, pick)
        wishes = {w.name: min(pick(w.baseline), pick(w.demand)) for w in elastic}
        fits = all(of(allocation, want, pick) >= wishes[want.name] for want in elastic)
        for want, fair in zip(members, expected, strict=True):
            if want.service_class is ELASTIC:
                got, wish = of(allocation, want, pick), Fraction(wishes[want.name])
                assert min(Fraction(got), wish) > min(fair, wish) - 1
                assert fits or abs(got - fair) < 1
        for heavy in elastic:
            for light in elastic:
                if not fits and heavy.weight > light.weight:
                    less = min(of(allocation, light, pick), wishes[heavy.name])
                    assert of(allocation, heavy, pick) >= less


@PROPERTY
@given(pools())
def test_4_what_is_left_goes_down_the_tiers(case: tuple[Resources, list[Want]]) -> None:
    """Bursts, then spot, then preemptible: within a unit of the oracle, and no tier eats before the one above it."""
    capacity, members = case
    allocation = allocate(capacity, members)
    for pick in RESOURCES.values():
        if reserved(members, pick) > pick(capacity):
            continue
        expected = oracle(pick(capacity), members, pick)
        hungry = False
        for tier in ((DEDICATED, ELASTIC), (SPOT,), (PREEMPTIBLE,)):
            for want, fair in zip(members, expected, strict=True):
                if want.service_class not in tier:
                    continue
                got = of(allocation, want, pick)
                if want.service_class is not ELASTIC or got < pick(want.demand):
                    assert abs(got - fair) < 1
                if hungry and not want.service_class.has_baseline:
                    assert got == 0
            hungry |= any(
                want.service_class in tier and of(allocation, want, pick) < pick(want.demand)
                for want in members
            )


@PROPERTY
@given(pools())
def test_5_work_conserving(case: tuple[Resources, list[Want]]) -> None:
    """While anybody's demand is unmet, everything is handed out; only those who do not lend hold more than they ask."""
    capacity, members = case
    allocation = allocate(capacity, members)
    for pick in RESOURCES.values():
        unmet = any(of(allocation, w, pick) < usable_demand(w, pick) for w in members)
        if not unmet:
            continue
        assert sum(of(allocation, want, pick) for want in members) == pick(capacity)
        for want in members:
            if want.lends:
                assert of(allocation, want, pick) <= usable_demand(want, pick)


@PROPERTY
@given(pools(), st.integers(0, 29), st.integers(1, 10_000_000), st.randoms(use_true_random=False))
def test_6_monotone_and_blind_to_order(
    case: tuple[Resources, list[Want]], position: int, raised_by: int, random: Random
) -> None:
    """A higher weight never lowers its own allocation; a shuffled input gives the same result."""
    capacity, members = case
    before = allocate(capacity, members)
    shuffled = list(members)
    random.shuffle(shuffled)
    assert allocate(capacity, shuffled) == before
    chosen = members[position % len(members)]
    heavier = Want(
        name=chosen.name,
        service_class=chosen.service_class,
        baseline=chosen.baseline,
        demand=chosen.demand,
        weight=chosen.weight + raised_by / 1_000,
        lends=chosen.lends,
    )
    after = allocate(capacity, [heavier if w is chosen else w for w in members])
    assert before.shares[chosen.name].within(after.shares[chosen.name])


@PROPERTY
@given(pools(), st.integers(1, 100), st.lists(st.integers(0, 120_000), min_size=2, max_size=6))
def test_7_restored_capacity_is_handed_out_slowly(
    case: tuple[Resources, list[Want]], percent: int, times: list[int]
) -> None:
    """Along the ramp what is allocated never exceeds what is usable, and ends where it would without a ramp."""
    capacity, members = case
    ramp = Ramp(Resources.NONE, capacity, since_ms=0, per_second=percent / 100)
    usable = [ramp.usable(now_ms) for now_ms in sorted(times)]
    for earlier, later in pairwise(usable):
        assert earlier.within(later)
    for amount in usable:
        total = sum(allocate(amount, members).shares.values(), start=Resources.NONE)
        assert total.within(amount)
    assert allocate(ramp.usable(100_000), members) == allocate(capacity, members)


@PROPERTY
@given(
    st.integers(0, 400),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5_000_000)), min_size=1, max_size=30),
)
def test_8_whole_units_add_up(total: int, members: list[tuple[int, int]]) -> None:
    """Exactly min(total, sum of wishes) is handed out; each part is less than a unit off, and none above its wish."""
    wanted, weights = [m[0] for m in members], [m[1] for m in members]
    granted = share_out(total, wanted, weights)
    assert sum(granted) == min(total, sum(wanted))
    fair = water_level(
        Fraction(total), [Fraction(units) for units in wanted], [Fraction(w) for w in weights]
    )
    for got, wish, exact in zip(granted, wanted, fair, strict=True):
        assert 0 <= got <= wish
        assert abs(got - exact) < 1
    # Largest remainder: whoever was rounded up had at least the remainder of whoever was not.
    up = [exact % 1 for got, exact in zip(granted, fair, strict=True) if got > exact]
    down = [exact % 1 for got, exact in zip(granted, fair, strict=True) if got < exact]
    assert not up or not down or min(up) >= max(down)


# ---------------------------------------------------------------- cases


def want(
    name: str,
    service_class: ServiceClass,
    sequences: int,
    demand: int,
    weight: float = 1.0,
    *,
    lends: bool = True,
) -> Want:
    """An entitlement that matters by its sequences only."""
    baseline = Resources(concurrency=sequences)
    return Want(name, service_class, baseline, Resources(concurrency=demand), weight, lends)


def sequences(capacity: int, *members: Want) -> dict[str, int]:
    """The sequences that each gets."""
    shares = allocate(Resources(concurrency=capacity), members).shares
    return {name: share.concurrency for name, share in shares.items()}


def test_nobody_is_rounded_up_at_the_cost_of_the_last() -> None:
    """Three equal shares of 16 are 6, 5 and 5: rounding each up alone would hand out 18."""
    got = sequences(16, *(want(name, ELASTIC, 10, 10) for name in "abc"))
    assert sorted(got.values()) == [5, 5, 6]


def test_ties_of_remainders_go_to_the_higher_weight() -> None:
    """Weights 3 to 1 of 2 sequences leave remainders of a half each: the heavier one is rounded up."""
    assert share_out(2, [9, 9], [1, 3]) == [0, 2]


def test_the_paper_s_outage_shrinks_elastic_by_weight() -> None:
    """Eight of sixteen sequences are lost: copilot (93.8) and synth (20.3) keep 5 and 3 of 5."""
    members = (want("copilot", ELASTIC, 5, 8, 93.8), want("synth", ELASTIC, 5, 8, 20.3))
    assert sequences(16, *members) == {"copilot": 8, "synth": 8}
    assert sequences(8, *members) == {"copilot": 5, "synth": 3}
    assert sequences(4, *members) == {"copilot": 3, "synth": 1}


def test_an_idle_guarantee_is_lent_and_an_idle_dedicated_baseline_is_not() -> None:
    """Spot may have what guaranteed leaves, not what dedicated leaves."""
    spot = want("spot", SPOT, 0, 16)
    assert sequences(16, want("g", GUARANTEED, 6, 0), spot)["spot"] == 16
    assert sequences(16, want("g", GUARANTEED, 6, 2), spot)["spot"] == 14
    assert sequences(16, want("g", GUARANTEED, 6, 0, lends=False), spot)["spot"] == 10
    assert sequences(16, want("d", DEDICATED, 6, 0, lends=False), spot)["spot"] == 10


def test_no_weight_lets_elastic_displace_a_guaranteed_baseline() -> None:
    """Class order is a rule: even the paper's 417 against 47.6 takes nothing."""
    heavy = want("elastic", ELASTIC, 16, 16, 417.0)
    assert sequences(10, want("g", GUARANTEED, 8, 8, 47.6), heavy) == {"elastic": 2, "g": 8}


def test_what_a_degraded_guarantee_does_not_use_serves_the_other_guarantees_first() -> None:
    """Of 8 sequences each of two baselines of 8 keeps 4; what one leaves idle goes to the other, not to spot."""
    idle, busy = want("idle", GUARANTEED, 8, 1), want("busy", GUARANTEED, 8, 8)
    assert sequences(8, idle, busy, want("spot", SPOT, 0, 8)) == {"idle": 1, "busy": 7, "spot": 0}


def test_idle_baselines_are_whole_while_capacity_is_free() -> None:
    """Whoever wakes on a pool that is not short finds its whole baseline in its share."""
    idle = (want("elastic", ELASTIC, 5, 0), want("guaranteed", GUARANTEED, 5, 0))
    assert sequences(16, *idle, want("spot", SPOT, 0, 6)) == {
        "elastic": 5,
        "guaranteed": 5,
        "spot": 6,
    }


@pytest.mark.parametrize("capacity", [Resources.NONE, Resources(10, 10, 10)])
def test_a_pool_without_members_is_allocated_to_nobody(capacity: Resources) -> None:
    """No entitlements, no shares."""
    assert allocate(capacity, []) == Allocation({}, {}, degraded=False)


def test_a_thousand_entitlements_are_exact() -> None:
    """Twelve thousand sequences over a thousand elastic tenants of rising weight: all handed out, by weight."""
    members = [want(f"tenant-{i:04}", ELASTIC, 24, 24, 20.0 + i / 10) for i in range(1_000)]
    got = sequences(12_000, *members)
    granted = [got[member.name] for member in members]
    assert sum(granted) == 12_000
    assert granted == sorted(granted)
    fair = water_level(
        Fraction(12_000), [Fraction(24)] * 1_000, [Fraction(200 + i) for i in range(1_000)]
    )
    assert all(abs(units - exact) < 1 for units, exact in zip(granted, fair, strict=True))
