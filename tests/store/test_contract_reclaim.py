"""The contract of every store where capacity is taken back, calls overtake each other, or a report is broken."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from envoy_tokenpools.core.admission import Claim, Lease, Terms
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Tick
from tests.store.books import Books
from tests.support.pools import amount, claim, cost, terms

FOUR = amount(sequences=4, kv_bytes=4_000)

WIDE = amount()

PROMISED = amount(sequences=3, kv_bytes=4_000)

GOLD = terms("gold", guarantee=PROMISED, share=PROMISED)

SPOT = replace(terms("spot"), rank=1, evictable=True)

BATCH = replace(terms("batch"), evictable=True)


def small(lease_id: str, whose: Terms, usable: Resources = FOUR, *, enforce: bool = True) -> Claim:
    """A claim of one sequence and a quarter of the KV cache."""
    return claim(lease_id, cost(1, 1, 1_000), whose, usable, enforce=enforce)


async def arrive(books: Books, wanted: Claim) -> tuple[str, ...]:
    """The leases that have to be ended for a claim that must be admitted."""
    reply = await books.store.reserve(books.pool, wanted)
    assert isinstance(reply.outcome, Lease), reply
    return reply.evicted


async def fill(books: Books, *whose: Terms) -> None:
    """One lease of each, in this order, named by entitlement and number."""
    for number, each in enumerate(whose):
        assert await arrive(books, small(f"{each.entitlement}-{number}", each)) == ()


# 7. What is taken back


async def test_the_newest_of_the_lowest_class_is_ended_first(books: Books) -> None:
    """Preemptible before spot, newest before oldest, each once."""
    await fill(books, BATCH, SPOT, BATCH, SPOT)
    evicted = [await arrive(books, small(f"g{number}", GOLD)) for number in range(3)]
    assert evicted == [("batch-2",), ("batch-0",), ("spot-3",)]


async def test_nobody_is_ended_while_there_is_room(books: Books) -> None:
    """Nor for one more while what was told to end, and has not ended, was room enough for both."""
    await fill(books, BATCH)
    assert await arrive(books, small("g0", GOLD)) == ()
    assert await arrive(books, claim("wide", cost(1, 2), BATCH, FOUR)) == ()
    assert await arrive(books, small("g1", GOLD)) == ("wide",)
    assert await arrive(books, small("g2", GOLD)) == ()
    await books.settle("wide")
    assert (await books.store.snapshot(books.pool)).total.concurrency == 4


async def test_as_many_are_ended_as_are_short(books: Books) -> None:
    """A request of three sequences ends three of one."""
    await fill(books, BATCH, BATCH, BATCH, BATCH)
    wide = claim("g", cost(1, 3), GOLD, FOUR)
    assert await arrive(books, wide) == ("batch-3", "batch-2", "batch-1")


async def test_kv_cache_is_taken_back_from_those_that_hold_some(books: Books) -> None:
    """A lease that holds none is not ended in vain."""
    usable = amount(sequences=100, kv_bytes=4_000)
    await arrive(books, claim("holds", cost(1, 1, 4_000), BATCH, usable))
    await arrive(books, claim("none", cost(1, 1, 0), BATCH, usable))
    assert await arrive(books, claim("g", cost(1, 1, 1_000), GOLD, usable)) == ("holds",)


@pytest.mark.parametrize(
    ("whose", "enforce"), [(replace(SPOT, evictable=False), True), (BATCH, False)]
)
async def test_a_guarantee_is_served_where_nobody_can_be_ended(
    books: Books, whose: Terms, *, enforce: bool
) -> None:
    """Neither what may not be evicted nor what was taken in shadow mode; it is admitted all the same."""
    for number in range(4):
        await arrive(books, small(f"held-{number}", whose, enforce=enforce))
    assert await arrive(books, small("g", GOLD)) == ()
    assert (await books.store.snapshot(books.pool)).total.concurrency == 5


async def test_shadow_mode_ends_nobody(books: Books) -> None:
    """A guarantee that is only observed takes nothing from those who run."""
    await fill(books, BATCH, BATCH, BATCH, BATCH)
    assert await arrive(books, small("g", GOLD, enforce=False)) == ()
    assert await arrive(books, small("h", GOLD)) == ("batch-3", "batch-2")


async def test_only_a_guarantee_ends_somebody(books: Books) -> None:
    """Whoever is beyond his own is refused by a full pool, and nobody is ended for that."""
    await fill(books, BATCH, BATCH, BATCH, BATCH)
    reply = await books.store.reserve(books.pool, small("e", terms("e", share=FOUR)))
    assert not isinstance(reply.outcome, Lease)
    assert reply.evicted == ()


async def test_terms_at_admission_decide(books: Books) -> None:
    """What was taken as evictable stays so, though a reload has made its entitlement better; and the reverse."""
    better = replace(BATCH, rank=2, evictable=False)
    await fill(books, BATCH, better, SPOT, replace(SPOT, rank=0))
    assert await arrive(books, claim("g", cost(1, 3), GOLD, FOUR)) == (
        "spot-3",
        "batch-0",
        "spot-2",
    )


async def test_what_was_told_to_end_is_held_until_it_has_ended(books: Books) -> None:
    """It counts, lives on when renewed, answers its claim sent again, and is settled like any other."""
    await fill(books, BATCH, BATCH, BATCH, BATCH)
    assert await arrive(books, small("g", GOLD)) == ("batch-3",)
    assert (await books.store.snapshot(books.pool)).total.concurrency == 5
    assert (await books.take(small("batch-3", BATCH))).lease_id == "batch-3"
    await books.pass_ms(59_000)
    await books.store.renew(books.pool, ["batch-3"], 60_000)
    await books.pass_ms(2_000)
    swept = await books.store.sweep(books.pool)
    assert "batch-3" not in {lease.lease_id for lease in swept}
    settlement = await books.settle("batch-3", 1)
    assert settlement is not None
    assert not settlement.late


async def test_what_was_told_to_end_and_expired_frees_nothing_any_more(books: Books) -> None:
    """Its capacity is back; the next shortage ends the next one."""
    await fill(books, SPOT, SPOT, SPOT)
    lost = claim("lost", cost(1, 1, 1_000), BATCH, FOUR, ttl_ms=1_000)
    assert await arrive(books, lost) == ()
    assert await arrive(books, small("g0", GOLD)) == ("lost",)
    await books.pass_ms(1_000)
    await books.store.sweep(books.pool)
    assert await arrive(books, small("g1", GOLD)) == ("spot-2",)


async def test_a_claim_sent_again_ends_nobody_else(books: Books) -> None:
    """It is the same lease."""
    await fill(books, BATCH, BATCH, BATCH, BATCH)
    assert await arrive(books, small("g", GOLD)) == ("batch-3",)
    assert await arrive(books, small("g", GOLD)) == ()


async def test_a_claim_sent_again_ends_nobody_though_capacity_was_lost_meanwhile(
    books: Books,
) -> None:
    """It asked for nothing new; the next one that does finds what is short."""
    await fill(books, BATCH, BATCH, BATCH)
    sent = small("g", GOLD)
    assert await arrive(books, sent) == ()
    lost = replace(sent, usable=replace(sent.usable, concurrency=2))
    assert await arrive(books, lost) == ()


async def test_claims_at_the_same_time_end_one_each(books: Books) -> None:
    """However they meet, nobody is told twice."""
    await fill(books, BATCH, BATCH, BATCH, BATCH)
    told = await asyncio.gather(*(arrive(books, small(f"g{number}", GOLD)) for number in range(3)))
    assert sorted(name for names in told for name in names) == ["batch-1", "batch-2", "batch-3"]


async def test_what_a_guarantee_gives_back_is_free_for_it_for_a_moment(books: Books) -> None:
    """A twentieth of the mean holding time, at most a quarter of a second; for itself at once."""
    one = amount(sequences=1)
    await arrive(books, claim("g0", cost(), GOLD, one))
    await books.pass_ms(60_000)
    await books.settle("g0", 1)
    await books.refuse(claim("s0", cost(), SPOT, one))
    await books.take(claim("g1", cost(), GOLD, one))
    await books.settle("g1", 1)
    await books.pass_ms(249)
    await books.refuse(claim("s1", cost(), SPOT, one))
    await books.pass_ms(1)
    await books.take(claim("s2", cost(), SPOT, one))


async def test_headroom_is_rounded_up_once(books: Books) -> None:
    """A tenth of 41 idle sequences, each of another, is five; what the asker withholds is not in its own way."""
    each = amount(1, sequences=1, kv_bytes=0)
    granted = {
        name: terms(name, guarantee=each, share=each, withheld_ppm=100_000)
        for name in (f"g{number}" for number in range(41))
    }
    usable = amount(sequences=60)
    tick = Tick(1, usable, {}, granted, degraded=False)
    await books.store.publish(books.pool, tick, 1_000)
    for whose, free in ((SPOT, 55), (granted["g0"], 56)):
        refusal = await books.refuse(claim("more", cost(1, free + 1), whose, usable))
        assert refusal.available == free
        await books.take(claim("all", cost(1, free), whose, usable))
        await books.settle("all", 1)
        await books.pass_ms(1_000)


# 8. In the order in which they were begun


async def test_a_settlement_does_not_overtake_its_claim(books: Books) -> None:
    """Begun without waiting for the answer to the claim, it ends what that takes."""
    for number in range(20):
        outcome, settlement = await asyncio.gather(
            books.reserve(claim(str(number), cost(100), terms(), WIDE)), books.settle(str(number))
        )
        assert isinstance(outcome, Lease)
        assert settlement is not None
    assert (await books.store.snapshot(books.pool)).total == InUse()


async def test_a_claim_that_was_given_up_can_be_undone(books: Books) -> None:
    """However far it got: settled after its caller was cancelled, nothing is held."""
    for turns in range(6):
        name = f"given-up-{turns}"
        asked = asyncio.ensure_future(books.reserve(claim(name, cost(100), terms(), WIDE)))
        for _ in range(turns):
            await asyncio.sleep(0)
        asked.cancel()
        await books.settle(name)
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        assert (await books.store.snapshot(books.pool)).total == InUse()


async def test_a_claim_sent_again_after_its_settlement_is_a_new_lease(books: Books) -> None:
    """A retry with the same id is served like the first one, and ends like it."""
    for _ in range(3):
        await books.take(claim("1", cost(100), terms(), WIDE))
        assert await books.settle("1") is not None
    assert (await books.store.snapshot(books.pool)).total == InUse()


# 9. What is believed


@pytest.mark.parametrize("tokens", [2**53, 2**63, 10**18])
async def test_a_broken_report_blocks_nobody_for_good(books: Books, tokens: int) -> None:
    """However absurd: what was charged is said, and an hour later there is room again."""
    usable = amount(1_000)
    await books.take(claim("1", cost(100), terms(), usable))
    await books.pass_ms(10_000)
    settlement = await books.settle("1", tokens)
    assert settlement is not None
    assert 100 <= settlement.charged_tokens <= 1_000_000
    await books.pass_ms(3_600_000)
    await books.take(claim("2", cost(1_000), terms(), usable))


async def test_what_the_pool_could_have_processed_is_believed(books: Books) -> None:
    """An under-estimate by far is charged as reported: a pool alone for ten seconds did all of that."""
    usable = amount(1_000)
    await books.take(claim("1", cost(100), terms(), usable))
    await books.pass_ms(10_000)
    settlement = await books.settle("1", 10_100)
    assert settlement is not None
    assert settlement.charged_tokens == 10_100
