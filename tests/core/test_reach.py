"""What a request may cost in a pool where something is withheld: never so much that it could never be admitted."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.core.admission import Lease, Reason, Refusal
from envoy_tokenpools.core.cost import Cost, Need, estimate
from envoy_tokenpools.core.pool import Entitlement, EntitlementState, Pool, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import first_tick
from envoy_tokenpools.errors import RequestError
from tests.support.pools import KV_BYTES_PER_TOKEN, Desk, cost, entitlement, pool

DEDICATED, GUARANTEED, ELASTIC, SPOT, PREEMPTIBLE = ServiceClass

CAPACITY = Resources(tokens_per_second=1_000, kv_bytes=160 * KV_BYTES_PER_TOKEN, concurrency=16)

OWN = entitlement("own", DEDICATED, Resources(100, 40 * KV_BYTES_PER_TOKEN, 4))
WIDE = entitlement("wide", ELASTIC, Resources(100, 40 * KV_BYTES_PER_TOKEN, 4))
LIGHT = entitlement("light", SPOT)

DRAINED_MS = 10**9
"""Long after every bucket has drained."""


def asked(desk: Desk, name: str, need: Need) -> Cost:
    """What the entitlement's request is taken to cost, as the gate asks for it."""
    reach = desk.tick.terms[name].reach
    return estimate(desk.pool, desk.pool.entitlements[name], need, None, reach)


def quiet(desk: Desk) -> Desk:
    """The same when every lease has ended and every bucket has drained, two ticks later."""
    for lease_id in list(desk.ledger._leases):
        desk.ledger.settle(lease_id, 10, desk.now_ms)
    for _ in range(2):
        desk.pass_tick(DRAINED_MS)
    return desk


# ---------------------------------------------------------------- reach


def test_the_reach_is_all_but_what_is_withheld_for_others() -> None:
    """Of an idle dedicated baseline all, of one that lends the headroom, rounded up; one's own is within reach."""
    baseline = Resources(100, 5_000, 5)
    members = (
        entitlement("d", DEDICATED, baseline),
        entitlement("g", GUARANTEED, baseline),
        entitlement("keeps", GUARANTEED, baseline, lend=False),
        entitlement("e", ELASTIC, baseline),
        LIGHT,
    )
    one = replace(pool(Resources(400, 20_000, 16), *members), headroom=0.25)
    reaches = {name: each.reach for name, each in first_tick(one, one.capacity).terms.items()}
    assert reaches == {
        "d": Resources(400, 13_750, 9),
        "g": Resources(400, 10_000, 6),
        "keeps": Resources(400, 13_750, 9),
        "e": Resources(400, 8_750, 4),
        "light": Resources(400, 8_750, 4),
    }


def test_where_everything_is_withheld_nothing_is_within_reach() -> None:
    """Never less than nothing, however much was promised."""
    all_of_it = replace(OWN, baseline=CAPACITY)
    more = entitlement("more", DEDICATED, CAPACITY)
    terms = first_tick(pool(CAPACITY, all_of_it, more, LIGHT), CAPACITY).terms
    assert terms["light"].reach == Resources(1_000, 0, 0)


# ---------------------------------------------------------------- never for ever


def test_a_request_as_wide_as_the_pool_runs_beside_an_idle_dedicated_baseline() -> None:
    """Sixteen sequences become the twelve that are not withheld; admitted where nobody else is."""
    desk = Desk.of(pool(CAPACITY, OWN, WIDE, LIGHT))
    wide = asked(desk, "wide", Need(10, 16, 2))
    assert wide.concurrency == 12
    assert desk.admit("wide", wide).cost == wide
    assert desk.admit("own", cost(1, sequences=4)).within_guarantee


def test_a_request_that_can_never_fit_starves_nobody() -> None:
    """An elastic tenant that asks for sixteen again and again stops no spot, of which there is always somebody."""
    desk = Desk.of(pool(CAPACITY, OWN, WIDE, LIGHT))
    held = desk.admit("light", cost(1))
    for _ in range(3):
        outcome = desk.claim("wide", cost(1, sequences=16))
        assert isinstance(outcome, Refusal)
        assert outcome.reason is Reason.POOL_CONTENDED
        desk.pass_tick()
        after, held = held, desk.admit("light", cost(1))
        desk.settle(after)


def test_a_request_that_fits_once_the_others_have_left_is_waited_for() -> None:
    """Twelve sequences are within reach: spot waits for them, and they come as soon as it has left."""
    desk = Desk.of(pool(CAPACITY, OWN, WIDE, LIGHT))
    held = desk.admit("light", cost(1))
    wide = asked(desk, "wide", Need(10, 16, 2))
    assert isinstance(desk.claim("wide", wide), Refusal)
    waiting = desk.claim("light", cost(1))
    assert isinstance(waiting, Refusal)
    assert waiting.reason is Reason.LOW_PRIORITY
    desk.settle(held)
    assert desk.admit("wide", wide).cost.concurrency == 12


BASELINES = st.builds(
    Resources,
    tokens_per_second=st.integers(1, 300),
    kv_bytes=st.integers(1, 60 * KV_BYTES_PER_TOKEN),
    concurrency=st.integers(1, 6),
)


@st.composite
def members(draw: st.DrawFn) -> list[Entitlement]:
    """A few entitlements of all classes; their baselines may be more than there is."""
    chosen = draw(st.lists(st.sampled_from(ServiceClass), min_size=1, max_size=5))
    states = st.sampled_from([EntitlementState.BOUND] * 4 + [EntitlementState.DEGRADED])
    return [
        replace(
            entitlement(
                f"{service_class.value}-{number}",
                service_class,
                draw(BASELINES) if service_class.has_baseline else Resources.NONE,
                lend=draw(st.booleans()),
            ),
            state=draw(states),
        )
        for number, service_class in enumerate(chosen)
    ]


NEEDS = st.builds(
    Need,
    prompt_tokens=st.integers(0, 400),
    sequences=st.integers(1, 40),
    max_output_tokens=st.none() | st.integers(0, 200),
    decodes=st.booleans(),
    prompts=st.integers(1, 4),
)


@given(
    who=members(),
    headroom=st.sampled_from([0.0, 0.1, 1.0]),
    percent=st.sampled_from([100, 100, 60, 20]),
    before=st.lists(st.tuples(st.integers(0, 4), NEEDS), max_size=8),
    need=NEEDS,
)
def test_whatever_is_asked_is_admitted_where_nobody_else_is(
    who: list[Entitlement],
    headroom: float,
    percent: int,
    before: list[tuple[int, Need]],
    need: Need,
) -> None:
    """Nothing leased and every bucket drained: any cost that is no 400 becomes a lease, while there is any reach."""
    one: Pool = replace(pool(CAPACITY, *who), headroom=headroom)
    desk = Desk.of(one)
    desk.usable = Resources(
        CAPACITY.tokens_per_second * percent // 100,
        CAPACITY.kv_bytes * percent // 100,
        CAPACITY.concurrency * percent // 100,
    )
    for number, earlier in before:
        name = who[number % len(who)].name
        with contextlib.suppress(RequestError):
            desk.claim(name, asked(desk, name, earlier))
    for name, terms in quiet(desk).tick.terms.items():
        try:
            wanted = asked(desk, name, need)
        except RequestError:
            continue
        assert terms.reach is not None
        in_reach = terms.reach.concurrency > 0 and terms.reach.kv_bytes >= KV_BYTES_PER_TOKEN
        has_rate = terms.guarantee.tokens_per_second > 0 or desk.ledger.tokens.rate > 0
        outcome = desk.claim(name, wanted)
        if isinstance(outcome, Lease):
            desk.settle(outcome, 0)
            continue
        # What only fits the whole capacity waits, with 429, until that is back.
        is_whole = percent >= 100
        assert not (in_reach and has_rate and is_whole), (name, wanted, outcome)


@pytest.mark.parametrize("service_class", [DEDICATED, GUARANTEED, ELASTIC])
def test_a_degraded_entitlement_that_was_refused_holds_up_only_spot(
    service_class: ServiceClass,
) -> None:
    """It lives from the surplus: an elastic tenant beyond its share goes before it, spot of less weight does not."""
    baseline = Resources(100, 40 * KV_BYTES_PER_TOKEN, 4)
    lost = replace(entitlement("lost", service_class, baseline), state=EntitlementState.DEGRADED)
    desk = Desk.of(pool(CAPACITY, lost, WIDE, LIGHT))
    desk.admit("light", cost(1, sequences=9))
    desk.admit("wide", cost(1, sequences=4))
    assert desk.tick.terms["wide"].share.concurrency <= 4
    assert isinstance(desk.claim("lost", cost(1, sequences=4)), Refusal)
    desk.admit("wide", cost(1))
    waiting = desk.claim("light", cost(1))
    assert isinstance(waiting, Refusal)
    assert waiting.reason is Reason.LOW_PRIORITY
