"""The books that a replica keeps of its own while the shared store is away, and what becomes of them afterwards."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from envoy_tokenpools.clock import Clock, ManualClock
from envoy_tokenpools.config import parse_address
from envoy_tokenpools.core.admission import Lease
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import (
    Entitlement,
    Limits,
    OnStoreError,
    Pool,
    Reclaim,
    ServiceClass,
)
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Tick
from envoy_tokenpools.gate.alone import Alone
from envoy_tokenpools.gate.order import Admitted, Refused
from envoy_tokenpools.openai.usage import Usage
from envoy_tokenpools.store.base import Sight, Store
from envoy_tokenpools.store.redis.server import RedisServer
from envoy_tokenpools.store.redis.store import RedisStore
from tests.support.faulty_wire import FaultyWire, faulty_wire
from tests.support.gate import DistantStore, GateDesk, by_ids, configured, metered
from tests.support.pools import amount, claim, cost, entitlement, pool, terms
from tests.support.redis_server import RedisProcess, redis_process

EVERYBODY = dict.fromkeys(ServiceClass, OnStoreError.ALLOW)
SPOT = entitlement("spot", ServiceClass.SPOT)
GOLD = entitlement("gold", ServiceClass.GUARANTEED, Resources(1_000, 10**9, 5))

_NUMBERS = itertools.count(1)


def open_to_all(capacity: Resources, *who: Entitlement) -> Pool:
    """A pool that admits every class without its store, and whose buckets are a second deep."""
    return replace(pool(capacity, *who), window_ms=1_000, on_store_error=EVERYBODY)


class CrowdedStore(DistantStore):
    """
    Tells everybody how many share the pool.

    Attributes:
        replicas: so many.
    """

    replicas = 2

    async def look(self, pool: str, known: Tick) -> Sight:
        """See `Store`."""
        return replace(await super().look(pool, known), replicas=self.replicas)


@dataclass(slots=True)
class Stage:
    """One of several replicas, and the store that it loses."""

    desk: GateDesk
    store: CrowdedStore

    @classmethod
    async def open(
        cls,
        *pools: Pool,
        replicas: int = 2,
        store: Callable[[Clock], CrowdedStore] = CrowdedStore,
    ) -> "Stage":
        """It has seen how many there are."""
        desk = await GateDesk.open(*pools, store=store)
        assert isinstance(desk.store, CrowdedStore)
        desk.store.replicas = replicas
        await desk.pass_ms(0)
        return cls(desk, desk.store)

    def go_away(self) -> None:
        """The store decides nothing any more."""
        self.store.failing = {"reserve", "settle", "restore"}

    def come_back(self) -> None:
        """It does again."""
        self.store.failing = set()

    async def takes(self, name: str, tokens: int = 1) -> list[Admitted]:
        """As many requests of an entitlement as are admitted, before one is shed."""
        taken: list[Admitted] = []
        while isinstance(verdict := await self.ask(name, tokens), Admitted):
            taken.append(verdict)
        assert verdict.answer.status == 429
        return taken

    async def ask(self, name: str, tokens: int = 1) -> Admitted | Refused:
        """A request unlike any before."""
        return await self.desk.ask(by_ids(tokens, user=str(next(_NUMBERS))), name)

    async def end(self, admitted: Admitted) -> None:
        """It used what was reserved."""
        seen = metered(Usage(admitted.lease.cost.prompt_tokens, 0), "x")
        await self.desk.settle(admitted, seen)


# This replica's part


@pytest.mark.parametrize(("replicas", "part"), [(1, 5), (2, 3), (3, 2), (5, 1), (9, 1)])
async def test_a_guarantee_is_divided_and_rounded_up(replicas: int, part: int) -> None:
    """By the replicas that were seen last; every one of them may use at least something of it."""
    stage = await Stage.open(open_to_all(amount(sequences=90), GOLD, SPOT), replicas=replicas)
    stage.go_away()
    assert len(await stage.takes("gold")) == part


@pytest.mark.parametrize(("replicas", "part"), [(1, 7), (2, 3), (3, 2), (8, 0)])
async def test_what_is_nobodys_is_divided_and_rounded_down(replicas: int, part: int) -> None:
    """All replicas together never hand out more of the pool's rest than there is."""
    stage = await Stage.open(open_to_all(amount(sequences=7), SPOT), replicas=replicas)
    stage.go_away()
    assert len(await stage.takes("spot")) == part


@pytest.mark.parametrize(
    ("limits", "tokens", "part"),
    [
        pytest.param(Limits(concurrency=5), 1, 3, id="sequences"),
        pytest.param(Limits(kv_bytes=49_999), 5, 5, id="KV bytes"),  # of which each takes 5,000
        pytest.param(Limits(tokens_per_second=299), 50, 3, id="tokens"),
    ],
)
async def test_limits_are_divided_and_rounded_up(limits: Limits, tokens: int, part: int) -> None:
    """Each of the three, whatever the pool has."""
    limited = replace(SPOT, limits=limits)
    stage = await Stage.open(open_to_all(amount(), limited))
    stage.go_away()
    assert len(await stage.takes("spot", tokens)) == part


async def test_the_token_rate_is_divided() -> None:
    """What has been used comes back at this replica's part of the rate."""
    stage = await Stage.open(open_to_all(Resources(1_000, 10**9, 100), SPOT))
    stage.go_away()
    assert len(await stage.takes("spot", 250)) == 2
    stage.desk.clock.advance(500)
    assert len(await stage.takes("spot", 250)) == 1


async def test_a_share_is_divided_and_rounded_up() -> None:
    """As a lease says, which was taken inside it or not."""
    elastic = entitlement("elastic", ServiceClass.ELASTIC, amount(1_000, 3, 10**9))
    stage = await Stage.open(open_to_all(Resources(10_000, 10**9, 12), elastic))
    held = [await stage.ask("elastic") for _ in range(3)]
    await stage.desk.pass_ms(5_000)
    for each in held:
        assert isinstance(each, Admitted)
        await stage.end(each)
    assert (
        stage.desk.gate.house.pool(stage.desk.config.pools["pool"])
        .tick.terms["elastic"]
        .share.concurrency
        == 3
    )
    stage.go_away()
    taken = await stage.takes("elastic")
    assert [each.lease.within_share for each in taken] == [True, True, False, False, False, False]


async def test_the_part_is_that_of_the_replicas_seen_last() -> None:
    """Of those that there were before the store went away, not when this one came."""
    stage = await Stage.open(open_to_all(amount(sequences=12), SPOT), replicas=2)
    stage.store.replicas = 4
    await stage.desk.pass_ms(250)
    stage.go_away()
    assert len(await stage.takes("spot")) == 3


# What is held already


async def test_what_is_held_counts() -> None:
    """Sequences and tokens of the requests that run here, whoever admitted them."""
    stage = await Stage.open(open_to_all(Resources(1_000, 10**9, 8), SPOT))
    for _ in range(3):
        await stage.desk.admit(by_ids(10), "spot")
    stage.go_away()
    assert len(await stage.takes("spot")) == 1


async def test_tokens_of_what_is_held_count() -> None:
    """They have just been used; so much of the bucket is gone."""
    stage = await Stage.open(open_to_all(Resources(1_000, 10**9, 90), SPOT))
    for _ in range(3):
        await stage.desk.admit(by_ids(100), "spot")
    stage.go_away()
    assert len(await stage.takes("spot", 100)) == 2


async def test_what_ends_here_makes_room_here() -> None:
    """Whether it was admitted before, or without the store."""
    stage = await Stage.open(open_to_all(amount(sequences=4), SPOT))
    before = await stage.desk.admit(by_ids(10), "spot")
    stage.go_away()
    (alone,) = await stage.takes("spot")
    for each in (before, alone):
        await stage.end(each)
        assert len(await stage.takes("spot")) == 1


@pytest.mark.parametrize("reserved", [ServiceClass.DEDICATED, ServiceClass.GUARANTEED])
async def test_a_guarantee_is_served_inside_its_part_whatever_is_held(
    reserved: ServiceClass,
) -> None:
    """The pool is full here, and then more than that; beyond its part the guarantee is shed as anybody."""
    who = entitlement("gold", reserved, Resources(1_000, 10**9, 5))
    stage = await Stage.open(open_to_all(amount(10_000, 10), who, SPOT))
    for _ in range(5):
        await stage.desk.admit(by_ids(10), "spot")
    stage.go_away()
    assert await stage.takes("spot") == []
    taken = await stage.takes("gold")
    assert [each.lease.within_guarantee for each in taken] == [True] * 3


@pytest.mark.parametrize("is_alone", [False, True])
async def test_nobody_is_evicted_for_a_decision_of_this_replica_alone(*, is_alone: bool) -> None:
    """Its books know a part only: elsewhere there may be room."""
    evictable = replace(SPOT, reclaim=Reclaim.EVICT)
    stage = await Stage.open(open_to_all(amount(10_000, 6), GOLD, evictable), replicas=1)
    held = [await stage.desk.admit(by_ids(10), "spot") for _ in range(6)]
    if is_alone:
        stage.go_away()
    assert len(await stage.takes("gold")) == 5
    assert [each.holding.is_evicted for each in held].count(True) == (0 if is_alone else 5)


async def test_a_shed_request_is_told_when_to_come_back_by_this_replicas_time() -> None:
    """The store's time, by which leases were taken, may be any other."""
    told = []
    for ahead_ms in (0, 10**12):

        def of_another_time(clock: Clock, ahead_ms: int = ahead_ms) -> CrowdedStore:
            return CrowdedStore(AheadClock(clock, ahead_ms))

        stage = await Stage.open(
            open_to_all(amount(sequences=2), SPOT), replicas=1, store=of_another_time
        )
        held = [await stage.desk.admit(by_ids(10), "spot") for _ in range(2)]
        stage.desk.clock.advance(9_000)
        stage.go_away()
        assert await stage.takes("spot") == []
        await stage.end(held.pop())
        assert len(await stage.takes("spot")) == 1
        verdict = await stage.ask("spot")
        assert isinstance(verdict, Refused)
        told.append(dict(verdict.answer.headers)["retry-after-ms"])
    assert told[0] == told[1]


@dataclass(slots=True)
class AheadClock:
    """A clock that shows `ahead_ms` more than another."""

    clock: Clock
    ahead_ms: int

    def now_ms(self) -> int:
        """See `Clock`."""
        return self.clock.now_ms() + self.ahead_ms

    def now_us(self) -> int:
        """See `Clock`."""
        return self.clock.now_us() + 1_000 * self.ahead_ms


# Beginning and end


async def test_the_books_are_dropped_with_the_first_decision_of_the_store() -> None:
    """And opened anew, with what is held, when it goes away again: what it granted in between counts."""
    stage = await Stage.open(open_to_all(amount(sequences=3), SPOT), replicas=1)
    stage.go_away()
    first, second, third = await stage.takes("spot")
    stage.come_back()
    await stage.end(first)
    await stage.desk.admit(by_ids(10), "spot")
    await stage.end(second)
    await stage.end(third)
    stage.go_away()
    assert len(await stage.takes("spot")) == 2


async def test_the_next_books_have_the_terms_of_their_day() -> None:
    """Not those of the time when the store was away first."""
    stage = await Stage.open(open_to_all(amount(sequences=12), SPOT), replicas=2)
    stage.go_away()
    for each in await stage.takes("spot"):
        await stage.end(each)
    stage.come_back()
    stage.store.replicas = 6
    await stage.desk.pass_ms(250)
    stage.go_away()
    assert len(await stage.takes("spot")) == 2


async def test_a_reload_is_in_force_though_the_store_is_away() -> None:
    """An operator who lowers a limit, or the capacity, means it now."""
    stage = await Stage.open(open_to_all(amount(sequences=12), SPOT), replicas=1)
    stage.go_away()
    assert isinstance(await stage.ask("spot"), Admitted)
    stage.store.failing |= {"open", "publish"}
    await stage.desk.gate.reload(configured(open_to_all(amount(sequences=3), SPOT)))
    assert len(await stage.takes("spot")) == 2


async def test_what_was_used_stays_used_when_the_terms_change() -> None:
    """A reload, or a tick of a store that answers too late for decisions, is no way to have a token rate twice."""
    limited = replace(SPOT, limits=Limits(tokens_per_second=1_000))
    before = open_to_all(Resources(5_000, 10**9, 12), limited)
    stage = await Stage.open(before, replicas=1)
    stage.go_away()
    for each in await stage.takes("spot", 250):
        await stage.end(each)
    assert await stage.takes("spot", 250) == []
    await stage.desk.gate.reload(configured(replace(before, image_tokens=7)))
    assert await stage.takes("spot", 250) == []
    stage.desk.clock.advance(5_000)
    await stage.desk.gate.house.round()
    assert len(await stage.takes("spot", 250)) == 4


async def test_each_pool_has_books_of_its_own() -> None:
    """What one holds takes nothing from another, and an answer about one says nothing about another."""
    here = open_to_all(amount(sequences=2), SPOT)
    there = replace(here, name="other", models=("n",))
    alone = Alone(ManualClock())
    desk = await GateDesk.open(here, there, store=DistantStore)
    one, other = desk.gate.house.pool(here), desk.gate.house.pool(there)
    for live in (one, other):
        for number in range(2):
            wanted = claim(f"{number}", cost(), terms("spot"), here.capacity)
            reply = alone.decide(live, wanted)
            assert reply is not None
            assert isinstance(reply.outcome, Lease)
    alone.end("other")
    third = claim("third", cost(), terms("spot"), here.capacity)
    replies = [alone.decide(live, third) for live in (one, other)]
    assert [isinstance(reply.outcome, Lease) for reply in replies if reply is not None] == [
        False,
        True,
    ]


async def test_an_entitlement_that_is_configured_nowhere_here_is_not_decided_on() -> None:
    """Only its own replica knows its class, and what it may use."""
    one = open_to_all(amount(sequences=2), SPOT)
    desk = await GateDesk.open(one, store=DistantStore)
    alone = Alone(desk.clock)
    stranger = claim("1", cost(), terms("stranger"), one.capacity)
    assert alone.decide(desk.gate.house.pool(one), stranger) is None


# What the store is told


@dataclass(slots=True)
class Apart:
    """A replica, a real server, and the wire between them."""

    desk: GateDesk
    wire: FaultyWire
    server: RedisProcess

    def go_away(self) -> None:
        """The server cannot be reached."""
        self.wire.is_refused = True
        self.wire.cut()

    def come_back(self) -> None:
        """It can."""
        self.wire.is_refused = False

    async def settle(self, admitted: Admitted) -> None:
        """It used 60 tokens."""
        await self.desk.settle(admitted, metered(Usage(60, 0), "x"))


@pytest.fixture(scope="module")
def server() -> Iterator[RedisProcess]:
    """A real one, of our own."""
    with redis_process() as one:
        yield one


@pytest.fixture
async def apart(server: RedisProcess) -> AsyncIterator[Apart]:
    """All is well, for now."""
    server.ask("FLUSHALL")
    async with faulty_wire(server.port) as wire:

        def at_the_end_of_it(clock: Clock) -> Store:
            there = RedisServer(parse_address(wire.url))
            return RedisStore(there, owner="one", deadline_ms=50, clock=clock)

        one = open_to_all(Resources(1_000, 10**9, 8), SPOT)
        desk = await GateDesk.open(one, store=at_the_end_of_it, now_ms=1_000_000)
        yield Apart(desk, wire, server)
        await desk.gate.close()
        await desk.store.close()


async def runs_on(_: Apart, __: Admitted) -> None:
    """It ends when the store has been back for long."""


async def ends(apart: Apart, admitted: Admitted) -> None:
    """Nobody can be told."""
    ending = asyncio.create_task(apart.settle(admitted))
    await asyncio.sleep(0)
    apart.come_back()
    await ending


async def is_forgotten(apart: Apart, _: Admitted) -> None:
    """With all other books."""
    apart.server.ask("FLUSHALL")


Meanwhile = Callable[[Apart, Admitted], Awaitable[None]]


@pytest.mark.parametrize("meanwhile", [runs_on, ends, is_forgotten])
async def test_a_lease_granted_alone_is_told_to_the_store_and_settled_there_once(
    apart: Apart, meanwhile: Meanwhile
) -> None:
    """As soon as that is back, also if the request has ended, or the books were lost; its tokens are charged once."""
    apart.go_away()
    admitted = await apart.desk.admit(by_ids(100), "spot")
    assert apart.desk.observer.outcomes()[0][1] == "store_unavailable"
    await meanwhile(apart, admitted)
    apart.come_back()
    await apart.desk.pass_ms(0)
    if meanwhile is not ends:
        assert await apart.desk.total() == InUse(1, 1, 100, 100_000)
        await apart.settle(admitted)
    assert await apart.desk.total() == InUse()
    assert await apart.desk.store.settle("pool", admitted.lease.lease_id, 60) is None
    following = await apart.desk.admit(by_ids(10), "spot")
    assert following.balance.remaining_tokens == 1_000 - 60 - 10
    reading = await apart.desk.store.close_tick("pool")
    assert reading is not None
    assert reading.meters["spot"].delivered_tokens == 60 + 10


async def test_leases_granted_alone_are_kept_alive_as_any_other(apart: Apart) -> None:
    """For as long as their requests run, before and after the store is back."""
    ttl_ms = apart.desk.config.server.lease_ttl_ms
    apart.go_away()
    admitted = await apart.desk.admit(by_ids(100), "spot")
    apart.desk.clock.advance(2 * ttl_ms)
    apart.come_back()
    await apart.desk.pass_ms(0)
    for _ in range(8):
        await apart.desk.pass_ms(ttl_ms // 4)
    assert (await apart.desk.total()).in_flight == 1
    await apart.settle(admitted)
    assert await apart.desk.total() == InUse()
    assert len(apart.desk.observer.settlements) == 1


async def test_what_was_granted_alone_counts_in_the_store_whether_it_fits_or_not(
    apart: Apart,
) -> None:
    """With what others were granted meanwhile the pool may hold more than it should; then it takes nothing more."""
    other = RedisStore(
        RedisServer(parse_address(apart.server.url)), owner="other", clock=apart.desk.clock
    )
    apart.go_away()
    alone = [await apart.desk.admit(by_ids(10, user=str(n)), "spot") for n in range(5)]
    for number in range(6):
        theirs = claim(f"theirs-{number}", cost(), terms("spot"), amount())
        assert isinstance((await other.reserve("pool", theirs)).outcome, Lease)
    apart.come_back()
    await apart.desk.pass_ms(0)
    assert (await other.snapshot("pool")).total.in_flight == 11
    refused = await apart.desk.refuse(by_ids(10), "spot")
    assert refused.answer.status == 429
    for each in alone:
        await apart.settle(each)
    await other.close()
    assert (await apart.desk.total()).in_flight == 6
