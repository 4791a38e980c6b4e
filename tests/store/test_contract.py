"""The contract that every store keeps, rule by rule (`store.base`)."""

import asyncio

import pytest

from envoy_tokenpools.core.admission import Lease, Reason, Resource, Terms
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import Limits, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Tick, first_tick
from tests.store.books import Books
from tests.support.pools import PLENTY, amount, claim, cost, entitlement, pool, terms

WIDE = amount()
ONE = amount(sequences=1)


def tick_of(*granted: Terms, usable: Resources = WIDE) -> Tick:
    """A tick with these terms."""
    return Tick(1, usable, {}, {one.entitlement: one for one in granted}, degraded=False)


# 1. Decides and takes atomically; a refusal takes nothing


async def test_what_is_free_is_given_to_the_last_unit(books: Books) -> None:
    """One sequence: the first gets it, the second does not, and the next one after its end does."""
    await books.take(claim("1", cost(), terms(), ONE))
    refusal = await books.refuse(claim("2", cost(), terms(), ONE))
    assert (refusal.reason, refusal.resource) == (Reason.POOL_CONTENDED, Resource.CONCURRENCY)
    assert (refusal.need, refusal.available) == (1, 0)
    await books.settle("1")
    await books.take(claim("3", cost(), terms(), ONE))


@pytest.mark.parametrize(
    ("usable", "what", "resource"),
    [
        (amount(sequences=4), cost(sequences=2), Resource.CONCURRENCY),
        (amount(kv_bytes=4_000), cost(kv_bytes=2_000), Resource.KV_CACHE),
        (amount(400), cost(200), Resource.TOKENS),
    ],
)
async def test_a_cost_that_fits_exactly_is_admitted(
    books: Books, usable: Resources, what: Cost, resource: Resource
) -> None:
    """Two halves fit; a third one does not, for want of the resource that they filled."""
    await books.take(claim("1", what, terms(), usable))
    await books.take(claim("2", what, terms(), usable))
    refusal = await books.refuse(claim("3", what, terms(), usable))
    assert (refusal.reason, refusal.resource) == (Reason.POOL_CONTENDED, resource)
    assert refusal.available == 0
    assert refusal.retry_after_ms >= 1


async def test_claims_at_the_same_time_get_what_there_is(books: Books) -> None:
    """Five of 100 tokens on 250: exactly two, however they meet."""
    usable = amount(250)
    outcomes = await asyncio.gather(
        *(books.reserve(claim(str(n), cost(100), terms(f"t{n}"), usable)) for n in range(5))
    )
    assert sum(isinstance(outcome, Lease) for outcome in outcomes) == 2
    total = (await books.store.snapshot(books.pool)).total
    assert total == InUse(in_flight=2, concurrency=2, reserved_tokens=200, kv_bytes=0)


async def test_a_refusal_takes_nothing(books: Books) -> None:
    """The books are the same before and after, and what was free stays free."""
    usable = amount(1_000, sequences=3, kv_bytes=9_000)
    await books.take(claim("1", cost(100, 2, 3_000), terms(), usable))
    before = await books.store.snapshot(books.pool)
    for number, what in enumerate((cost(1_000), cost(1, 2), cost(1, 1, 7_000))):
        await books.refuse(claim(f"no-{number}", what, terms(), usable))
    assert await books.store.snapshot(books.pool) == before
    await books.take(claim("2", cost(900, 1, 6_000), terms(), usable))


@pytest.mark.parametrize(
    ("limits", "what", "reason", "resource"),
    [
        (Limits(concurrency=2), cost(sequences=1), Reason.CONCURRENCY_LIMIT, Resource.CONCURRENCY),
        (Limits(kv_bytes=2_000), cost(kv_bytes=1_000), Reason.KV_CACHE_LIMIT, Resource.KV_CACHE),
        (Limits(tokens_per_second=200), cost(100), Reason.TOKEN_RATE_LIMIT, Resource.TOKENS),
    ],
)
async def test_an_entitlement_meets_its_own_ceilings_first(
    books: Books, limits: Limits, what: Cost, reason: Reason, resource: Resource
) -> None:
    """However much the pool has; another entitlement is not affected."""
    own = terms("a", limits=limits)
    await books.take(claim("1", what, own, WIDE))
    await books.take(claim("2", what, own, WIDE))
    refusal = await books.refuse(claim("3", what, own, WIDE))
    assert (refusal.reason, refusal.resource) == (reason, resource)
    await books.take(claim("4", what, terms("b"), WIDE))


async def test_a_guarantee_is_served_by_a_full_pool(books: Books) -> None:
    """Inside it always, one beyond it not."""
    await books.take(claim("1", cost(), terms("spot"), ONE))
    promised = amount(100, sequences=1)
    gold = terms("gold", guarantee=promised, share=promised)
    lease = await books.take(claim("2", cost(), gold, ONE))
    assert lease.within_guarantee
    await books.refuse(claim("3", cost(), gold, ONE))


async def test_a_request_beyond_its_share_does_not_pass_a_better_claim(books: Books) -> None:
    """Who was refused inside its share is not passed by who is beyond theirs, until two ticks later."""
    inside = terms("b", share=amount(PLENTY, sequences=8))
    await books.take(claim("1", cost(1, 7), terms("a"), amount(sequences=8)))
    await books.refuse(claim("2", cost(1, 2), inside, amount(sequences=8)))
    refusal = await books.refuse(claim("3", cost(), terms("a"), amount(sequences=8)))
    assert refusal.reason is Reason.LOW_PRIORITY
    for _ in range(2):
        await books.pass_ms(5_000)
        await books.store.close_tick(books.pool)
    await books.take(claim("4", cost(), terms("a"), amount(sequences=8)))


async def test_shadow_mode_takes_what_it_would_have_refused(books: Books) -> None:
    """The lease carries the refusal and is settled like any other."""
    await books.take(claim("1", cost(), terms(), ONE))
    lease = await books.take(claim("2", cost(), terms(), ONE, enforce=False))
    assert lease.shadowed is not None
    assert lease.shadowed.reason is Reason.POOL_CONTENDED
    assert (await books.store.snapshot(books.pool)).total.concurrency == 2
    assert await books.settle("2") is not None
    assert (await books.store.snapshot(books.pool)).total.concurrency == 1


async def test_tokens_come_back_with_time_when_the_refusal_says(books: Books) -> None:
    """Not a millisecond earlier."""
    usable = amount(1_000)
    await books.take(claim("1", cost(1_000), terms(), usable))
    refusal = await books.refuse(claim("2", cost(300), terms(), usable))
    assert refusal.retry_after_ms == 300
    await books.pass_ms(refusal.retry_after_ms - 1)
    await books.refuse(claim("3", cost(300), terms(), usable))
    await books.pass_ms(1)
    await books.take(claim("4", cost(300), terms(), usable))


async def test_an_idle_pool_admits_a_cost_deeper_than_itself(books: Books) -> None:
    """No refusal while nothing is used; the next one waits until it has drained."""
    usable = amount(100)
    await books.take(claim("1", cost(5_000), terms(), usable))
    refusal = await books.refuse(claim("2", cost(1), terms(), usable))
    assert refusal.retry_after_ms == 49_010


async def test_a_settlement_corrects_both_ways(books: Books) -> None:
    """Reserved too much: it is there again at once. Too little: it is missing, and comes back with time."""
    usable = amount(1_000)
    await books.take(claim("1", cost(990), terms(), usable))
    await books.settle("1", 12)
    await books.take(claim("2", cost(988), terms(), usable))
    settlement = await books.settle("2", 1_188)
    assert settlement is not None
    assert settlement.charged_tokens == 1_188
    refusal = await books.refuse(claim("3", cost(1), terms(), usable))
    assert (refusal.available, refusal.retry_after_ms) == (0, 201)


async def test_the_balance_is_that_after_the_decision(books: Books) -> None:
    """For the admitted and the refused alike."""
    own = terms("a", limits=Limits(tokens_per_second=1_000, concurrency=2))
    balances = []
    for number in range(3):
        reply = await books.store.reserve(books.pool, claim(str(number), cost(300), own, WIDE))
        balances.append(reply.balance)
    assert [balance.remaining_tokens for balance in balances] == [700, 400, 400]
    assert [balance.remaining_concurrency for balance in balances] == [1, 0, 0]
    assert {balance.limit_tokens for balance in balances} == {1_000}
    assert {balance.limit_concurrency for balance in balances} == {2}
    assert [balance.reset_tokens_ms for balance in balances] == [300, 600, 600]
    assert balances[0].reset_concurrency_ms == 0 < balances[2].reset_concurrency_ms


# 2. What is sent again counts once


async def test_a_claim_sent_again_is_the_same_lease(books: Books) -> None:
    """Also when nothing is free for it any more."""
    first = await books.take(claim("1", cost(100), terms(), ONE))
    assert await books.take(claim("1", cost(100), terms(), ONE)) == first
    total = (await books.store.snapshot(books.pool)).total
    assert total == InUse(in_flight=1, concurrency=1, reserved_tokens=100, kv_bytes=0)


async def test_one_claim_sent_many_times_at_once_is_one_lease(books: Books) -> None:
    """However they meet."""
    wanted = claim("1", cost(100), terms(), WIDE)
    outcomes = await asyncio.gather(*(books.reserve(wanted) for _ in range(10)))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert (await books.store.snapshot(books.pool)).total.in_flight == 1


async def test_a_settlement_counts_once(books: Books) -> None:
    """Ten at the same time are one; the tokens of the first one stand."""
    usable = amount(1_000)
    await books.take(claim("1", cost(500), terms(), usable))
    settlements = await asyncio.gather(*(books.settle("1", 400) for _ in range(10)))
    (settlement,) = [one for one in settlements if one is not None]
    assert (settlement.charged_tokens, settlement.late) == (400, False)
    assert await books.settle("1", 0) is None
    await books.take(claim("2", cost(600), terms(), usable))
    await books.refuse(claim("3", cost(1), terms(), usable))


async def test_an_unknown_lease_cannot_be_settled(books: Books) -> None:
    """Nor renewed; nothing turns negative."""
    assert await books.settle("never", 5_000) is None
    await books.store.renew(books.pool, ["never"], 60_000)
    assert (await books.store.snapshot(books.pool)).total == InUse()
    await books.take(claim("1", cost(), terms(), ONE))


# 3. Leases that nobody renews


async def test_a_lease_that_is_not_renewed_returns_by_itself(books: Books) -> None:
    """At the first sweep at or after its time, once, and whole."""
    lease = await books.take(claim("1", cost(100, 2, 3_000), terms(), WIDE, ttl_ms=10_000))
    assert lease.expires_at_ms - lease.admitted_at_ms == 10_000
    await books.pass_ms(9_999)
    assert await books.store.sweep(books.pool) == ()
    await books.pass_ms(1)
    assert await books.store.sweep(books.pool) == (lease,)
    assert await books.store.sweep(books.pool) == ()
    assert (await books.store.snapshot(books.pool)).total == InUse()


async def test_sweeps_at_the_same_time_return_a_lease_once(books: Books) -> None:
    """Replicas sweep as they please."""
    await books.take(claim("1", cost(), terms(), WIDE, ttl_ms=1_000))
    await books.pass_ms(1_000)
    swept = await asyncio.gather(*(books.store.sweep(books.pool) for _ in range(5)))
    assert sum(len(leases) for leases in swept) == 1


async def test_a_renewed_lease_lives_on(books: Books) -> None:
    """From the renewal, never shorter than before; the others go."""
    for lease_id in ("1", "2", "3"):
        await books.take(claim(lease_id, cost(), terms(), WIDE, ttl_ms=10_000))
    await books.pass_ms(9_000)
    await books.store.renew(books.pool, ["1", "never"], 10_000)
    await books.store.renew(books.pool, ["2"], 10)
    await books.pass_ms(1_000)
    assert {lease.lease_id for lease in await books.store.sweep(books.pool)} == {"2", "3"}
    await books.pass_ms(9_000)
    assert [lease.lease_id for lease in await books.store.sweep(books.pool)] == ["1"]


async def test_a_lease_past_its_time_can_be_renewed_until_it_is_swept(books: Books) -> None:
    """A replica that was held up is not yet gone."""
    await books.take(claim("1", cost(), terms(), WIDE, ttl_ms=1_000))
    await books.pass_ms(5_000)
    await books.store.renew(books.pool, ["1"], 1_000)
    assert await books.store.sweep(books.pool) == ()


async def test_a_late_settlement_charges(books: Books) -> None:
    """Concurrency came back with the sweep, tokens are corrected now, and only once."""
    usable = amount(1_000, sequences=1)
    await books.take(claim("1", cost(100), terms(), usable, ttl_ms=1_000, window_ms=100_000))
    await books.pass_ms(1_000)
    await books.store.sweep(books.pool)
    settlement = await books.settle("1", 90_000)
    assert settlement is not None
    assert (settlement.late, settlement.charged_tokens) == (True, 90_000)
    assert await books.settle("1", 90_000) is None
    assert (await books.store.snapshot(books.pool)).total == InUse()
    await books.take(claim("2", cost(), terms(), usable, window_ms=100_000))
    refusal = await books.refuse(
        claim("3", cost(20_000), terms("b"), amount(1_000), window_ms=100_000)
    )
    assert refusal.resource is Resource.TOKENS


# 4. The time is the store's own


async def test_held_and_expiring_times_are_the_stores(books: Books) -> None:
    """No caller says what time it is."""
    lease = await books.take(claim("1", cost(), terms(), WIDE))
    await books.pass_ms(1_234)
    later = await books.take(claim("2", cost(), terms(), WIDE))
    assert later.admitted_at_ms - lease.admitted_at_ms == 1_234
    settlement = await books.settle("1")
    assert settlement is not None
    assert settlement.held_ms == 1_234


# 5. A tick is read once


async def test_what_happened_is_read_by_one_caller(books: Books) -> None:
    """Whoever closes the tick gets all of it: asked for, refused once, delivered, held."""
    usable = amount(1_000)
    await books.store.publish(books.pool, tick_of(terms("a"), usable=usable), 1_000)
    await books.take(claim("1", cost(700, 2, 5_000), terms("a"), usable, fingerprint=1))
    for _ in range(3):
        await books.refuse(claim("2", cost(600), terms("a"), usable, fingerprint=2))
    await books.pass_ms(5_000)
    readings = await asyncio.gather(*(books.store.close_tick(books.pool) for _ in range(4)))
    read = [reading for reading in readings if reading is not None]
    assert sum(reading.elapsed_ms for reading in read) == 5_000
    meters = [reading.meters["a"] for reading in read if "a" in reading.meters]
    assert sum(one.demanded_tokens for one in meters) == 1_300
    assert sum(one.delivered_tokens for one in meters) == 700
    assert sum(one.pending_tokens for one in meters) == 600
    assert sum(one.sequence_ms for one in meters) == 10_000
    assert max(one.peak_kv_bytes for one in meters) == 5_000


async def test_the_next_tick_begins_empty(books: Books) -> None:
    """But for what is still in use."""
    await books.take(claim("1", cost(700, 2), terms("a"), WIDE))
    await books.pass_ms(5_000)
    await books.store.close_tick(books.pool)
    await books.pass_ms(5_000)
    reading = await books.store.close_tick(books.pool)
    assert reading is not None
    meters = reading.meters["a"]
    assert (meters.demanded_tokens, meters.delivered_tokens) == (0, 0)
    assert (meters.peak_concurrency, meters.sequence_ms) == (2, 10_000)


# Terms


async def test_what_is_published_is_withheld(books: Books) -> None:
    """Of a guarantee that does not lend, before anybody asked for it; and no longer when it is gone."""
    held = amount(100, sequences=3)
    usable = amount(1_000, sequences=4)
    gold = terms("gold", guarantee=held, share=held, withheld_ppm=1_000_000)
    await books.store.publish(books.pool, tick_of(gold, usable=usable), 1_000)
    await books.take(claim("1", cost(), terms("spot"), usable))
    await books.refuse(claim("2", cost(), terms("spot"), usable))
    await books.store.publish(books.pool, tick_of(usable=usable), 1_000)
    await books.take(claim("3", cost(1, 3), terms("spot"), usable))


async def test_leases_outlive_the_terms_that_they_were_taken_under(books: Books) -> None:
    """An entitlement that a reload removed is settled like any other."""
    await books.take(claim("1", cost(100, 2), terms("a"), WIDE))
    await books.store.publish(books.pool, tick_of(terms("b")), 1_000)
    for _ in range(3):
        await books.pass_ms(5_000)
        await books.store.close_tick(books.pool)
    assert (await books.store.snapshot(books.pool)).accounts["a"].concurrency == 2
    settlement = await books.settle("1", 90)
    assert settlement is not None
    assert settlement.lease.entitlement == "a"
    assert (await books.store.snapshot(books.pool)).total == InUse()


async def test_real_terms_can_be_published(books: Books) -> None:
    """Those of a whole pool, as the gate does at its start."""
    one = pool(
        amount(1_000, 8, 80_000),
        entitlement("gold", ServiceClass.DEDICATED, amount(500, 4, 40_000)),
        entitlement("spare", ServiceClass.SPOT),
    )
    tick = first_tick(one, one.capacity)
    await books.store.publish(books.pool, tick, one.window_ms)
    spare = tick.terms["spare"]
    await books.take(claim("1", cost(1, 4), spare, one.capacity, window_ms=one.window_ms))
    await books.refuse(claim("2", cost(), spare, one.capacity, window_ms=one.window_ms))
    gold = tick.terms["gold"]
    await books.take(claim("3", cost(1, 4), gold, one.capacity, window_ms=one.window_ms))


# Books


async def test_a_snapshot_shows_each_and_all(books: Books) -> None:
    """The total is the sum of the accounts."""
    await books.take(claim("1", cost(100, 2, 3_000), terms("a"), WIDE))
    await books.take(claim("2", cost(50, 1, 1_000), terms("b"), WIDE))
    await books.take(claim("3", cost(10, 1, 500), terms("b"), WIDE))
    view = await books.store.snapshot(books.pool)
    assert view.accounts["a"] == InUse(1, 2, 100, 3_000)
    assert view.accounts["b"] == InUse(2, 2, 60, 1_500)
    assert view.total == InUse(3, 4, 160, 4_500)


async def test_books_that_nobody_opened_are_empty(books: Books) -> None:
    """A page may ask before any request came."""
    view = await books.store.snapshot(books.pool)
    assert (view.total, dict(view.accounts)) == (InUse(), {})
    assert await books.store.sweep(books.pool) == ()


async def test_pools_do_not_know_of_each_other(books: Books) -> None:
    """The same entitlement and the same lease id elsewhere are others."""
    await books.take(claim("1", cost(), terms(), ONE))
    other = books.pool + "-other"
    reply = await books.store.reserve(other, claim("1", cost(), terms(), ONE))
    assert isinstance(reply.outcome, Lease)
    assert await books.store.settle(other, "1", 0) is not None
    assert (await books.store.snapshot(books.pool)).total.in_flight == 1
    assert (await books.store.snapshot(other)).total.in_flight == 0
