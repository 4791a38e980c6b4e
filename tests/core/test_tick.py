"""The tick: from what was demanded and delivered to debts, weights and terms."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.core.account import Meters
from envoy_tokenpools.core.admission import Lease, Refusal
from envoy_tokenpools.core.pool import (
    Entitlement,
    EntitlementState,
    Fairness,
    Limits,
    Pool,
    ServiceClass,
)
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Standing, Tick, first_tick, is_served, next_tick
from tests.support.pools import Desk, cost, entitlement, pool

DEDICATED, GUARANTEED, ELASTIC, SPOT, PREEMPTIBLE = ServiceClass
PENDING, BOUND, DEGRADED, EXPIRED = EntitlementState

CAPACITY = Resources(tokens_per_second=240, kv_bytes=16_000, concurrency=16)

BASELINE = Resources(tokens_per_second=100, kv_bytes=5_000, concurrency=5)

STARVED = Meters(demanded_tokens=500, pending_tokens=500, pending_concurrency=5)
"""Five seconds in which all of the baseline was asked for and nothing came."""

SERVED = Meters(demanded_tokens=500, delivered_tokens=500, peak_concurrency=5)
"""Five seconds in which it came."""


def elastic(name: str = "e", slo_target_ms: int | None = None) -> Entitlement:
    """An elastic entitlement to 100 tokens per second and five sequences."""
    return entitlement(name, ELASTIC, BASELINE, slo_target_ms=slo_target_ms)


def ticks(
    one: Pool, readings: list[dict[str, Meters]], tick_ms: int = 5_000, usable: Resources = CAPACITY
) -> list[Tick]:
    """A tick for each reading, after the first."""
    tick = first_tick(one, usable)
    taken = [tick]
    for reading in readings:
        tick = next_tick(one, tick, usable, reading, tick_ms)
        taken.append(tick)
    return taken


# ---------------------------------------------------------------- weights


def test_the_weights_of_experiment_2() -> None:
    """93.8 and 20.3 with a mean of 15,250; the reports tenant's 60.4 stands where it does not move the mean."""
    tick = first_tick(pool(CAPACITY, elastic("copilot", 500), elastic("synth", 30_000)), CAPACITY)
    weights = {name: round(one.weight, 1) for name, one in tick.standings.items()}
    assert weights == {"copilot": 93.8, "synth": 20.3}
    reports = replace(elastic("reports", 5_000), state=DEGRADED)
    members = (elastic("copilot", 500), elastic("synth", 30_000), reports)
    tick = first_tick(pool(CAPACITY, *members), CAPACITY)
    assert round(tick.standings["reports"].weight, 1) == 60.4


def test_debt_raises_and_credit_lowers_the_weight() -> None:
    """A starved tenant overtakes one that is served, an over-served one falls to a fifth."""
    burst = Meters(demanded_tokens=1_000, delivered_tokens=1_000)
    reading = {"starved": STARVED, "served": SERVED, "burst": burst}
    members = [elastic(name) for name in reading]
    standings = ticks(pool(CAPACITY, *members), [reading] * 10)[-1].standings
    served = standings["served"].weight
    assert standings["starved"].weight == pytest.approx(served * (1 + 4 * 0.97), rel=0.01)
    assert standings["burst"].weight < served / 5


# ---------------------------------------------------------------- debt


@pytest.mark.parametrize("service_class", [DEDICATED, GUARANTEED, SPOT, PREEMPTIBLE])
def test_only_elastic_has_debt(service_class: ServiceClass) -> None:
    """The same starvation leaves the others without."""
    baseline = BASELINE if service_class.has_baseline else Resources.NONE
    other = entitlement("other", service_class, baseline)
    reading = {"other": STARVED, "e": STARVED}
    standings = ticks(pool(CAPACITY, other, elastic()), [reading] * 5)[-1].standings
    assert standings["other"].debt == 0
    assert standings["e"].debt > 0.8


def test_an_idle_tenant_gains_nothing() -> None:
    """An hour of sleep: no debt, no burst, the weight of the first tick."""
    taken = ticks(pool(CAPACITY, elastic()), [{}] * 720)
    assert taken[-1].standings["e"] == taken[0].standings["e"]
    assert taken[-1].number == 720


def test_a_tenant_that_asks_for_little_owes_and_is_owed_little() -> None:
    """Forty of a hundred asked and served: no gap. Forty asked, ten served: a gap of 0.3."""
    whole = Meters(demanded_tokens=200, delivered_tokens=200)
    short = Meters(demanded_tokens=200, delivered_tokens=50, pending_tokens=150)
    one = pool(CAPACITY, elastic("whole"), elastic("short"))
    standings = ticks(one, [{"whole": whole, "short": short}] * 60)[-1].standings
    assert standings["whole"].debt == 0
    assert standings["short"].debt == pytest.approx(0.3)


def test_what_waits_is_demanded_as_long_as_it_waits() -> None:
    """A request that was first sent long ago and still waits: a gap by the backlog, none by counting it once."""
    waits = Meters(demanded_tokens=50, delivered_tokens=50, pending_tokens=150)
    for fairness, debt in ((Fairness.BACKLOG, 0.3), (Fairness.EWMA, 0.0)):
        one = replace(pool(CAPACITY, elastic()), fairness=fairness)
        assert ticks(one, [{"e": waits}] * 60)[-1].standings["e"].debt == pytest.approx(debt)


def test_debt_decays_when_service_is_whole_again() -> None:
    """From near 1 to under a twentieth within 50 s, as in the paper's experiment 2."""
    taken = ticks(pool(CAPACITY, elastic()), [{"e": STARVED}] * 12 + [{"e": SERVED}] * 10)
    debts = [tick.standings["e"].debt for tick in taken]
    assert debts[12] > 0.95
    assert debts[12:] == sorted(debts[12:], reverse=True)
    assert 0 <= debts[22] < 0.05


@given(
    st.lists(
        st.tuples(
            st.builds(
                Meters,
                demanded_tokens=st.integers(-1_000, 10_000),
                delivered_tokens=st.integers(-1_000, 10_000),
                pending_tokens=st.integers(0, 10_000),
                peak_concurrency=st.integers(0, 50),
                sequence_ms=st.integers(0, 500_000),
                kv_byte_ms=st.integers(0, 10**9),
            ),
            st.integers(1, 60_000),
        ),
        max_size=20,
    )
)
def test_debt_stays_within_its_bounds(history: list[tuple[Meters, int]]) -> None:
    """Within [-1, 1], burst at least 0, and the terms within the capacity, whatever was metered."""
    one = pool(CAPACITY, elastic(), entitlement("spot", SPOT))
    tick = first_tick(one, CAPACITY)
    for meters, elapsed_ms in history:
        tick = next_tick(one, tick, CAPACITY, {"e": meters, "spot": meters}, elapsed_ms)
        standing = tick.standings["e"]
        assert -1 <= standing.debt <= 1
        assert standing.burst >= 0
        shares = sum((terms.share for terms in tick.terms.values()), start=Resources.NONE)
        assert shares.within(CAPACITY)


@pytest.mark.parametrize("tick_ms", [1_000, 2_500, 10_000])
def test_the_length_of_the_tick_does_not_bend_the_curve(tick_ms: int) -> None:
    """Starved for 30 s, then over-served for 30 s: debt and burst after each 10 s are those of 5 s ticks."""

    def curve(tick_ms: int) -> list[tuple[float, float]]:
        one = pool(CAPACITY, elastic())
        tick, points = first_tick(one, CAPACITY), []
        for now_ms in range(tick_ms, 60_001, tick_ms):
            if now_ms <= 30_000:
                meters = Meters(demanded_tokens=tick_ms // 10)
            else:
                meters = Meters(
                    demanded_tokens=tick_ms // 5,
                    delivered_tokens=tick_ms // 5,
                    sequence_ms=8 * tick_ms,
                    kv_byte_ms=5_500 * tick_ms,
                )
            tick = next_tick(one, tick, CAPACITY, {"e": meters}, tick_ms)
            if now_ms % 10_000 == 0:
                points.append((tick.standings["e"].debt, tick.standings["e"].burst))
        return points

    expected = curve(5_000)
    assert len(expected) == 6
    for point, reference in zip(curve(tick_ms), expected, strict=True):
        assert point == pytest.approx(reference, abs=1e-9)


def test_no_time_no_tick() -> None:
    """A tick of zero milliseconds moves nothing."""
    one = pool(CAPACITY, elastic())
    tick = first_tick(one, CAPACITY, {"e": Standing(debt=0.5, burst=0.25)})
    after = next_tick(one, tick, CAPACITY, {"e": STARVED}, 0)
    assert after.standings == tick.standings
    assert after.standings["e"].debt == 0.5


def test_debts_survive_a_restart() -> None:
    """The memory of the last tick is where the next first one starts; strangers in it are ignored."""
    memory = {"e": Standing(debt=0.5, burst=1.0), "gone": Standing(debt=1.0)}
    tick = first_tick(pool(CAPACITY, elastic()), CAPACITY, memory)
    assert tick.number == 0
    assert (tick.standings["e"].debt, tick.standings["e"].burst) == (0.5, 1.0)
    assert tick.standings["e"].weight == pytest.approx(100 / 3 / 2 * 3)
    assert "gone" not in tick.standings


# ---------------------------------------------------------------- demand


@pytest.mark.parametrize("declared", [True, False])
def test_retries_do_not_inflate_demand(*, declared: bool) -> None:
    """A refused client that tries again every 100 ms has the debt and demand of one that tried once."""

    def standing(tries: int) -> Standing:
        desk = Desk.of(pool(Resources(240, 16_000, 1), elastic(), entitlement("spot", SPOT)))
        desk.admit("spot", cost(1))
        for number in range(tries):
            outcome = desk.claim("e", cost(300), fingerprint=7, is_retry=declared and number > 0)
            assert isinstance(outcome, Refusal)
            desk.now_ms += 100
        return desk.pass_tick(5_000 - desk.now_ms).standings["e"]

    once, often = standing(1), standing(40)
    assert often == once
    assert once.debt == pytest.approx(0.3 * 0.6)
    assert once.demand == Resources(60, 0, 1)


def test_what_waited_outside_is_demand_of_all_three_resources() -> None:
    """What was in use at the peak and what was shed, up to the entitlement's own ceilings."""
    limited = replace(elastic(), limits=Limits(concurrency=7))
    one = pool(CAPACITY, limited)
    meters = Meters(
        delivered_tokens=400,
        demanded_tokens=900,
        pending_tokens=500,
        pending_kv_bytes=3_000,
        pending_concurrency=6,
        peak_concurrency=4,
        peak_kv_bytes=2_000,
    )
    tick = ticks(one, [{"e": meters}])[-1]
    assert tick.standings["e"].demand == Resources(180, 5_000, 10)
    assert tick.terms["e"].share.concurrency == 7


def test_demand_is_remembered_for_a_tick() -> None:
    """A tenant between two requests keeps its share for one tick of silence, not for two."""
    spot_floods = Meters(pending_concurrency=50, pending_tokens=5_000, pending_kv_bytes=50_000)
    members = (elastic(), entitlement("spot", SPOT))
    taken = ticks(
        pool(CAPACITY, *members),
        [{"e": SERVED, "spot": spot_floods}, *[{"spot": spot_floods}] * 2],
    )
    assert [tick.terms["e"].share.concurrency for tick in taken] == [5, 5, 5, 0]
    assert [tick.terms["spot"].share.concurrency for tick in taken] == [0, 11, 11, 16]


# ---------------------------------------------------------------- terms


def test_the_terms_of_reserved_classes() -> None:
    """The whole baseline as guarantee; all of an idle one withheld unless it lends; ceilings only on guaranteed."""
    members = (
        entitlement("d", DEDICATED, BASELINE),
        entitlement("g", GUARANTEED, BASELINE),
        entitlement("keeps", GUARANTEED, BASELINE, lend=False),
        entitlement("e", ELASTIC, Resources.NONE),
    )
    one = replace(pool(Resources(400, 20_000, 16), *members), headroom=0.25)
    terms = first_tick(one, one.capacity).terms
    assert {name: each.guarantee for name, each in terms.items()} == {
        "d": BASELINE,
        "g": BASELINE,
        "keeps": BASELINE,
        "e": Resources.NONE,
    }
    assert {name: each.withheld_ppm for name, each in terms.items()} == {
        "d": 1_000_000,
        "g": 250_000,
        "keeps": 1_000_000,
        "e": 0,
    }
    assert terms["g"].limits == Limits(100, 5_000, 5)
    assert terms["d"].limits == Limits()
    assert all(BASELINE.within(terms[name].share) for name in ("d", "g", "keeps"))


def test_a_guarantee_that_is_lent_away_stays_in_the_share() -> None:
    """Spot may use what idles, and the baseline is still whole for the one that wakes."""
    flood = Meters(pending_tokens=5_000, pending_concurrency=50, pending_kv_bytes=50_000)
    members = (entitlement("g", GUARANTEED, BASELINE), entitlement("spot", SPOT))
    terms = ticks(pool(CAPACITY, *members), [{"spot": flood}] * 3)[-1].terms
    assert terms["spot"].share == CAPACITY
    assert terms["g"].share == BASELINE


def test_a_pool_that_lost_capacity_is_degraded() -> None:
    """While the reserved baselines do not fit: they shrink in proportion, and recover with the capacity."""
    members = [entitlement(name, GUARANTEED, BASELINE) for name in ("g", "h")]
    one = pool(CAPACITY, *members, elastic())
    tick = first_tick(one, CAPACITY)
    assert not tick.degraded
    tick = next_tick(one, tick, Resources(240, 16_000, 8), {"e": STARVED}, 5_000)
    assert tick.degraded
    assert tick.usable.concurrency == 8
    assert [tick.terms[name].guarantee.concurrency for name in ("g", "h")] == [4, 4]
    assert tick.terms["g"].guarantee.tokens_per_second == 100
    tick = next_tick(one, tick, CAPACITY, {}, 5_000)
    assert not tick.degraded
    assert tick.terms["g"].guarantee == BASELINE


@pytest.mark.parametrize(
    ("state", "served"), [(PENDING, False), (BOUND, True), (DEGRADED, True), (EXPIRED, False)]
)
def test_only_bound_and_degraded_entitlements_are_served(
    state: EntitlementState, *, served: bool
) -> None:
    """The others have no terms, and nothing is held for them."""
    one = replace(entitlement("d", DEDICATED, BASELINE), state=state)
    tick = first_tick(pool(CAPACITY, one, elastic()), CAPACITY)
    assert is_served(one) is served
    assert ("d" in tick.terms) is served
    assert ("d" in tick.standings) is served
    assert tick.terms["e"].share == BASELINE


@pytest.mark.parametrize("service_class", [DEDICATED, GUARANTEED, ELASTIC])
def test_a_degraded_entitlement_lives_from_the_surplus(service_class: ServiceClass) -> None:
    """Its baseline is lost: no guarantee, nothing withheld, nothing left for it where others ask for all."""
    lost = replace(entitlement("lost", service_class, BASELINE), state=DEGRADED)
    one = pool(CAPACITY, lost, entitlement("e", ELASTIC, CAPACITY))
    hungry = Meters(
        demanded_tokens=10_000,
        pending_tokens=10_000,
        pending_kv_bytes=100_000,
        pending_concurrency=100,
    )
    terms = ticks(one, [{"lost": hungry, "e": hungry}])[-1].terms["lost"]
    assert terms.guarantee == Resources.NONE
    assert terms.withheld_ppm == 0
    assert terms.share == Resources.NONE
    alone = ticks(one, [{"lost": hungry}])[-1].terms["lost"]
    ceiling = BASELINE if service_class is GUARANTEED else CAPACITY
    assert alone.share == ceiling


@pytest.mark.parametrize("service_class", list(ServiceClass))
def test_a_degraded_entitlement_ranks_with_spot(service_class: ServiceClass) -> None:
    """Whatever its class was: who lives from the surplus goes before nobody of a class that has its own."""
    bound = entitlement("lost", service_class, BASELINE)
    one = pool(CAPACITY, replace(bound, state=DEGRADED))
    assert first_tick(one, CAPACITY).terms["lost"].rank == SPOT.rank
    assert first_tick(pool(CAPACITY, bound), CAPACITY).terms["lost"].rank == service_class.rank


def test_a_degraded_entitlement_is_admitted_while_there_is_room() -> None:
    """And refused when there is none, though it was guaranteed once."""
    lost = replace(entitlement("lost", GUARANTEED, BASELINE), state=DEGRADED)
    desk = Desk.of(pool(CAPACITY, lost, entitlement("spot", SPOT)))
    assert not desk.admit("lost", cost(1)).within_guarantee
    while isinstance(desk.claim("spot", cost(1)), Lease):
        pass
    assert isinstance(desk.claim("lost", cost(1)), Refusal)


def test_a_share_follows_demand_and_weight() -> None:
    """Half of the pool is lost: of eight sequences the heavier keeps its five and the lighter three."""
    members = (elastic("copilot", 500), elastic("synth", 30_000))
    hungry = Meters(pending_concurrency=8, pending_tokens=1_000, demanded_tokens=1_000)
    half = Resources(120, 8_000, 8)
    tick = ticks(pool(CAPACITY, *members), [{"copilot": hungry, "synth": hungry}], usable=half)[-1]
    assert tick.terms["copilot"].share.concurrency == 5
    assert tick.terms["synth"].share.concurrency == 3
