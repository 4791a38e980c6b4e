"""The books on a server against the embedded ones where it is tight: exact moments, full pools, last units."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envoy_tokenpools.clock import ManualClock
from envoy_tokenpools.core.account import MAX_REMEMBERED_SHEDS, QUIET, RETRY_WINDOW_MS, Meters
from envoy_tokenpools.core.admission import Lease, Refusal, Settlement
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.ledger import MAX_EXPIRED, InUse
from envoy_tokenpools.core.pool import Limits, Pool, Reclaim, ServiceClass
from envoy_tokenpools.core.refusals import MAX_AWAY, PATIENCE, RETURN_MS
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Tick, first_tick, next_tick
from envoy_tokenpools.core.withheld import MAX_REST_MS
from envoy_tokenpools.store.base import Reply, Store, Survivor
from envoy_tokenpools.store.memory import MemoryStore
from envoy_tokenpools.store.redis.script import MAX_SWEPT
from tests.store.books import redis_store
from tests.support.pools import claim, entitlement, pool

DEDICATED, GUARANTEED, ELASTIC, SPOT, PREEMPTIBLE = ServiceClass

CAPACITY = Resources(tokens_per_second=100, kv_bytes=12, concurrency=8)

MEMBERS = (
    entitlement("dedicated", DEDICATED, Resources(20, 2, 1)),
    entitlement("gold", GUARANTEED, Resources(30, 4, 3)),
    entitlement("elastic", ELASTIC, Resources(20, 3, 2)),
    entitlement("limited", ELASTIC, Resources(10, 1, 1), limits=Limits(15, 4, 3)),
    entitlement("nothing", ELASTIC, Resources(10, 1, 1), limits=Limits(0, 4, 3)),
    replace(entitlement("spot", SPOT), reclaim=Reclaim.EVICT),
    replace(entitlement("batch", PREEMPTIBLE), reclaim=Reclaim.EVICT),
)

NAMES = tuple(one.name for one in MEMBERS)

POOL = "pool"


def small_pool(headroom: float = 0.0) -> Pool:
    """Eight sequences, and buckets that two requests fill."""
    return replace(pool(CAPACITY, *MEMBERS), headroom=headroom, window_ms=2_000)


@dataclass(slots=True)
class Both:
    """
    Both stores, driven alike: whatever is asked, they say the same.

    Attributes:
        clock: their time.
        tick: the latest; claims bring its terms.
        held: leases that were taken and not settled, oldest first.
        taken: all that were ever taken.
        moments: times at which something ends.
    """

    clock: ManualClock
    memory: Store
    redis: Store
    pool: Pool
    tick: Tick
    held: list[str] = field(default_factory=list)
    taken: dict[str, Lease] = field(default_factory=dict)
    moments: list[int] = field(default_factory=list)
    _claims: int = 0

    async def ask(self, call: Callable[[Store], Awaitable[Any]]) -> Any:
        """What both say."""
        one, other = await call(self.memory), await call(self.redis)
        assert one == other
        return one

    async def claim(
        self,
        name: str,
        tokens: int = 1,
        sequences: int = 1,
        kv_bytes: int = 0,
        *,
        output: int = 0,
        fingerprint: int = 0,
        is_retry: bool = False,
        enforce: bool = True,
        ttl_ms: int = 100_000,
    ) -> Reply:
        """A claim of `name`."""
        self._claims += 1
        terms = self.tick.terms.get(name) or first_tick(self.pool, CAPACITY).terms[name]
        wanted = claim(
            f"{self._claims}",
            Cost(tokens, output, kv_bytes, sequences),
            terms,
            self.tick.usable,
            window_ms=self.pool.window_ms,
            ttl_ms=ttl_ms,
            fingerprint=fingerprint,
            is_retry=is_retry,
            enforce=enforce,
        )
        reply = await self.ask(lambda store: store.reserve(POOL, wanted))
        assert isinstance(reply, Reply)
        now_ms = self.clock.now_ms()
        if isinstance(reply.outcome, Lease):
            self.held.append(reply.outcome.lease_id)
            self.taken[reply.outcome.lease_id] = reply.outcome
            self.moments.append(now_ms + ttl_ms)
        else:
            again_ms = reply.outcome.retry_after_ms
            away_ms = again_ms * PATIENCE[0] // PATIENCE[1] + RETURN_MS
            spans = (again_ms, away_ms, 2 * away_ms, RETRY_WINDOW_MS)
            self.moments += [now_ms + span for span in spans]
        return reply

    async def take(self, name: str, *what: int, **rest: Any) -> str:
        """The id of a lease that must be taken."""
        reply = await self.claim(name, *what, **rest)
        assert isinstance(reply.outcome, Lease), reply
        return reply.outcome.lease_id

    async def refuse(self, name: str, *what: int, **rest: Any) -> Refusal:
        """The refusal that a claim must meet."""
        reply = await self.claim(name, *what, **rest)
        assert isinstance(reply.outcome, Refusal), reply
        return reply.outcome

    async def settle(self, lease_id: str, tokens: int = 0) -> Settlement | None:
        """A settlement."""
        if lease_id in self.held:
            self.held.remove(lease_id)
        settled = await self.ask(lambda store: store.settle(POOL, lease_id, tokens))
        self.moments.append(self.clock.now_ms() + MAX_REST_MS)
        assert settled is None or isinstance(settled, Settlement)
        return settled

    async def sweep(self) -> int:
        """How many leases expired."""
        one, other = await self.memory.sweep(POOL), list(await self.redis.sweep(POOL))
        while other and len(other) % MAX_SWEPT == 0 and len(other) < len(one):
            other += await self.redis.sweep(POOL)
        assert sorted(one, key=_by_id) == sorted(other, key=_by_id)
        gone = {lease.lease_id for lease in one}
        self.held = [each for each in self.held if each not in gone]
        return len(one)

    async def restore(self, *leases: Lease, held_ms: int = 5, ttl_ms: int = 5_000) -> None:
        """Hold leases again."""
        survivors = [Survivor(lease, held_ms) for lease in leases]
        await self.ask(lambda store: store.restore(POOL, survivors, ttl_ms))
        self.moments.append(self.clock.now_ms() + ttl_ms)

    async def close_tick(self) -> dict[str, Meters]:
        """What a tick read, of those that did anything; nothing is published."""
        one, other = await self.memory.close_tick(POOL), await self.redis.close_tick(POOL)
        assert one is not None
        assert other is not None
        assert one.elapsed_ms == other.elapsed_ms
        read = {name: each for name, each in one.meters.items() if each != QUIET}
        assert read == {name: each for name, each in other.meters.items() if each != QUIET}
        elapsed_ms = max(1, one.elapsed_ms)
        self.tick = next_tick(self.pool, self.tick, self.tick.usable, one.meters, elapsed_ms)
        return read

    async def publish(
        self, *without: str, usable: Resources = CAPACITY, window_ms: int = 2_000
    ) -> None:
        """Put the latest tick in force, but for some entitlements, and perhaps with another capacity."""
        granted = {n: each for n, each in self.tick.terms.items() if n not in without}
        tick = replace(self.tick, terms=granted, usable=usable)
        self.tick = replace(self.tick, usable=usable)
        await self.ask(lambda store: store.publish(POOL, tick, window_ms))

    async def fill(self, name: str) -> list[str]:
        """Leases of all that the pool has free for `name`."""
        leases = []
        while isinstance((reply := await self.claim(name)).outcome, Lease):
            leases.append(reply.outcome.lease_id)
        return leases

    def wait(self, ms: int) -> None:
        """Let time pass."""
        self.clock.advance(ms)

    async def check(self) -> None:
        """Whatever they keep to themselves shows: what is held, what is left of every bucket, what was metered."""
        one, other = await self.memory.snapshot(POOL), await self.redis.snapshot(POOL)
        assert one.total == other.total
        assert {n: each for n, each in one.accounts.items() if each != InUse()} == other.accounts
        for name in NAMES:
            await self.claim(name, 3, fingerprint=1)
        await self.close_tick()
        self.wait(1)
        for name in NAMES:
            await self.claim(name, 400, 2, 2, fingerprint=2)
        await self.close_tick()


def _by_id(lease: Lease) -> str:
    return lease.lease_id


@asynccontextmanager
async def opened(headroom: float = 0.0, *, is_published: bool = True) -> AsyncIterator[Both]:
    """Both, empty; they are compared once more at the end."""
    clock = ManualClock(1_000_000)
    small = small_pool(headroom)
    both = Both(clock, MemoryStore(clock), redis_store(clock), small, first_tick(small, CAPACITY))
    try:
        if is_published:
            await both.publish()
        yield both
        await both.check()
    finally:
        await both.redis.close()


# Bounds


async def crowd(both: Both, name: str, first: int, count: int) -> None:
    """So many requests of `name`, each of another fingerprint, in a pool that is full."""
    wanted = [
        claim(
            f"crowd-{number}",
            Cost(1, 0, 0, 1),
            both.tick.terms[name],
            CAPACITY,
            fingerprint=number,
        )
        for number in range(first, first + count)
    ]
    one = [await both.memory.reserve(POOL, each) for each in wanted]
    assert one == await asyncio.gather(*(both.redis.reserve(POOL, each) for each in wanted))
    assert all(isinstance(reply.outcome, Refusal) for reply in one)


async def test_a_flood_of_refused_requests_is_remembered_alike() -> None:
    """Up to the bound; the first one of it is new when it comes again, the second one is not."""
    async with opened() as both:
        await both.fill("spot")
        await both.close_tick()
        await crowd(both, "spot", 1, MAX_REMEMBERED_SHEDS + 1)
        await both.close_tick()
        for fingerprint in (2, 3, 1):
            await both.refuse("spot", fingerprint=fingerprint)
        assert (await both.close_tick())["spot"].demanded_tokens == 1


async def test_as_many_that_are_away_are_remembered() -> None:
    """The entitlement is forgotten when all of them have come back, but for those beyond the bound."""
    async with opened() as both:
        leases = await both.fill("spot")
        await crowd(both, "elastic", 1, MAX_AWAY + 1)
        for lease_id in leases[:2]:
            await both.settle(lease_id)
        for fingerprint in range(2, MAX_AWAY + 2):
            await both.refuse("spot")
            await both.settle(await both.take("elastic", fingerprint=fingerprint))
        await both.take("spot")


def lease(number: int) -> Lease:
    """A lease of one sequence, that was taken somewhere else."""
    return Lease(
        lease_id=f"lease-{number:06}",
        entitlement="batch",
        cost=Cost(1, 0, 0, 1),
        within_share=False,
        within_guarantee=False,
        tokens_guaranteed=False,
        pool_ppm=1_000_000,
        admitted_at_ms=0,
        expires_at_ms=0,
        eviction_rank=0,
    )


async def test_as_many_expired_leases_are_remembered() -> None:
    """The oldest one beyond the bound is forgotten, and is not charged when it is settled."""
    async with opened() as both:
        for first in range(0, MAX_EXPIRED + 1, 1_000):
            some = range(first, min(first + 1_000, MAX_EXPIRED + 1))
            await both.restore(*(lease(number) for number in some), ttl_ms=0)
        assert await both.sweep() == MAX_EXPIRED + 1
        assert await both.settle("lease-000000", 5) is None
        assert await both.settle("lease-000001", 5) is not None


@pytest.mark.parametrize(
    ("usable", "evicted"),
    [
        (CAPACITY, range(79, 6, -1)),
        (replace(CAPACITY, kv_bytes=0, concurrency=1_000), range(5, -1, -1)),
    ],
)
async def test_many_are_taken_back_alike(usable: Resources, evicted: Sequence[int]) -> None:
    """More than are looked at at once, also when the first ones would not help."""
    async with opened() as both:
        some = [lease(number) for number in range(80)]
        helps = [replace(each, cost=Cost(1, 0, 1, 1)) for each in some[:6]]
        await both.restore(*helps, *some[6:])
        await both.publish(usable=usable)
        reply = await both.claim("gold")
        assert reply.evicted == tuple(lease(number).lease_id for number in evicted)


# Anything, in a pool that is nearly full

CLAIMS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(NAMES),
        "tokens": st.sampled_from([0, 1, 5, 20, 60, 250]),
        "sequences": st.sampled_from([1, 1, 1, 2, 4]),
        "kv_bytes": st.sampled_from([0, 0, 1, 3]),
    },
    optional={
        "output": st.sampled_from([1, 300]),
        "fingerprint": st.integers(1, 3),
        "is_retry": st.booleans(),
        "enforce": st.sampled_from([True, True, True, False]),
        "ttl_ms": st.sampled_from([0, 500, 3_000]),
    },
)

TICKS = st.fixed_dictionaries(
    {},
    optional={
        "without": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        "window_ms": st.just(1_000),
        "usable": st.sampled_from([Resources.NONE, Resources(50, 6, 4), Resources(75, 9, 6)]),
    },
)

WAITS = st.sampled_from([1, 3, 10, 50, 100, 250, 1_000, 5_000])

STEPS = st.one_of(
    *[st.tuples(st.just("claim"), CLAIMS)] * 5,
    *[st.tuples(st.just("settle"), st.integers(0, 9), st.sampled_from([0, 1, 30, 500]))] * 2,
    st.tuples(st.just("settle again"), st.integers(0, 9), st.sampled_from([0, 30])),
    st.tuples(st.just("wait"), WAITS),
    st.tuples(st.just("wait until"), st.integers(0, 9), st.sampled_from([0, 0, -1, 1])),
    st.tuples(st.just("sweep")),
    st.tuples(st.just("renew"), st.integers(0, 9), WAITS),
    st.tuples(st.just("restore"), st.integers(0, 9), WAITS),
    st.tuples(st.just("close")),
    st.tuples(st.just("publish"), TICKS),
)


async def take_step(both: Both, kind: str, *arguments: Any) -> None:
    """One of `STEPS`, as far as it is possible now."""
    match kind, arguments:
        case "claim", [dict(what)]:
            await both.claim(**what)
        case "settle", [int(n), int(tokens)] if both.held:
            await both.settle(both.held[n % len(both.held)], tokens)
        case "settle again", [int(n), int(tokens)] if both.taken:
            await both.settle(sorted(both.taken)[n % len(both.taken)], tokens)
        case "wait", [int(ms)]:
            both.wait(ms)
        case "wait until", [int(n), int(delta)]:
            now_ms = both.clock.now_ms()
            to_come = sorted({each for each in both.moments if each + delta > now_ms})
            if to_come:
                both.wait(to_come[n % len(to_come)] + delta - now_ms)
        case "sweep", []:
            await both.sweep()
        case "renew", [int(n), int(ms)] if both.held:
            lease_id = both.held[n % len(both.held)]
            await both.ask(lambda store: store.renew(POOL, [lease_id, "unknown"], ms))
        case "restore", [int(n), int(ms)] if both.taken:
            lease = both.taken[sorted(both.taken)[n % len(both.taken)]]
            await both.restore(lease, held_ms=ms, ttl_ms=ms)
            both.held = [*(each for each in both.held if each != lease.lease_id), lease.lease_id]
        case "close", []:
            await both.close_tick()
        case "publish", [dict(how)]:
            await both.close_tick()
            without: Sequence[str] = how.pop("without", ())
            await both.publish(*without, **how)
        case _:
            pass  # nothing that it could be done to


@settings(max_examples=120)
@given(
    steps=st.lists(STEPS, min_size=5, max_size=50),
    headroom=st.sampled_from([0.0, 0.4]),
    is_published=st.booleans(),
)
def test_in_a_tight_pool_both_say_the_same(
    steps: Sequence[tuple[Any, ...]], headroom: float, *, is_published: bool
) -> None:
    """Whatever is done, also at the very moment in which something ends."""

    async def run() -> None:
        async with opened(headroom, is_published=is_published) as both:
            for kind, *arguments in steps:
                await take_step(both, kind, *arguments)

    asyncio.run(run())
