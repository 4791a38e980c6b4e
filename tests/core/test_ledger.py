"""The books at their limits: exact counts, both ways of settlement, expiry, replay, shadow mode."""

from dataclasses import replace

import pytest

from envoy_tokenpools.core.admission import Lease, Reason, Resource
from envoy_tokenpools.core.judging import NEVER_MS
from envoy_tokenpools.core.ledger import MAX_EXPIRED, OVERCHARGE, InUse, Ledger
from envoy_tokenpools.core.pool import Limits
from envoy_tokenpools.core.resources import Resources
from tests.support.pools import SURPLUS, admitted, amount, claim, cost, refused, take, terms


def total(ledger: Ledger) -> InUse:
    """What the whole pool holds."""
    return ledger.view().total


# ---------------------------------------------------------------- at the limit


@pytest.mark.parametrize("resource", ["tokens", "kv", "concurrency"])
def test_of_five_simultaneous_claims_of_100_on_250_exactly_two_are_admitted(resource: str) -> None:
    """Whichever resource is short; a refusal takes nothing."""
    ledger = Ledger()
    usable, what = {
        "tokens": (amount(tokens_per_second=250), cost(100)),
        "kv": (amount(kv_bytes=250), cost(kv_bytes=100)),
        "concurrency": (amount(sequences=250), cost(sequences=100)),
    }[resource]
    outcomes = [ledger.reserve(claim(f"l{i}", what, SURPLUS, usable), 0) for i in range(5)]
    assert [admitted(outcome) for outcome in outcomes] == [True, True, False, False, False]
    refusal = refused(outcomes[2])
    assert refusal.reason is Reason.POOL_CONTENDED
    assert (refusal.need, refusal.available) == (100, 50)
    assert total(ledger).in_flight == 2


@pytest.mark.parametrize(("tokens", "fits"), [(50, True), (51, False)])
def test_a_cost_equal_to_what_remains_is_admitted(tokens: int, *, fits: bool) -> None:
    """And one token more is not."""
    ledger = Ledger()
    take(ledger, "first", 200, amount(250))
    assert admitted(take(ledger, "second", tokens, amount(250))) is fits


def test_a_limit_of_one_admits_one() -> None:
    """The first, not the second; and the next one when the first has ended."""
    ledger, usable = Ledger(), amount(sequences=1)
    assert admitted(take(ledger, "first", 1, usable))
    assert not admitted(take(ledger, "second", 1, usable))
    ledger.settle("first", 1, 0)
    assert admitted(take(ledger, "third", 1, usable))


def test_an_idle_pool_admits_a_cost_deeper_than_its_bucket() -> None:
    """No 429 while nothing is reserved; the next one waits until the bucket has drained."""
    ledger, usable = Ledger(), amount(100)
    assert admitted(take(ledger, "deep", 1_024, usable))
    refusal = refused(take(ledger, "next", 10, usable))
    assert (refusal.resource, refusal.available) == (Resource.TOKENS, 0)
    assert refusal.retry_after_ms == 9_340
    assert not admitted(take(ledger, "early", 10, usable, now_ms=9_339))
    assert admitted(take(ledger, "in time", 10, usable, now_ms=9_340))


def test_a_pool_without_capacity_admits_nothing() -> None:
    """Neither without sequences nor without a token rate; waiting does not help against the latter."""
    assert not admitted(take(Ledger(), "a", 1, Resources.NONE))
    refusal = refused(take(Ledger(), "a", 1, amount(0)))
    assert refusal.retry_after_ms == NEVER_MS


def test_a_steady_trickle_never_meets_a_limit_far_above_it() -> None:
    """Ten tokens a second for 130 s against 16 per second, a minute deep: at most 10 are ever used."""
    ledger, usable = Ledger(), amount()
    limited = terms(limits=Limits(tokens_per_second=16))
    for second in range(130):
        wanted = claim(f"l{second}", cost(10), limited, usable, window_ms=60_000)
        assert admitted(ledger.reserve(wanted, second * 1_000))
        assert ledger.balance("a", second * 1_000).remaining_tokens == 950
        ledger.settle(f"l{second}", 10, second * 1_000 + 500)


# ---------------------------------------------------------------- own ceilings


@pytest.mark.parametrize(
    ("limits", "need", "reason", "resource", "available"),
    [
        (Limits(concurrency=3), (1, 2, 0), Reason.CONCURRENCY_LIMIT, Resource.CONCURRENCY, 1),
        (Limits(kv_bytes=150), (1, 1, 100), Reason.KV_CACHE_LIMIT, Resource.KV_CACHE, 50),
        (Limits(tokens_per_second=150), (100, 1, 0), Reason.TOKEN_RATE_LIMIT, Resource.TOKENS, 50),
    ],
)
def test_an_entitlement_meets_its_own_ceiling_first(
    limits: Limits,
    need: tuple[int, int, int],
    reason: Reason,
    resource: Resource,
    available: int,
) -> None:
    """On an empty pool, and it names the ceiling, the need and what was left."""
    ledger, whose = Ledger(), terms(limits=limits)
    tokens, sequences, kv_bytes = need
    for number, fits in enumerate((True, False)):
        outcome = take(
            ledger,
            f"l{number}",
            tokens,
            amount(),
            whose=whose,
            sequences=sequences,
            kv_bytes=kv_bytes,
        )
        assert admitted(outcome) is fits
    refusal = refused(outcome)
    assert (refusal.reason, refusal.resource) == (reason, resource)
    assert (refusal.need, refusal.available) == (max(need), available)
    assert refusal.retry_after_ms >= 1


def test_the_others_do_not_feel_a_ceiling_that_is_met() -> None:
    """Being held by one's own limit is no claim to what the others may use."""
    ledger, usable = Ledger(), amount()
    held = terms("held", weight=1_000, limits=Limits(concurrency=1))
    take(ledger, "one", 1, usable, whose=held)
    assert not admitted(take(ledger, "two", 1, usable, whose=held))
    assert admitted(take(ledger, "other", 1, usable))


# ---------------------------------------------------------------- settlement


def test_an_over_estimate_is_given_back() -> None:
    """Reserved 990, used 12: at once 988 of 1,000 are free again."""
    ledger, usable = Ledger(), amount(1_000)
    take(ledger, "over", 990, usable)
    settlement = ledger.settle("over", 12, 0)
    assert settlement is not None
    assert settlement.charged_tokens == 12
    assert total(ledger) == InUse()
    assert ledger.tokens.remaining == 988


def test_an_under_estimate_is_taken_afterwards() -> None:
    """Reserved 1,000, used 1,200: the next request waits until the budget has refilled, and nothing is negative."""
    ledger, usable = Ledger(), amount(1_000)
    take(ledger, "under", 1_000, usable)
    ledger.settle("under", 1_200, 0)
    assert ledger.tokens.remaining == 0
    refusal = refused(take(ledger, "next", 9, usable))
    assert (refusal.need, refusal.available, refusal.retry_after_ms) == (9, 0, 209)
    assert not admitted(take(ledger, "early", 9, usable, now_ms=208))
    assert admitted(take(ledger, "in time", 9, usable, now_ms=209))


def test_the_buckets_of_share_and_ceiling_are_corrected_too() -> None:
    """In both directions."""
    ledger = Ledger()
    whose = terms(share=amount(1_000), limits=Limits(tokens_per_second=500))
    take(ledger, "over", 400, amount(), whose=whose)
    ledger.settle("over", 100, 0)
    take(ledger, "under", 100, amount(), whose=whose)
    ledger.settle("under", 200, 0)
    account = ledger._accounts["a"]
    assert account.limit is not None
    assert (account.share.remaining, account.limit.remaining) == (700, 200)


def test_a_lease_is_settled_once() -> None:
    """The second time, and an unknown lease, change nothing."""
    ledger, usable = Ledger(), amount(1_000)
    take(ledger, "a", 100, usable)
    take(ledger, "b", 100, usable)
    assert ledger.settle("a", 300, 0) is not None
    before = ledger.view()
    assert ledger.settle("a", 300, 0) is None
    assert ledger.settle("never", 300, 0) is None
    assert ledger.view() == before
    assert ledger.tokens.remaining == 600


def test_a_disconnect_gives_the_slot_back_a_hundred_times() -> None:
    """One slot, a hundred clients that leave after a token: the follower is always admitted."""
    ledger, usable = Ledger(), amount(1_000, sequences=1)
    for number in range(100):
        assert admitted(take(ledger, f"l{number}", 500, usable, now_ms=number * 100))
        ledger.settle(f"l{number}", 10, number * 100 + 50)
        assert total(ledger) == InUse()


def test_a_settlement_says_how_long_the_lease_was_held() -> None:
    """Zero if the clock stepped back meanwhile."""
    ledger = Ledger()
    take(ledger, "a", 1, amount(), now_ms=5_000)
    take(ledger, "b", 1, amount(), now_ms=5_000)
    first, second = ledger.settle("a", 1, 7_500), ledger.settle("b", 1, 1_000)
    assert first is not None
    assert second is not None
    assert (first.held_ms, second.held_ms) == (2_500, 0)
    assert not first.late


def test_a_correction_is_metered_as_neither_offered_nor_delivered() -> None:
    """A tick sees what requests turned out to be, not what was reserved for them."""
    ledger = Ledger()
    take(ledger, "over", 500, amount())
    take(ledger, "under", 10, amount())
    ledger.settle("over", 100, 0)
    ledger.settle("under", 30, 0)
    meters = ledger.close_tick(5_000)[1]["spot"]
    assert (meters.demanded_tokens, meters.delivered_tokens) == (130, 130)


# ---------------------------------------------------------------- replay and expiry


def test_the_same_claim_twice_is_one_lease() -> None:
    """The answer is the same lease, and nothing is taken again."""
    ledger = Ledger()
    first = take(ledger, "a", 100, amount())
    before = ledger.view()
    assert take(ledger, "a", 100, amount()) is first
    assert ledger.view() == before


def test_a_lease_that_nobody_renews_returns_by_itself() -> None:
    """Concurrency and KV bytes at the moment of expiry, not before; what was reserved stays charged."""
    ledger, usable = Ledger(), amount(1_000, sequences=2, kv_bytes=10)
    take(ledger, "a", 100, usable, sequences=2, kv_bytes=10, ttl_ms=3_000)
    assert ledger.sweep(2_999) == ()
    assert [lease.lease_id for lease in ledger.sweep(3_000)] == ["a"]
    assert ledger.sweep(3_000) == ()
    assert total(ledger) == InUse()
    assert ledger.tokens.remaining == 900


def test_a_renewed_lease_lives_on() -> None:
    """To the later of its expiries; leases that are not there are nobody's business."""
    ledger = Ledger()
    take(ledger, "a", 1, amount(), ttl_ms=3_000)
    ledger.renew(["a", "unknown"], 9_000)
    ledger.renew(["a"], 5_000)
    assert ledger.sweep(8_999) == ()
    assert len(ledger.sweep(9_000)) == 1


def test_a_late_settlement_still_corrects_the_tokens() -> None:
    """Once, and only them."""
    ledger, usable = Ledger(), amount(1_000)
    take(ledger, "a", 900, usable, ttl_ms=0)
    ledger.sweep(0)
    settlement = ledger.settle("a", 100, 0)
    assert settlement is not None
    assert settlement.late
    assert total(ledger) == InUse()
    assert ledger.tokens.remaining == 900
    assert ledger.settle("a", 100, 0) is None


def test_a_claim_replayed_after_its_lease_expired_is_a_new_lease_that_ends_once() -> None:
    """One settlement ends it; the expired one does not come back to be settled as well."""
    ledger, usable = Ledger(), amount(1_000)
    take(ledger, "a", 100, usable, ttl_ms=1_000)
    ledger.sweep(1_000)
    assert admitted(take(ledger, "a", 100, usable, now_ms=1_000))
    assert total(ledger).in_flight == 1
    assert ledger.settle("a", 100, 1_000) is not None
    assert ledger.settle("a", 0, 1_000) is None
    assert total(ledger) == InUse()


def test_only_so_many_expired_leases_are_remembered() -> None:
    """The oldest lose the correction of their tokens, nothing else."""
    ledger = Ledger()
    for number in range(MAX_EXPIRED + 1):
        take(ledger, f"l{number}", 1, amount(), ttl_ms=0)
    ledger.sweep(0)
    assert ledger.settle("l0", 0, 0) is None
    assert ledger.settle("l1", 0, 0) is not None
    assert total(ledger) == InUse()


# ---------------------------------------------------------------- shadow mode


def test_shadow_mode_decides_and_lets_pass() -> None:
    """The lease carries the refusal, and counts like any other."""
    ledger, usable = Ledger(), amount(sequences=1)
    take(ledger, "a", 1, usable, enforce=False)
    lease = take(ledger, "b", 1, usable, enforce=False)
    assert isinstance(lease, Lease)
    assert lease.shadowed is not None
    assert lease.shadowed.reason is Reason.POOL_CONTENDED
    assert total(ledger).concurrency == 2
    ledger.settle("a", 1, 0)
    ledger.settle("b", 1, 0)
    assert total(ledger) == InUse()


@pytest.mark.parametrize("fingerprint", [0, 7])
def test_what_passes_in_shadow_mode_is_demanded_and_delivered_once(fingerprint: int) -> None:
    """Nothing was shed, so nothing waits outside."""
    ledger, usable = Ledger(), amount(sequences=0)
    wanted = claim("a", cost(100), SURPLUS, usable, fingerprint=fingerprint, enforce=False)
    assert admitted(ledger.reserve(wanted, 0))
    meters = ledger.close_tick(5_000)[1]["spot"]
    assert (meters.demanded_tokens, meters.delivered_tokens) == (100, 100)
    assert meters.pending_concurrency == 0


def test_retry_after_follows_how_long_leases_are_held() -> None:
    """Four leases of about 8 s each: the oldest ends after 8 s, from then on one ends about every 2 s."""
    ledger, usable = Ledger(), amount(sequences=4)
    for number in range(400):
        take(ledger, f"l{number}", 1, usable, now_ms=number * 8_000)
        ledger.settle(f"l{number}", 1, (number + 1) * 8_000)
    for number in range(4):
        take(ledger, f"held{number}", 1, usable, now_ms=4_000_000)
    for after_ms, wait_ms in ((0, 8_000), (5_000, 3_000), (6_500, 2_000), (60_000, 2_000)):
        asked = take(ledger, "next", 1, usable, now_ms=4_000_000 + after_ms)
        assert refused(asked).retry_after_ms == pytest.approx(wait_ms, abs=5)
        ledger.close_tick(4_000_000 + after_ms)  # nobody is ahead any more


def test_before_anything_ended_the_oldest_tells_how_long_leases_are_held() -> None:
    """At least as long as it has been held."""
    ledger, usable = Ledger(), amount(sequences=4)
    for number in range(4):
        take(ledger, f"held{number}", 1, usable, now_ms=0)
    assert refused(take(ledger, "x", 1, usable, now_ms=0)).retry_after_ms == 1_000
    ledger.close_tick(0)
    assert refused(take(ledger, "x", 1, usable, now_ms=20_000)).retry_after_ms == 5_000


def test_a_true_report_is_believed_though_the_pool_was_lost_meanwhile() -> None:
    """By the rate at which it was served."""
    ledger = Ledger()
    take(ledger, "a", 100, amount(240, sequences=4), now_ms=0)
    ledger.publish({}, Resources(0, 0, 0), 1_000, 500)
    settlement = ledger.settle("a", 900, 1_000)
    assert settlement is not None
    assert settlement.charged_tokens == 900


def test_a_report_beyond_belief_is_not_believed() -> None:
    """2**53 tokens would block the entitlement for good."""
    ledger, usable = Ledger(), amount(1_000, sequences=4)
    take(ledger, "a", 100, usable, now_ms=0)
    settlement = ledger.settle("a", 2**53, 2_000)
    assert settlement is not None
    assert settlement.charged_tokens == 100 + OVERCHARGE * 3_000
    take(ledger, "b", 100, usable, now_ms=60_000)
    settlement = ledger.settle("b", 9_000, 62_000)
    assert settlement is not None
    assert settlement.charged_tokens == 9_000


def test_a_clock_that_steps_back_breaks_nothing() -> None:
    """Waits stay at least a millisecond, counters at least zero."""
    ledger, usable = Ledger(), amount(1_000, sequences=1)
    take(ledger, "a", 1_000, usable, now_ms=10_000)
    refusal = refused(take(ledger, "b", 1, usable, now_ms=5_000))
    assert refusal.retry_after_ms >= 1
    ledger.settle("a", 1_200, 1_000)
    assert total(ledger) == InUse()
    assert ledger.close_tick(500)[0] <= 500


def test_books_begin_when_they_are_opened() -> None:
    """On a clock that has run for long, the first tick is as long as it was, and no longer."""
    assert Ledger.opened_at(86_400_000).close_tick(86_405_000)[0] == 5_000


def test_the_pool_may_shrink_below_what_is_in_use() -> None:
    """Available is then printed as 0, not as a negative number."""
    ledger = Ledger()
    take(ledger, "a", 1, amount(sequences=8), sequences=8)
    refusal = refused(take(ledger, "b", 1, amount(sequences=4)))
    assert (refusal.need, refusal.available) == (1, 0)


def test_claims_carry_the_terms_in_force() -> None:
    """New terms count from the first claim that carries them."""
    ledger = Ledger()
    one = terms(limits=Limits(concurrency=1))
    take(ledger, "a", 1, amount(), whose=one)
    assert not admitted(take(ledger, "b", 1, amount(), whose=one))
    assert admitted(take(ledger, "b", 1, amount(), whose=replace(one, limits=Limits())))


def test_leases_of_an_entitlement_are_bounded_even_in_shadow_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the bound one more is refused, though nothing else is; the next after a settlement is not."""
    monkeypatch.setattr("envoy_tokenpools.core.ledger.MAX_LEASES_PER_ENTITLEMENT", 3)
    ledger, usable = Ledger(), amount(1_000, sequences=9)
    for number in range(3):
        assert admitted(take(ledger, f"l{number}", 1, usable, enforce=False))
    refusal = refused(take(ledger, "l3", 1, usable, enforce=False))
    assert (refusal.reason, refusal.available) == (Reason.CONCURRENCY_LIMIT, 0)
    ledger.settle("l0", 1, 0)
    assert admitted(take(ledger, "l4", 1, usable, enforce=False))


def test_a_sweep_finds_what_is_due_however_leases_were_taken_and_renewed() -> None:
    """In whatever order they expire; a sweep that has nothing to find may come at any time."""
    ledger = Ledger()
    for name, ttl_ms in (("late", 9_000), ("soon", 1_000), ("middle", 5_000)):
        take(ledger, name, 1, amount(), ttl_ms=ttl_ms)
    assert ledger.sweep(999) == ()
    ledger.renew(["soon"], 7_000)
    assert ledger.sweep(1_000) == ()
    assert [lease.lease_id for lease in ledger.sweep(5_000)] == ["middle"]
    take(ledger, "new", 1, amount(), ttl_ms=100, now_ms=5_000)
    assert [lease.lease_id for lease in ledger.sweep(5_100)] == ["new"]
    assert [lease.lease_id for lease in ledger.sweep(60_000)] == ["late", "soon"]
    assert ledger.sweep(10**15) == ()


def test_a_window_that_was_changed_is_in_force_though_the_terms_are_the_same() -> None:
    """The bucket of a share is as deep as the window says that was published, whatever a claim says."""
    ledger, mine = Ledger(), terms(share=amount(100))
    ledger.publish({"a": mine}, amount(), 1_000, 0)
    assert ledger._accounts["a"].share.remaining == 100
    ledger.publish({"a": mine}, amount(), 5_000, 0)
    assert ledger._accounts["a"].share.remaining == 500
    ledger.reserve(claim("l", cost(1), mine, amount(), window_ms=2_000), 0)
    assert ledger._accounts["a"].share.remaining == 499


def test_terms_that_are_equal_are_the_same() -> None:
    """Another replica's tick says the same in other words: nothing is withheld twice, nor given up."""
    ledger, part = Ledger(), amount(100, 2, 50)
    gold = terms("gold", guarantee=part, share=part, withheld_ppm=1_000_000)
    for each in (gold, replace(gold), replace(gold, weight=2.0), replace(gold)):
        ledger.publish({"gold": each}, amount(1_000, 4, 200), 1_000, 0)
        assert ledger.tokens.rate == 900
        assert not admitted(take(ledger, "s", 1, amount(1_000, 4, 200), sequences=3))
    assert ledger._accounts["gold"].terms.weight == 1.0
