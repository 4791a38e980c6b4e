"""Several replicas on one server: one pool, one leader, nothing counted twice, and nothing lost for good."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from envoy_tokenpools.clock import ManualClock
from envoy_tokenpools.config import parse_address
from envoy_tokenpools.core.account import Meters
from envoy_tokenpools.core.admission import Claim, Lease, Reason, Refusal, Resource, Terms
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import Limits
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Standing, Tick
from envoy_tokenpools.errors import StoreError
from envoy_tokenpools.store.base import Opening, Renewal, Reply, Survivor
from envoy_tokenpools.store.redis import wire
from envoy_tokenpools.store.redis.script import (
    KEY_NAMES,
    LEAD_MS,
    MAX_STEP_MS,
    OWNER_TTL_MS,
    channel,
    pool_keys,
)
from envoy_tokenpools.store.redis.server import RedisServer
from envoy_tokenpools.store.redis.store import RedisStore
from tests.support.pools import amount, claim, cost, terms
from tests.support.redis_server import RedisProcess, redis_process
from tests.support.shared_redis import shared_server

POOL = "pool"

USABLE = amount(1_000_000, sequences=20, kv_bytes=20_000)

PROMISED = amount(100_000, sequences=8, kv_bytes=8_000)

GOLD = terms("gold", guarantee=PROMISED, share=PROMISED)

SPOT = replace(terms("spot"), rank=1, evictable=True)

BATCH = replace(terms("batch"), evictable=True)

WITHIN_S = 10.0

_PREFIXES = itertools.count(1)


@dataclass(slots=True)
class Heard:
    """What a replica was told by its store."""

    evicted: list[tuple[str, str]] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def evict(self, pool: str, lease_id: str) -> None:
        """See `Listener.evict`."""
        self.evicted.append((pool, lease_id))

    def lost(self, pool: str) -> None:
        """See `Listener.lost`."""
        self.losses.append(pool)


class Recorder(RedisServer):
    """A server that remembers what it was asked."""

    def __init__(self, url: str) -> None:
        super().__init__(parse_address(url))
        self.asked: list[list[Any]] = []

    async def call(self, keys: Sequence[str], arguments: Sequence[str | bytes]) -> object:
        """See `Server.call`."""
        *_, operations = arguments
        assert isinstance(operations, bytes)
        self.asked += msgspec.msgpack.decode(operations)
        return await super().call(keys, arguments)


@dataclass(slots=True)
class Replica:
    """
    One of those who share the pool.

    Attributes:
        store: its store.
        server: what that asks.
        heard: what it was told.
        tick: the latest that it knows.
    """

    store: RedisStore
    server: Recorder
    heard: Heard
    tick: Tick = field(default_factory=lambda: tick_of(0))

    async def open(self, fingerprint: str = "same") -> Opening:
        """Load a configuration."""
        opening = await self.store.open(POOL, fingerprint)
        self.tick = opening.tick or self.tick
        return opening

    async def publish(self, tick: Tick, window_ms: int = 1_000) -> bool:
        """Put a tick in force."""
        self.tick = tick
        return await self.store.publish(POOL, tick, window_ms)

    async def look(self) -> bool:
        """Adopt what is new; whether the books were lost."""
        sight = await self.store.look(POOL, self.tick)
        self.tick = sight.tick or self.tick
        return sight.is_lost

    async def leads(self) -> bool:
        """Whether it gets the reading of a tick."""
        return await self.store.close_tick(POOL) is not None

    async def take(self, lease_id: str, whose: Terms, what: Cost | None = None) -> Reply:
        """Claim what must be admitted."""
        reply = await self.ask(lease_id, whose, what)
        assert isinstance(reply.outcome, Lease), reply
        return reply

    async def ask(self, lease_id: str, whose: Terms, what: Cost | None = None) -> Reply:
        """Claim one sequence, unless told otherwise."""
        return await self.store.reserve(POOL, wanted(lease_id, whose, what))

    async def in_use(self) -> InUse:
        """What the whole pool holds."""
        return (await self.store.snapshot(POOL)).total


def wanted(lease_id: str, whose: Terms, what: Cost | None = None) -> Claim:
    """A claim of a twentieth of the pool."""
    return claim(lease_id, what or cost(10, 1, 1_000), whose, USABLE)


def tick_of(number: int, *granted: Terms, usable: Resources = USABLE) -> Tick:
    """A tick with these terms."""
    by_name = {one.entitlement: one for one in granted}
    standings = {name: Standing(weight=one.weight) for name, one in by_name.items()}
    return Tick(number, usable, standings, by_name, degraded=False)


class Group:
    """Replicas on one server, under a prefix of their own, on a time that moves only when told."""

    def __init__(self, url: str) -> None:
        self.prefix = f"group-{next(_PREFIXES)}"
        self.url = f"{url}?prefix={self.prefix}"
        self.clock = ManualClock(1_000_000)
        self.raw = redis.Redis.from_url(url)
        self.replicas: list[Replica] = []

    def join(self, owner: str, *, is_timed_by_server: bool = False) -> Replica:
        """One more."""
        server, heard = Recorder(self.url), Heard()
        clock = None if is_timed_by_server else self.clock
        store = RedisStore(server, owner=owner, prefix=self.prefix, deadline_ms=5_000, clock=clock)
        store.listen(heard)
        self.replicas.append(Replica(store, server, heard))
        return self.replicas[-1]

    async def open(self, *owners: str, tick: Tick | None = None) -> list[Replica]:
        """Replicas of one configuration, of whom the first leads."""
        joined = [self.join(owner) for owner in owners]
        assert (await joined[0].open()).leads
        assert await joined[0].publish(tick or tick_of(1, GOLD, SPOT, BATCH))
        for other in joined[1:]:
            assert not (await other.open()).leads
        return joined

    def key(self, name: str, pool: str = POOL) -> str:
        """One of the pool's keys."""
        return pool_keys(self.prefix, pool)[KEY_NAMES.index(name)]

    def keys(self) -> set[str]:
        """All of ours that exist."""
        return {key.decode() for key in self.raw.scan_iter(f"{self.prefix}*", 1_000)}

    def dump(self) -> dict[str, object]:
        """All that is stored."""
        return {key: self.raw.dump(key) for key in self.keys()}

    def page(self) -> dict[str, Any]:
        """The pool's page."""
        stored = self.raw.get(self.key("pool"))
        assert isinstance(stored, bytes)
        return msgspec.msgpack.decode(stored, type=dict[str, Any])

    async def hears(self, *pools: str) -> None:
        """Until every replica is subscribed to the channels of these pools."""
        names = [channel(self.prefix, pool) for pool in pools]

        def is_so() -> bool:
            counts = self.raw.pubsub_numsub(*names)
            return all(count == len(self.replicas) for _, count in counts)

        await until(is_so)

    async def close(self) -> None:
        """All leave."""
        for replica in self.replicas:
            await replica.store.close()
        self.raw.close()


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for another process."""
    async with asyncio.timeout(WITHIN_S):
        while not is_so():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def grouped(url: str) -> AsyncIterator[Group]:
    """A group until the end of the block."""
    group = Group(url)
    try:
        yield group
    finally:
        await group.close()


@pytest.fixture
async def group() -> AsyncIterator[Group]:
    """Nobody yet, on the server that all tests share."""
    async with grouped(shared_server()) as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[RedisProcess]:
    """A server that may be harmed."""
    with redis_process() as started:
        yield started


@pytest.fixture
async def alone(server: RedisProcess) -> AsyncIterator[Group]:
    """Nobody yet, on a server of their own."""
    async with grouped(server.url) as opened:
        yield opened


# One pool


@pytest.mark.parametrize("is_timed_by_server", [False, True])
async def test_a_pool_is_shared_exactly(group: Group, *, is_timed_by_server: bool) -> None:
    """Three replicas claim three times what there is, at the same time: all of it is given, and no more."""
    three = [group.join(name, is_timed_by_server=is_timed_by_server) for name in "abc"]
    replies = await asyncio.gather(
        *(three[n % 3].ask(f"lease-{n}", SPOT) for n in range(3 * USABLE.concurrency))
    )
    taken = [reply.outcome for reply in replies if isinstance(reply.outcome, Lease)]
    assert len(taken) == USABLE.concurrency
    views = [await each.store.snapshot(POOL) for each in three]
    assert views[0] == views[1] == views[2]
    assert views[0].total == InUse(20, 20, 200, 20_000)
    settled = await asyncio.gather(
        *(three[n % 3].store.settle(POOL, each.lease_id, 10) for n, each in enumerate(taken))
    )
    assert None not in settled
    assert await three[0].in_use() == InUse()


async def test_a_lease_is_anybodys_to_end(group: Group) -> None:
    """A replica settles or renews what another has taken, once."""
    one, other = await group.open("a", "b")
    await one.take("1", SPOT)
    await one.take("2", SPOT)
    assert await other.store.renew(POOL, ["1", "2", "3"], 90_000) == Renewal(missing=("3",))
    settlement = await other.store.settle(POOL, "1", 4)
    assert settlement is not None
    assert (settlement.charged_tokens, settlement.lease.entitlement) == (4, "spot")
    assert await one.store.settle(POOL, "1", 4) is None
    group.clock.advance(89_999)
    assert await other.store.sweep(POOL) == ()
    group.clock.advance(1)
    assert [lease.lease_id for lease in await other.store.sweep(POOL)] == ["2"]
    assert await one.store.sweep(POOL) == ()


FREE = st.integers(0, 1 << 40)

LEASES = st.builds(
    Lease,
    lease_id=st.just(""),
    entitlement=st.text(),
    cost=st.builds(Cost, FREE, FREE, FREE | st.just(1 << 49), FREE),
    within_share=st.booleans(),
    within_guarantee=st.booleans(),
    tokens_guaranteed=st.booleans(),
    pool_ppm=st.integers(0, 1_000_000),
    admitted_at_ms=st.just(0),
    expires_at_ms=st.just(0),
    eviction_rank=st.none() | st.integers(0, 4),
    shadowed=st.none()
    | st.builds(
        Refusal, st.sampled_from(Reason), st.sampled_from(Resource), FREE, FREE, st.just(1 << 53)
    ),
)


@settings(max_examples=25)
@given(
    st.dictionaries(st.text(min_size=1), st.tuples(LEASES, st.integers(0, 1_000_000)), max_size=8)
)
def test_a_lease_is_told_as_it_was_taken(taken: Mapping[str, tuple[Lease, int]]) -> None:
    """By the books, to whoever settles it: whatever it is called, and however much it holds."""

    async def run() -> None:
        async with grouped(shared_server()) as group:
            one, other = group.join("a"), group.join("b")
            now_ms = group.clock.now_ms()
            leases = [
                replace(
                    lease,
                    lease_id=lease_id,
                    admitted_at_ms=now_ms - held_ms,
                    expires_at_ms=now_ms + 5_000,
                )
                for lease_id, (lease, held_ms) in taken.items()
            ]
            survivors = [Survivor(lease, now_ms - lease.admitted_at_ms) for lease in leases]
            await one.store.restore(POOL, survivors, 5_000)
            for lease in leases:
                settlement = await other.store.settle(POOL, lease.lease_id, 0)
                assert settlement is not None
                assert settlement.lease == lease
            assert await one.in_use() == InUse()

    asyncio.run(run())


# Taken back


async def filled(group: Group) -> list[Replica]:
    """Two replicas, each with half of a full pool; all hear of evictions."""
    one, other = await group.open("r1", "r10")
    for number in range(USABLE.concurrency):
        await (one, other)[number % 2].take(f"{number}", BATCH)
    await group.hears(POOL)
    return [one, other]


async def test_a_victim_elsewhere_is_told_to_its_owner(group: Group) -> None:
    """The reply names it, its owner hears of it at once, and sees it at every look until it has ended."""
    one, other = await filled(group)
    assert (await one.take("g", GOLD)).evicted == ("19",)
    await until(lambda: (POOL, "19") in other.heard.evicted)
    for _ in range(2):
        assert (await other.store.look(POOL, other.tick)).evicted == ("19",)
        assert (await one.store.look(POOL, one.tick)).evicted == ()
    await other.store.settle(POOL, "19", 1)
    assert (await other.store.look(POOL, other.tick)).evicted == ()


async def test_a_renewal_says_what_is_to_be_ended(group: Group) -> None:
    """Whoever asks; it lives on until its owner has ended it."""
    one, other = await filled(group)
    await one.take("g", GOLD)
    for each in (one, other):
        assert await each.store.renew(POOL, ["18", "19"], 60_000) == Renewal(evicted=("19",))
    await other.store.settle(POOL, "19", 1)
    assert await other.store.renew(POOL, ["18", "19"], 60_000) == Renewal(missing=("19",))


async def test_what_is_ones_own_is_not_told_to_the_others(group: Group) -> None:
    """The reply is enough; on the channel there are only leases of others, all of a claim in one message."""
    one, other = await filled(group)
    assert (await other.take("g0", GOLD)).evicted == ("19",)
    assert (await one.take("g1", GOLD, cost(1, 4, 4_000))).evicted == ("18", "17", "16", "15")
    await until(lambda: len(one.heard.evicted) == 2)
    assert one.heard.evicted == [(POOL, "17"), (POOL, "15")]
    assert other.heard.evicted == one.heard.evicted


async def test_pools_have_channels_of_their_own(group: Group) -> None:
    """A replica hears of all pools that it has opened, also of the last one, each under its name."""
    one, other = await group.open("a", "b")
    second = "pool {2}"
    for each in (one, other):
        await each.store.open(second, "same")
    await group.hears(POOL, second)
    for pool in (POOL, second):
        for number in range(USABLE.concurrency):
            await other.store.reserve(pool, wanted(f"{pool}-{number}", BATCH))
        await one.store.reserve(pool, wanted(f"g-{pool}", GOLD))
    await until(lambda: len(other.heard.evicted) == 2)
    assert other.heard.evicted == [(pool, f"{pool}-19") for pool in (POOL, second)]


async def test_what_others_say_on_the_channel_changes_nothing(group: Group) -> None:
    """Whatever it is; the next eviction is heard."""
    one, other = await filled(group)
    for noise in (b"", b"\xc1", b"\x91" * 9_999, b"\x91\xa1\xff", msgspec.msgpack.encode([1])):
        group.raw.publish(channel(group.prefix, POOL), noise)
    await one.take("g", GOLD)
    await until(lambda: (POOL, "19") in other.heard.evicted)


async def test_whoever_may_not_publish_may_claim(server: RedisProcess, alone: Group) -> None:
    """A user without the channel: the owner sees the victim when it looks."""
    server.ask("ACL", "SETUSER", "default", "resetchannels")
    one, other = await alone.open("a", "b")
    for number in range(USABLE.concurrency):
        await other.take(f"{number}", BATCH)
    assert (await one.take("g", GOLD)).evicted == ("19",)
    assert (await other.store.look(POOL, other.tick)).evicted == ("19",)


# Who leads


async def test_one_leads_and_the_others_join(group: Group) -> None:
    """The first one; the others find its tick in force, and get no reading."""
    one = group.join("a")
    assert await one.open() == Opening(None, leads=True)
    tick = tick_of(1, GOLD, SPOT)
    assert await one.publish(tick)
    others = [group.join(name) for name in "bc"]
    for each in others:
        assert await each.open() == Opening(tick, leads=False)
    for _ in range(3):
        group.clock.advance(1_000)
        assert [await each.leads() for each in (*others, one)] == [False, False, True]


async def test_a_tick_is_read_once_wherever_it_was_metered(group: Group) -> None:
    """The leader reads what all of them did; too young a tick is nobody's."""
    one, other = await group.open("a", "b")
    await one.take("1", SPOT, cost(100))
    await other.take("2", SPOT, cost(50))
    await other.store.settle(POOL, "1", 70)
    group.clock.advance(999)
    assert await one.store.close_tick(POOL, 1_000) is None
    group.clock.advance(1)
    assert await other.store.close_tick(POOL, 1_000) is None
    reading = await one.store.close_tick(POOL, 1_000)
    assert reading is not None
    assert reading.elapsed_ms == 1_000
    assert reading.meters["spot"] == Meters(
        *(120, 120, 0, 0, 0), peak_concurrency=2, peak_kv_bytes=0, sequence_ms=1_000, kv_byte_ms=0
    )
    assert set(reading.meters) == {"spot"}


@pytest.mark.parametrize("sign", ["look", "close_tick"])
async def test_whoever_gives_no_sign_of_life_is_replaced(group: Group, sign: str) -> None:
    """After its time, counted from the last look or tick, by whoever asks first."""
    one, two, three = await group.open("a", "b", "c")
    for _ in range(3):
        group.clock.advance(LEAD_MS - 1)
        assert not await two.leads()
        assert not await three.leads()
        assert not await (one.look() if sign == "look" else three.leads())
        if sign == "close_tick":
            assert await one.leads()
    group.clock.advance(LEAD_MS)
    assert await two.leads()
    assert not await three.leads()
    assert not await one.leads()


async def test_a_look_of_another_is_no_sign_of_the_leaders_life(group: Group) -> None:
    """However often it looks."""
    one, two = await group.open("a", "b")
    for _ in range(LEAD_MS // 500):
        group.clock.advance(500)
        await two.look()
    assert await two.leads()
    assert not await one.leads()


async def test_a_leader_that_was_replaced_changes_nothing(group: Group) -> None:
    """What it has computed meanwhile is refused, in whatever order it happens; later it joins, and may lead again."""
    one, two = await group.open("a", "b")
    assert await one.leads()
    group.clock.advance(LEAD_MS)
    assert await two.leads()
    before = group.dump()
    late = tick_of(2, replace(GOLD, weight=9.0), SPOT)
    assert not await one.publish(late)
    after = group.dump()
    volatile = {group.key("pool"), group.key("replies")}
    assert {k: v for k, v in after.items() if k not in volatile} == {
        k: v for k, v in before.items() if k not in volatile
    }
    in_force = two.tick
    assert not await two.look()
    assert two.tick == in_force
    assert not await one.look()
    assert one.tick == in_force
    assert not await one.leads()
    group.clock.advance(LEAD_MS)
    assert await one.leads()
    assert await one.publish(late)
    assert not await two.publish(tick_of(3, GOLD))
    await two.look()
    assert two.tick == late


async def test_a_fence_of_an_earlier_time_is_refused(group: Group) -> None:
    """A publication that was held up until its author leads for the second time is still the first one's."""
    one, two = await group.open("a", "b")
    first = one.store._pools[POOL].fence
    for each in (two, one):
        group.clock.advance(LEAD_MS)
        assert await each.leads()
    held_up = replace(one.store._pools[POOL], fence=first)
    one.store._pools[POOL] = held_up
    assert not await one.publish(tick_of(2, SPOT))
    await two.look()
    assert set(two.tick.terms) == {"gold", "spot", "batch"}


async def test_the_configuration_that_was_loaded_last_leads(group: Group) -> None:
    """It finds what is in force, replaces it at once, and the replicas of the old one only follow."""
    one, two = await group.open("a", "b")
    first = one.tick
    three = group.join("c")
    assert await three.open("new") == Opening(first, leads=True)
    assert not await one.publish(tick_of(2, GOLD))
    assert not await one.leads()
    second = tick_of(1, GOLD)
    assert await three.publish(second)
    for each in (one, two):
        assert not await each.look()
        assert each.tick == second
    assert await three.leads()
    four = group.join("d")
    assert await four.open("new") == Opening(second, leads=False)


async def test_an_old_configuration_takes_over_last(group: Group) -> None:
    """A replica of the new one does after the usual time; one of the old one waits twice as long."""
    one, _ = await group.open("a", "b")
    three = group.join("c")
    await three.open("new")
    await three.publish(tick_of(1, GOLD))
    four = group.join("d")
    await four.open("new")
    group.clock.advance(LEAD_MS)
    assert not await one.leads()
    assert await four.leads()
    group.clock.advance(2 * LEAD_MS - 1)
    assert not await one.leads()
    group.clock.advance(1)
    assert await one.leads()


async def test_a_configuration_that_comes_back_leads_again(group: Group) -> None:
    """As at a rollback: the replica that loads the old one again is the last one."""
    one, _ = await group.open("a", "b")
    three = group.join("c")
    await three.open("new")
    await three.publish(tick_of(1, GOLD))
    assert (await one.open("same")).leads
    assert not await three.leads()
    assert await one.publish(tick_of(1, GOLD, SPOT))
    assert await one.leads()


async def test_two_that_begin_at_once_end_up_with_one_tick(group: Group) -> None:
    """Both find nothing; the second one leads, and the first one's tick is not put in force."""
    one, two = group.join("a"), group.join("b")
    assert [(await each.open()).leads for each in (one, two)] == [True, True]
    assert await one.publish(tick_of(1, GOLD)) is False
    assert await two.publish(tick_of(1, SPOT))
    await one.look()
    assert one.tick == two.tick
    assert not await one.leads()
    assert await two.leads()


async def test_whoever_leaves_need_not_be_waited_for(group: Group) -> None:
    """A leader that ends is replaced at once, and counts no more; its leases stay."""
    one, two = await group.open("a", "b")
    await one.take("1", SPOT)
    assert (await two.store.look(POOL, two.tick)).replicas == 2
    await one.store.close()
    assert (await two.store.look(POOL, two.tick)).replicas == 1
    assert await two.leads()
    assert await two.in_use() == InUse(1, 1, 10, 1_000)
    assert not group.raw.hexists(group.key("replies"), "a")


# What is in force


async def test_only_what_has_changed_is_published(group: Group) -> None:
    """A standing without its terms where those are as before; nothing of those for whom nothing has changed."""
    names = [f"e{number}" for number in range(20)]
    first = tick_of(1, *map(terms, names))
    one, two = await group.open("a", "b", tick=first)
    more = replace(first.terms["e1"], weight=2.0)
    second = Tick(
        number=2,
        usable=USABLE,
        standings={**first.standings, "e0": Standing(debt=0.5), "e1": Standing(weight=2.0)},
        terms={**first.terms, "e1": more},
        degraded=True,
    )
    one.server.asked.clear()
    two.server.asked.clear()
    await one.publish(second)
    ((*_, entries),) = one.server.asked
    assert [(name, bool(offered)) for name, _, offered in entries] == [("e0", False), ("e1", True)]
    assert not await two.look()
    assert two.tick == second
    sight = await two.store.look(POOL, two.tick)
    assert sight.tick is None


async def test_a_tick_in_which_nothing_changed_is_published(group: Group) -> None:
    """Its number is new, and known everywhere."""
    one, two = await group.open("a", "b")
    again = replace(one.tick, number=2)
    assert await one.publish(again)
    await two.look()
    assert two.tick == again


async def test_an_entitlement_that_is_removed_is_gone_everywhere(group: Group) -> None:
    """What it withheld is free, what it holds is held, and who joins or looks does not know of it."""
    keeps = replace(GOLD, withheld_ppm=1_000_000)
    one, two = await group.open("a", "b", tick=tick_of(1, keeps, SPOT))
    await two.take("gold", keeps)
    most = USABLE.concurrency - PROMISED.concurrency
    assert isinstance((await one.ask("no", SPOT, cost(1, most + 1))).outcome, Refusal)
    without = tick_of(2, SPOT)
    assert await one.publish(without)
    await one.take("yes", SPOT, cost(1, USABLE.concurrency - 1))
    assert not await two.look()
    assert two.tick == without
    three = group.join("c")
    assert await three.open() == Opening(without, leads=False)
    assert (await one.store.snapshot(POOL)).accounts["gold"].in_flight == 1
    assert await three.store.settle(POOL, "gold", 5) is not None


FINITE = st.floats(allow_nan=False, allow_infinity=False, width=64)

AMOUNTS = st.builds(Resources, FREE, FREE, FREE)

LIMIT = st.none() | FREE

NAMES = ("a", "b {c}", "ünï", "d" * 63)

STEPS = st.tuples(
    st.dictionaries(
        st.sampled_from(NAMES),
        st.tuples(
            st.builds(Standing, FINITE, FINITE, FINITE, AMOUNTS),
            st.none()
            | st.builds(
                Terms,
                entitlement=st.just(""),
                weight=FINITE,
                guarantee=AMOUNTS,
                share=AMOUNTS,
                limits=st.builds(Limits, LIMIT, LIMIT, LIMIT),
                withheld_ppm=st.integers(0, 1_000_000),
                rank=st.integers(0, 4),
                evictable=st.booleans(),
                reach=st.none() | AMOUNTS,
            ),
        ),
        max_size=3,
    ),
    st.frozensets(st.sampled_from(NAMES), max_size=1),
    AMOUNTS,
    st.sampled_from([1_000, 1_000, 1_000, 2_000]),
    st.frozensets(st.integers(0, 2)),
    st.booleans(),
)
"""Who has which new standing and terms, who is removed, what is usable, the window, who looks, and who leads next."""


def following(before: Tick, step: tuple[Any, ...]) -> Tick:
    """The tick after `before`; what does not change are the same objects."""
    changes, gone, usable, *_ = step
    standings, granted = dict(before.standings), dict(before.terms)
    for name, (standing, some) in changes.items():
        standings[name] = standing
        granted[name] = granted.get(name, terms(name))
        if some is not None:
            granted[name] = replace(some, entitlement=name)
    for name in gone:
        standings.pop(name, None)
        granted.pop(name, None)
    degraded = not before.degraded
    return Tick(before.number + 1, usable, standings, granted, degraded)


@settings(max_examples=25)
@given(st.lists(STEPS, max_size=12))
def test_whoever_looks_knows_exactly_the_tick_in_force(steps: Sequence[tuple[Any, ...]]) -> None:
    """To the last bit, whatever changed since it looked last, and whoever computed it; the script admits by it."""

    async def run() -> None:
        async with grouped(shared_server()) as group:
            three = await group.open(*"abc", tick=tick_of(1, *map(terms, NAMES)))
            leader = three[0]
            for step in steps:
                *_, window_ms, lookers, is_replaced = step
                if is_replaced:
                    group.clock.advance(LEAD_MS)
                    leader = three[step[2].concurrency % 3]
                    assert await leader.leads()
                    await leader.look()
                tick = following(leader.tick, step)
                assert await leader.publish(tick, window_ms)
                for number in lookers:
                    await three[number].look()
                    assert three[number].tick == tick
            for each in (*three, group.join("d")):
                opening = await each.open()
                assert (opening.tick, opening.leads) == (leader.tick, False)

    asyncio.run(run())


# Who is there


async def test_replicas_are_counted_and_the_dead_forgotten(group: Group) -> None:
    """Whoever has looked lately counts; of those who have not, nothing is remembered."""
    one, two, three = await group.open("a", "b", "c")
    assert (await one.store.look(POOL, one.tick)).replicas == 3
    group.clock.advance(OWNER_TTL_MS - 1)
    await two.look()
    assert (await one.store.look(POOL, one.tick)).replicas == 3
    group.clock.advance(1)
    assert (await one.store.look(POOL, one.tick)).replicas == 2
    assert set(group.raw.hkeys(group.key("replies"))) == {b"a", b"b"}
    assert (await three.store.look(POOL, three.tick)).replicas == 3


# Books that were lost


async def look_after(replica: Replica, held: Mapping[str, Lease]) -> None:
    """What a replica does in every round."""
    with contextlib.suppress(StoreError):
        await replica.store.sweep(POOL)
        if await replica.look():
            opening = await replica.open()
            if opening.leads or opening.tick is None:
                await replica.publish(replica.tick)
            survivors = [Survivor(lease, 5) for lease in held.values()]
            await replica.store.restore(POOL, survivors, 60_000)


async def test_lost_books_are_noticed_once_by_each(alone: Group) -> None:
    """At the next look; the listener hears of it with the first answer."""
    one, two = await alone.open("a", "b")
    alone.raw.flushall()
    await one.in_use()
    assert one.heard.losses == [POOL]
    assert [await one.look(), await one.look()] == [True, False]
    await one.publish(one.tick)
    assert two.heard.losses == []
    assert [await two.look(), await two.look()] == [True, False]
    assert one.heard.losses == two.heard.losses == [POOL]


async def test_a_loss_is_told_though_the_books_were_opened_meanwhile(alone: Group) -> None:
    """As at a reload right after it: what the replica holds is still not in them."""
    one, two = await alone.open("a", "b")
    alone.raw.flushall()
    for each in (one, two):
        await each.open("new")
        assert [await each.look(), await each.look()] == [True, False]


async def test_restored_leases_are_held_and_charged_once(alone: Group) -> None:
    """By whoever holds them, however often, also those that are settled or evicted meanwhile."""
    limited = replace(SPOT, limits=Limits(tokens_per_second=1_000))
    one, two = await alone.open("a", "b", tick=tick_of(1, GOLD, limited))
    leases: list[dict[str, Lease]] = [{}, {}]
    for number in range(6):
        reply = await (one, two)[number % 2].take(f"{number}", limited, cost(100, 1, 1_000))
        assert isinstance(reply.outcome, Lease)
        leases[number % 2][f"{number}"] = reply.outcome
    alone.raw.flushall()
    for _ in range(2):
        await look_after(one, leases[0])
        await look_after(two, leases[1])
    for each, held in zip((one, two), leases, strict=True):
        survivors = [Survivor(lease, 5) for lease in held.values()]
        await each.store.restore(POOL, survivors, 60_000)
    assert await one.in_use() == InUse(6, 6, 600, 6_000)
    reply = await two.take("more", limited, cost(1, 1, 1_000))
    assert reply.balance.remaining_tokens == 1_000 - 601
    for number in range(6):
        settlement = await (two, one)[number % 2].store.settle(POOL, f"{number}", 50)
        assert settlement is not None
        assert settlement.charged_tokens == 50
    reply = await two.ask("last", limited, cost(1, 1, 1_000))
    assert reply.balance.remaining_tokens == 1_000 - 302
    assert await one.in_use() == InUse(2, 2, 2, 2_000)


async def test_a_tick_of_lost_books_is_not_taken_for_one_of_the_new_ones(alone: Group) -> None:
    """Though their versions are equal: the books were begun anew by somebody with another tick."""
    one, two = await alone.open("a", "b")
    alone.raw.flushall()
    assert await one.look()
    other = tick_of(7, GOLD, replace(SPOT, weight=3.0), BATCH)
    assert (await one.open()).leads
    assert await one.publish(other)
    assert await two.look()
    assert await two.open() == Opening(other, leads=False)
    assert await one.publish(replace(other, number=8))
    await two.look()
    assert two.tick == replace(other, number=8)


async def rich(group: Group) -> tuple[Replica, dict[str, Lease]]:
    """A replica of a pool that has something under every key, and the leases that it holds."""
    full = replace(GOLD, evictable=False)
    one, two = await group.open("a", "b", tick=tick_of(1, full, SPOT, BATCH))
    held: dict[str, Lease] = {}

    async def take(name: str, whose: Terms) -> None:
        outcome = (await one.take(name, whose)).outcome
        assert isinstance(outcome, Lease)
        held[name] = outcome

    await take("rests", GOLD)
    for number in range(4):
        await take(f"batch-{number}", BATCH)
    await two.store.reserve(POOL, claim("expires", cost(1), SPOT, USABLE, ttl_ms=1))
    group.clock.advance(60)
    assert len(await one.store.sweep(POOL)) == 1
    while isinstance((await one.ask(f"spot-{len(held)}", SPOT)).outcome, Lease):
        lease_id = f"spot-{len(held)}"
        held[lease_id] = (await one.take(lease_id, SPOT)).outcome  # type: ignore[assignment]
    refused = replace(wanted("away", SPOT), fingerprint=5)
    assert isinstance((await one.store.reserve(POOL, refused)).outcome, Refusal)
    await take("gold", GOLD)
    await one.store.settle(POOL, "rests", 5)
    del held["rests"]
    await two.look()
    return one, held


async def test_a_rich_pool_has_all_keys(group: Group) -> None:
    """So that what follows is about all of them."""
    await rich(group)
    assert group.keys() == set(pool_keys(group.prefix, POOL))


def drop(name: str) -> Callable[[Group], object]:
    """A key is gone, as when a server has too little memory."""
    return lambda group: group.raw.delete(group.key(name))


DAMAGES: dict[str, Callable[[Group], object]] = {
    **{name: drop(name) for name in KEY_NAMES},
    "a lease": lambda group: group.raw.hdel(group.key("leases"), "batch-1"),
    "an account": lambda group: group.raw.hdel(group.key("accounts"), "batch"),
    "an expiry": lambda group: group.raw.zrem(group.key("expiry"), "batch-1"),
    "the oldest": lambda group: group.raw.zpopmin(group.key("taken")),
    "one that was held": lambda group: group.raw.zpopmin(group.key("held")),
    "one that is being freed": lambda group: group.raw.zpopmin(group.key("freeing")),
    "one that may be evicted": lambda group: group.raw.zpopmax(group.key("evictable")),
    "one that is active": lambda group: group.raw.srem(group.key("active"), "batch"),
    "a standing": lambda group: group.raw.hdel(group.key("standings"), "batch"),
    "a version": lambda group: group.raw.zrem(group.key("versions"), "batch"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
async def test_damaged_books_are_opened_anew(
    group: Group, damage: Callable[[Group], object]
) -> None:
    """Whatever is missing: after two rounds all is held, shown, metered, evictable, and settled as ever."""
    one, held = await rich(group)
    damage(group)
    for _ in range(2):
        await look_after(one, held)
    count = len(held)
    view = await one.store.snapshot(POOL)
    assert view.total.in_flight == count
    assert {name: each.in_flight for name, each in view.accounts.items() if each.in_flight} == {
        "gold": 1,
        "batch": 4,
        "spot": count - 5,
    }
    await one.store.close_tick(POOL)
    group.clock.advance(1_000)
    reading = await one.store.close_tick(POOL)
    assert reading is not None
    assert reading.meters["batch"].sequence_ms == 4_000
    for number in range(4):
        evicted = (await one.take(f"more-{number}", GOLD)).evicted
        assert all(name in held for name in evicted)
    three = group.join("c")
    assert (await three.open()).tick == one.tick
    freeing = set((await one.store.look(POOL, one.tick)).evicted)
    assert len(freeing) >= 4
    assert {f"batch-{n}" for n in range(4)} <= freeing
    for lease_id in (*held, *(f"more-{number}" for number in range(4))):
        assert await three.store.settle(POOL, lease_id, 1) is not None
    assert await one.in_use() == InUse()
    assert group.page()["freeing_leases"] == 0
    group.clock.advance(60_001)
    assert await one.store.sweep(POOL) == ()
    assert not await one.look()


async def test_scripts_that_are_flushed_are_sent_again(alone: Group) -> None:
    """Nobody notices, and nothing is done twice."""
    one, two = await alone.open("a", "b")
    for number in range(5):
        alone.raw.script_flush()
        await (one, two)[number % 2].take(f"{number}", SPOT)
    assert await one.in_use() == InUse(5, 5, 50, 5_000)
    assert one.heard.losses == []


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        (
            ("CONFIG", "SET", "min-replicas-to-write", "1"),
            ("CONFIG", "SET", "min-replicas-to-write", "0"),
        ),
    ],
    ids=["is a replica", "is out of memory", "has too few replicas"],
)
async def test_a_server_that_takes_nothing_loses_no_settlement(
    server: RedisProcess, alone: Group, begin: Sequence[str], end: Sequence[str]
) -> None:
    """It says so from inside the script, but that is not at fault: what is kept is done when it takes it again."""
    one = alone.join("a")
    await one.take("1", SPOT)
    server.ask(*begin)
    settling = asyncio.ensure_future(one.store.settle(POOL, "1", 5))
    line = one.store._pools[POOL].line
    await until(lambda: settling.done() or line.is_troubled)
    server.ask(*end)
    settlement = await settling
    assert settlement is not None
    assert settlement.charged_tokens == 5
    assert await one.in_use() == InUse()


# A call that is sent again

Operations = Sequence[wire.Operation]

AGAIN: dict[str, Operations] = {
    "reserve": [wire.reserve_operation(wanted("new", SPOT))],
    "a refusal": [wire.reserve_operation(replace(wanted("no", SPOT, cost(10, 21)), fingerprint=7))],
    "an eviction": [wire.reserve_operation(wanted("g", GOLD, cost(1, 8, 0)))],
    "settle": [wire.settle_operation("batch-0", 5)],
    "settle an expired one": [wire.settle_operation("expires", 5)],
    "settle an unknown one": [wire.settle_operation("unknown", 5)],
    "renew": [("renew", ("batch-0", "unknown"), 90_000)],
    "restore": [
        wire.restore_operation(
            [
                Survivor(
                    Lease("lost", "x", cost(5), True, False, False, 10**6, 0, 0),  # noqa: FBT003
                    5,
                )
            ],
            5,
        )
    ],
    "sweep": [("sweep",)],
    "open": [("open", "new")],
    "look": [("look", -1, "")],
    "close_tick": [("close_tick", 9, 0)],
    "publish": [
        ("publish", -1, 5, -1, "", "f", wire.resources(USABLE), 500, False, []),
    ],
    "snapshot": [("snapshot",)],
    "nothing": [],
    "several": [
        wire.reserve_operation(wanted("new", SPOT)),
        wire.settle_operation("new", 5),
        wire.settle_operation("batch-1", 5),
        ("close_tick", 9, 0),
    ],
}


@pytest.mark.parametrize("operations", AGAIN.values(), ids=AGAIN)
async def test_a_call_that_is_sent_again_has_the_same_reply_and_counts_once(
    group: Group, operations: Operations
) -> None:
    """Also later, and after calls of others; a call of another number is another one."""
    one, _ = await rich(group)
    group.clock.advance(100_000)
    keys = pool_keys(group.prefix, POOL)
    asked = wire.encode_operations(operations)

    async def send(number: str, owner: str = "z") -> object:
        now = str(group.clock.now_ms())
        where = channel(group.prefix, POOL)
        return await one.server.call(keys, (owner, number, now, where, asked))

    first = await send("1")
    epoch, answers = wire.decode_answers(first, len(operations))
    assert epoch == group.page()["epoch"]
    assert len(answers) == len(operations)
    before = group.dump()
    group.clock.advance(5_000)
    assert await send("1") == first
    assert group.dump() == before
    await one.in_use()
    assert await send("1") == first
    assert await send("2") is not None
    assert group.dump() != before


# Keys

POOL_NAMES = (
    "a",
    "{a}",
    "a}b",
    "{",
    "{}",
    "a b",
    "a%20b",
    "a:b",
    "ünï",
    "日本",
    "x" * 63,
    "ü" * 63,
)


async def test_pools_share_nothing(alone: Group) -> None:
    """Whatever they are called: each has keys of its own, in one slot, with the prefix and its tag."""
    one = alone.join("a")
    for pool in POOL_NAMES:
        await one.store.open(pool, "f")
        reply = await one.store.reserve(pool, wanted("same", SPOT))
        assert isinstance(reply.outcome, Lease)
    for pool in POOL_NAMES:
        assert (await one.store.snapshot(pool)).total.in_flight == 1
    slots = set()
    for pool in POOL_NAMES:
        keys = pool_keys(alone.prefix, pool)
        tags = {key.partition("{")[2].partition("}")[0] for key in keys}
        where = channel(alone.prefix, pool)
        assert len(tags) == 1
        assert tags != {""}
        assert len({key_slot(key.encode()) for key in (*keys, where)}) == 1
        assert where not in keys
        slots |= tags
    assert len(slots) == len(POOL_NAMES)
    mine = {key for pool in POOL_NAMES for key in pool_keys(alone.prefix, pool)}
    assert alone.keys() == {key.decode() for key in alone.raw.scan_iter("*", 1_000)}
    assert alone.keys() <= mine


async def test_prefixes_share_nothing(group: Group) -> None:
    """Two groups of the same pool name on one server."""
    async with grouped(shared_server()) as other:
        one, two = group.join("a"), other.join("a")
        await one.take("1", SPOT)
        assert await two.in_use() == InUse()
        assert await two.store.settle(POOL, "1", 0) is None


# The server's time


async def taken_at(replica: Replica, name: str) -> int:
    """Pool time."""
    outcome = (await replica.take(name, SPOT)).outcome
    assert isinstance(outcome, Lease)
    return outcome.admitted_at_ms


def edit(group: Group, wall_ms: int) -> int:
    """Let the server's clock have been so much further than it is; pool time then."""
    page = group.page()
    page["wall"] += wall_ms
    group.raw.set(group.key("pool"), msgspec.msgpack.encode(page))
    now = page["now"]
    assert isinstance(now, int)
    return now


async def test_pool_time_follows_the_servers(group: Group) -> None:
    """Whatever the clocks of the replicas say."""
    one = group.join("a", is_timed_by_server=True)
    two = group.join("b", is_timed_by_server=True)
    seconds, micros = group.raw.time()
    first = await taken_at(one, "1")
    assert 0 <= first - (seconds * 1_000 + micros // 1_000) < 5_000
    later = await taken_at(two, "2")
    assert 0 <= later - first < 5_000


async def test_pool_time_stands_still_while_the_servers_goes_back(group: Group) -> None:
    """An hour, at once; then it goes on from where it was."""
    one = group.join("a", is_timed_by_server=True)
    await one.take("1", SPOT)
    before = edit(group, 3_600_000)
    assert await taken_at(one, "2") == before
    seconds, micros = group.raw.time()
    assert abs(group.page()["wall"] - (seconds * 1_000 + micros // 1_000)) < 5_000
    now = before
    async with asyncio.timeout(WITHIN_S):
        for number in itertools.count(3):
            now = await taken_at(one, f"{number}")
            await one.store.settle(POOL, f"{number}", 0)
            if now > before:
                break
    assert now - before < 5_000


async def test_pool_time_does_not_step(group: Group) -> None:
    """A server's clock that is corrected by an hour moves it by its longest step, and expires no lease."""
    one = group.join("a", is_timed_by_server=True)
    await one.take("1", SPOT)
    before = edit(group, -3_600_000)
    assert await taken_at(one, "2") == before + MAX_STEP_MS
    assert await one.store.sweep(POOL) == ()
    assert await taken_at(one, "3") - before < MAX_STEP_MS + 5_000
