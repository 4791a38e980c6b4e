"""Several replicas that share their pools on one real server: who ticks, what is in force, and what survives."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from envoy_tokenpools.clock import ManualClock
from envoy_tokenpools.config import ServerSettings, parse_address
from envoy_tokenpools.core.admission import Claim
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import Limits, Pool, Reclaim, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Tick
from envoy_tokenpools.errors import StoreError
from envoy_tokenpools.gate.gate import Gate
from envoy_tokenpools.gate.order import Admitted, Refused
from envoy_tokenpools.observer import Ending
from envoy_tokenpools.store.base import Reply
from envoy_tokenpools.store.redis import wire
from envoy_tokenpools.store.redis.script import LEAD_MS
from envoy_tokenpools.store.redis.server import RedisServer
from envoy_tokenpools.store.redis.store import RedisStore
from tests.support.gate import GateDesk, WordCounter, by_ids, configured
from tests.support.observers import RecordingObserver
from tests.support.pools import entitlement, pool
from tests.support.redis_server import RedisProcess, redis_process
from tests.support.replica import Replica

GOLD = entitlement("gold", ServiceClass.GUARANTEED, Resources(2_000, 10**8, 2))
ELASTIC = entitlement("elastic", ServiceClass.ELASTIC, Resources(5_000, 10**9, 4))
SPOT = entitlement("spot", ServiceClass.SPOT)
BATCH = replace(entitlement("batch", ServiceClass.PREEMPTIBLE), reclaim=Reclaim.EVICT)
CAPACITY = Resources(tokens_per_second=10_000, kv_bytes=10**9, concurrency=8)
POOL = replace(pool(CAPACITY, GOLD, ELASTIC, SPOT, BATCH, tick_ms=1_000), window_ms=1_000)
OTHER = replace(POOL, name="other", models=("n",))
START_MS = 1_000_000
ROUND_MS = 250
TTL_MS = ServerSettings().lease_ttl_ms


class DeafServer(RedisServer):
    """Nothing that is published arrives: what a replica is told, it is told in answers."""

    async def messages(self, channels: Sequence[str]) -> AsyncIterator[tuple[str, bytes]]:
        """See `Server.messages`."""
        await asyncio.Event().wait()
        yield channels[0], b""


class HarmedStore(RedisStore):
    """
    A store that can lose operations.

    Attributes:
        unsent: the next operation of this name is not carried out.
        unanswered: the next one of this name is, and its answer is lost.
        is_away: no claim is answered.
    """

    unsent = ""
    unanswered = ""
    is_away = False

    async def reserve(self, pool: str, claim: Claim) -> Reply:
        """See `Store`."""
        if self.is_away:
            raise StoreError("away", transient=True, uncertain=False)
        return await super().reserve(pool, claim)

    async def _ask(
        self, pool: str, operation: wire.Operation, *, is_kept: bool = False
    ) -> wire.Answer:
        if operation[0] == self.unsent:
            self.unsent = ""
            raise StoreError("not sent", transient=True, uncertain=False)
        answer = await super()._ask(pool, operation, is_kept=is_kept)
        if operation[0] == self.unanswered:
            self.unanswered = ""
            raise StoreError("no answer", transient=True)
        return answer


@dataclass(slots=True)
class Company:
    """
    Replicas on one time that moves only when told.

    Attributes:
        server: keeps the books.
        clock: of everybody.
        alive: look after their houses, in this order.
    """

    server: RedisProcess
    clock: ManualClock = field(default_factory=lambda: ManualClock(START_MS))
    alive: list[Replica] = field(default_factory=list)
    _joined: list[Replica] = field(default_factory=list)

    async def join(self, *pools: Pool) -> Replica:
        """One more replica."""
        owner = f"replica-{len(self._joined)}"
        numbers = itertools.count(1)
        config, observer = configured(*pools), RecordingObserver()
        store = HarmedStore(
            DeafServer(parse_address(self.server.url)),
            owner=owner,
            deadline_ms=5_000,
            clock=self.clock,
        )
        gate = Gate(
            config,
            store=store,
            counter=WordCounter(),
            clock=self.clock,
            observer=observer,
            new_lease_id=lambda: f"{owner}-{next(numbers)}",
            jitter=lambda: 0.0,
        )
        await gate.house.start()
        one = Replica(gate, store, config, observer)
        self._joined.append(one)
        self.alive.append(one)
        return one

    async def join_all(self, count: int, *pools: Pool) -> list[Replica]:
        """Equal replicas; the first of them leads."""
        return [await self.join(*(pools or (POOL,))) for _ in range(count)]

    async def at_once(self) -> None:
        """Everybody looks after the house, one after the other."""
        for one in self.alive:
            await one.gate.house.round()

    async def pass_ms(self, ms: int, *, round_ms: int = ROUND_MS) -> None:
        """Everybody does so every `round_ms`, and sees in the end what the others have done."""
        for _ in range(ms // round_ms):
            self.clock.advance(round_ms)
            await self.at_once()
        await self.at_once()

    def lose_the_books(self) -> None:
        """All data is gone."""
        self.server.ask("FLUSHALL")

    async def close(self) -> None:
        """Everybody goes."""
        for one in self._joined:
            await one.gate.close()
            await one.store.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisProcess]:
    """A real one, of our own: its data can be lost."""
    with redis_process() as one:
        yield one


@pytest.fixture
async def company(server: RedisProcess) -> AsyncIterator[Company]:
    """Nobody is there yet."""
    server.ask("FLUSHALL")
    company = Company(server)
    yield company
    await company.close()


def tick_of(one: Replica, name: str = "pool") -> Tick:
    """The latest tick that a replica knows."""
    return one.gate.house.pool(one.config.pools[name]).tick


def debt_of(one: Replica) -> float:
    """What is owed to the elastic entitlement, as a replica knows it."""
    return tick_of(one).standings["elastic"].debt


async def reload(one: Replica, *pools: Pool) -> None:
    """A replica takes over another configuration."""
    one.config = configured(*pools)
    await one.gate.reload(one.config)


async def refuse(one: Replica, name: str) -> str:
    """The reason for which a request must be refused."""
    verdict = await one.ask(name)
    assert isinstance(verdict, Refused), verdict
    return dict(verdict.answer.headers)["x-tokenpools-reason"]


async def settle_all(held: Sequence[tuple[Replica, Admitted]]) -> None:
    """They have ended."""
    for one, admitted in held:
        await one.settle(admitted)


async def run_into_debt(company: Company, *replicas: Replica) -> list[tuple[Replica, Admitted]]:
    """What runs fills the pool, an elastic entitlement asks in vain, and a tick has seen it."""
    some = itertools.cycle(replicas)
    held = [(one, await one.admit("spot")) for one in itertools.islice(some, 8)]
    for one in itertools.islice(some, 4):
        await refuse(one, "elastic")
    await company.pass_ms(1_000)
    assert debt_of(replicas[0]) > 0
    return held


# Ticks


async def test_a_follower_takes_over_what_the_leader_publishes(company: Company) -> None:
    """Weights, debts, bursts and allocations: the very same values, tick after tick."""
    leader, follower = await company.join_all(2)
    assert tick_of(leader) == tick_of(follower)
    seen = []
    for number in range(1, 6):
        await follower.ask("elastic", 3_000)
        await leader.ask("spot", 1_000 * number)
        await company.pass_ms(1_000)
        assert tick_of(follower) == tick_of(leader)
        assert tick_of(follower).number == number
        seen.append(tick_of(follower).standings)
    assert len({str(standings) for standings in seen}) == 5


@pytest.mark.parametrize("replicas", [1, 2, 4])
async def test_one_replica_ticks_for_all(company: Company, replicas: int) -> None:
    """However many there are, a tick is as long as it is configured, and everybody knows the same one."""
    everybody = await company.join_all(replicas)
    for number in range(1, 11):
        await company.pass_ms(1_000)
        assert [tick_of(one).number for one in everybody] == [number] * replicas


async def test_shares_and_debts_do_not_depend_on_who_serves(company: Company) -> None:
    """Three replicas that serve some requests each owe what one that serves all of them would."""
    everybody = await company.join_all(3)
    single = await GateDesk.open(POOL, now_ms=START_MS)
    body = itertools.count(1)
    for second in range(4):
        for number in range(8):
            name = ("elastic", "spot", "batch", "gold")[(second + number) % 4]
            tokens = 100 * (1 + number)
            verdict = await everybody[number % 3].ask(name, tokens)
            other = await single.ask(by_ids(tokens, 5, user=f"single-{next(body)}"), name)
            assert isinstance(verdict, Admitted) is isinstance(other, Admitted)
        await company.pass_ms(1_000)
        for _ in range(4):
            await single.pass_ms(ROUND_MS)
        expected = single.gate.house.pool(POOL).tick
        assert [tick_of(one) for one in everybody] == [expected] * 3
    assert {each.debt > 0 for each in expected.standings.values()} == {False, True}


@pytest.mark.parametrize("tick_ms", [1_000, 5_000])
@pytest.mark.parametrize("later_ms", [0, 250, 750])
async def test_when_the_leader_dies_another_replica_ticks_in_its_time(
    company: Company, tick_ms: int, later_ms: int
) -> None:
    """It goes on from what the other had published, no later than a tick after the other has been given up."""
    leader, heir = await company.join_all(2, replace(POOL, tick_ms=tick_ms))
    for _ in range(12):
        await leader.ask("spot", 1_000)
    for _ in range(4):
        await heir.ask("elastic")
    await company.pass_ms(tick_ms)
    await company.pass_ms(later_ms)
    number, debt = tick_of(heir).number, debt_of(heir)
    assert (number, debt > 0) == (1, True)
    company.alive.remove(leader)
    await company.pass_ms(LEAD_MS + tick_ms)
    assert tick_of(heir).number > number
    assert debt_of(heir) > 0
    before = tick_of(heir).number
    await company.pass_ms(2 * tick_ms)
    assert tick_of(heir).number == before + 2


async def test_a_leader_that_comes_back_follows(company: Company) -> None:
    """It was held up for too long: what it would have published is not put in force, and nothing is ticked twice."""
    leader, heir = await company.join_all(2)
    company.alive.remove(leader)
    await company.pass_ms(LEAD_MS + 2_000)
    number = tick_of(heir).number
    assert number > 0
    company.alive.insert(0, leader)
    await company.pass_ms(5_000)
    assert tick_of(leader) == tick_of(heir)
    assert tick_of(heir).number == number + 5


async def test_a_replica_that_joins_finds_what_is_in_force(company: Company) -> None:
    """Debts and weights are not begun anew because somebody has come, or everybody was exchanged."""
    first, second = await company.join_all(2)
    held = await run_into_debt(company, first, second)
    third = await company.join(POOL)
    assert tick_of(third) == tick_of(first)
    await settle_all(held)
    company.alive = [third]
    await company.pass_ms(LEAD_MS)
    assert debt_of(third) > 0


@pytest.mark.parametrize("harm", ["unsent", "unanswered"])
async def test_a_tick_that_could_not_be_published_is_published_in_the_next_round(
    company: Company, harm: str
) -> None:
    """With all that was read for it, whether or not the failed publication was carried out after all."""
    leader, follower = await company.join_all(2)
    single = await GateDesk.open(POOL, now_ms=START_MS)
    for number in range(10):
        await leader.ask("spot")
        await single.ask(by_ids(10, 5, user=f"spot-{number}"), "spot")
    for number in range(4):
        await follower.ask("elastic")
        await single.ask(by_ids(10, 5, user=f"elastic-{number}"), "elastic")
    await company.pass_ms(750)
    setattr(leader.store, harm, "publish")
    company.clock.advance(250)
    await company.at_once()
    assert leader.observer.store_failures == ["housekeeping"]
    assert not leader.gate.store_answers
    await company.at_once()
    await single.pass_ms(1_000)
    assert leader.gate.store_answers
    assert tick_of(leader) == tick_of(follower) == single.gate.house.pool(POOL).tick
    assert debt_of(follower) > 0
    await company.pass_ms(1_000)
    assert tick_of(follower).number == 2


# Configurations that differ


async def test_a_reload_of_one_replica_is_in_force_for_all(company: Company) -> None:
    """Capacity and entitlements, though the others have not loaded it yet; they do not fight for their own."""
    old, new = await company.join_all(2)
    held = await run_into_debt(company, old, new)
    debt = debt_of(old)
    guest = replace(SPOT, name="guest")
    changed = replace(
        POOL,
        capacity=replace(CAPACITY, concurrency=4),
        entitlements={"elastic": ELASTIC, "guest": guest, "gold": GOLD, "spot": SPOT},
    )
    await reload(new, changed)
    assert debt_of(new) == debt
    await settle_all(held)
    await company.pass_ms(ROUND_MS)
    assert tick_of(old) == tick_of(new)
    assert tick_of(old).usable.concurrency == 4
    assert tick_of(old).terms.keys() == {"elastic", "guest", "gold", "spot"}
    number = tick_of(new).number
    await company.pass_ms(5_000)
    assert tick_of(old) == tick_of(new)
    assert (tick_of(new).number, tick_of(new).usable.concurrency) == (number + 5, 4)
    served = [await old.admit("spot") for _ in range(4)]
    assert await refuse(old, "spot") == "pool_contended"
    for each in served:
        await old.settle(each)


async def test_capacity_that_one_replica_restores_ramps_up_for_all(company: Company) -> None:
    """A quarter each second, also as those see it who have not loaded it."""
    low = replace(POOL, capacity=replace(CAPACITY, concurrency=4))
    old, new = await company.join_all(2, low)
    await reload(new, POOL)
    await company.pass_ms(ROUND_MS)
    seen = []
    for _ in range(5):
        seen.append(tick_of(old).usable.concurrency)
        await company.pass_ms(1_000)
    assert (seen[0], seen[-1]) == (4, 8)
    assert seen == sorted(seen)
    assert len(set(seen)) >= 4


async def test_everybody_may_load_the_same_configuration_in_any_order(company: Company) -> None:
    """The second of them joins the first, and nothing is begun anew."""
    one, other = await company.join_all(2)
    held = await run_into_debt(company, one, other)
    debt = debt_of(one)
    changed = replace(POOL, capacity=replace(CAPACITY, concurrency=6))
    await reload(other, changed)
    await reload(one, changed)
    assert tick_of(one) == tick_of(other)
    assert (debt_of(one), tick_of(one).usable.concurrency) == (debt, 6)
    number = tick_of(one).number
    await company.pass_ms(3_000)
    assert tick_of(one) == tick_of(other)
    assert tick_of(one).number == number + 3
    await settle_all(held)


async def test_what_only_an_old_configuration_knows_is_served_by_its_own_terms(
    company: Company,
) -> None:
    """Where it is known: within its limits, tick after tick, until its replica has loaded the new one as well."""
    limited = entitlement("limited", ServiceClass.SPOT, limits=Limits(concurrency=2))
    before = replace(POOL, entitlements={**POOL.entitlements, "limited": limited})
    old, new = await company.join_all(2, before)
    await reload(new, POOL)
    for _ in range(3):
        await company.pass_ms(2_000)
        assert "limited" not in tick_of(old).terms
        held = [await old.admit("limited") for _ in range(2)]
        assert await refuse(old, "limited") == "concurrency_limit"
        for each in held:
            await old.settle(each)
    await reload(old, POOL)
    assert tick_of(old) == tick_of(new)
    assert (await new.view()).total == InUse()


async def test_a_guarantee_that_only_an_old_configuration_knows_is_kept_there(
    company: Company,
) -> None:
    """In a pool that others have filled."""
    silver = replace(GOLD, name="silver")
    before = replace(POOL, entitlements={**POOL.entitlements, "silver": silver})
    old, new = await company.join_all(2, before)
    await reload(new, POOL)
    await company.pass_ms(1_000)
    for _ in range(8):
        await new.admit("spot")
    held = [await old.admit("silver") for _ in range(2)]
    assert all(each.lease.within_guarantee for each in held)
    assert await refuse(old, "silver") == "concurrency_limit"


async def test_what_only_an_old_configuration_knows_is_divided_when_the_store_is_away(
    company: Company,
) -> None:
    """As all else is: half of it for each of two replicas."""
    limited = entitlement("limited", ServiceClass.ELASTIC, limits=Limits(concurrency=4))
    before = replace(POOL, entitlements={**POOL.entitlements, "limited": limited})
    old, new = await company.join_all(2, before)
    await reload(new, POOL)
    await company.pass_ms(1_000)
    assert isinstance(old.store, HarmedStore)
    old.store.is_away = True
    for _ in range(2):
        await old.admit("limited")
    assert await refuse(old, "limited") == "concurrency_limit"


async def test_whoever_has_the_configuration_in_force_is_the_first_to_take_over(
    company: Company,
) -> None:
    """Though one that has not loaded it has been waiting for as long."""
    _, new, heir = await company.join_all(3)
    changed = replace(POOL, capacity=replace(CAPACITY, concurrency=4))
    await reload(new, changed)
    await reload(heir, changed)
    await company.pass_ms(2_000)
    company.alive.remove(new)
    for _ in range(10):
        await company.pass_ms(1_000)
        assert tick_of(heir).usable.concurrency == 4
    assert [tick_of(one) for one in company.alive] == [tick_of(heir)] * 2
    assert tick_of(heir).number > 2


async def test_whoever_has_the_old_configuration_takes_over_when_nobody_else_is_left(
    company: Company,
) -> None:
    """Better old terms than none."""
    old, new = await company.join_all(2)
    await reload(new, replace(POOL, capacity=replace(CAPACITY, concurrency=4)))
    await company.pass_ms(2_000)
    number = tick_of(old).number
    company.alive.remove(new)
    await company.pass_ms(2 * LEAD_MS + 1_000)
    assert tick_of(old).number > number
    await company.pass_ms(5_000)
    assert tick_of(old).usable.concurrency == 8


# Leases


async def test_leases_of_a_replica_that_died_come_back_and_are_told_once(company: Company) -> None:
    """By whoever sweeps them; those of the living stay."""
    living, other, dying = await company.join_all(3)
    await dying.admit("spot")
    await dying.admit("elastic")
    await living.admit("spot")
    company.alive.remove(dying)
    await company.pass_ms(TTL_MS, round_ms=2_000)
    assert (await living.view()).total.in_flight == 1
    told = [each for one in (living, other) for each in one.observer.settlements]
    assert sorted((each.entitlement, each.ending.value) for each in told) == [
        ("elastic", Ending.EXPIRED.value),
        ("spot", Ending.EXPIRED.value),
    ]


async def test_a_lease_that_was_given_up_for_lost_is_restored_by_its_holder(
    company: Company,
) -> None:
    """It was held up for longer than its leases live; then they are held again, and charged no second time."""
    awake, slow = await company.join_all(2)
    held = [(slow, await slow.admit("spot", 4_000)) for _ in range(2)]
    company.alive.remove(slow)
    await company.pass_ms(TTL_MS, round_ms=2_000)
    assert (await awake.view()).total == InUse()
    company.alive.append(slow)
    await company.pass_ms(ROUND_MS)
    assert (await awake.view()).total == InUse(2, 2, 8_000, 8_000_000)
    left = (await awake.admit("spot", 100)).balance.remaining_tokens
    assert left == 10_000 - 100
    await settle_all(held)
    assert (await awake.view()).total.in_flight == 1


async def test_an_eviction_reaches_a_holder_that_looks(company: Company) -> None:
    """Whoever needed the room is elsewhere, and told nobody; as many end as are needed, the newest."""
    holder, other = await company.join_all(2)
    await company.at_once()  # the first renewal is done
    held = [await holder.admit("batch") for _ in range(8)]
    gold = await other.admit("gold")
    assert not any(each.holding.is_evicted for each in held)
    await company.at_once()
    assert [each.holding.is_evicted for each in held] == [False] * 7 + [True]
    await holder.settle(held.pop())
    await company.pass_ms(ROUND_MS)
    assert not any(each.holding.is_evicted for each in held)
    assert not gold.holding.is_evicted
    assert (await other.view()).total.in_flight == 8


async def test_an_eviction_reaches_a_holder_that_renews(company: Company) -> None:
    """As of a pool that its configuration has lost, and that it does not look at any more."""
    holder, other = await company.join_all(2, POOL, OTHER)
    held = [await holder.admit("batch") for _ in range(8)]
    await reload(holder, OTHER)
    await company.pass_ms(ROUND_MS)
    await other.admit("gold")
    await company.at_once()
    assert not any(each.holding.is_evicted for each in held)
    await company.pass_ms(TTL_MS // 2, round_ms=2_000)
    assert [each.holding.is_evicted for each in held] == [False] * 7 + [True]


# Books that are lost


@pytest.mark.parametrize("order", [list, lambda each: each[::-1]], ids=["leader", "follower"])
async def test_lost_books_are_opened_anew_with_all_that_is_held_and_owed(
    company: Company, order: Callable[[list[Replica]], list[Replica]]
) -> None:
    """Whoever comes first: each replica brings its leases, and debts go on from where they were."""
    everybody = await company.join_all(3)
    held = await run_into_debt(company, *everybody)
    before, in_use = tick_of(everybody[0]), (await everybody[0].view()).total
    company.lose_the_books()
    company.alive = order(everybody)
    await company.at_once()
    await company.at_once()
    assert (await everybody[0].view()).total == in_use
    assert [tick_of(one).standings for one in everybody] == [before.standings] * 3
    assert [tick_of(one).terms for one in everybody] == [before.terms] * 3
    assert await refuse(everybody[2], "elastic") == "pool_contended"
    await settle_all(held)
    assert (await everybody[0].view()).total == InUse()
    await company.pass_ms(3_000)
    assert len({tick_of(one).number for one in everybody}) == 1
    assert tick_of(everybody[0]).number == before.number + 3
    assert debt_of(everybody[0]) > 0


@pytest.mark.parametrize("harm", ["unsent", "unanswered"])
@pytest.mark.parametrize("operation", ["open", "look", "publish", "restore", "sweep"])
async def test_lost_books_are_opened_anew_though_the_server_falters(
    company: Company, operation: str, harm: str
) -> None:
    """It fails once more just then: a round later what is held and owed is in the books all the same."""
    one = await company.join(POOL)
    held = await run_into_debt(company, one)
    before = tick_of(one)
    company.lose_the_books()
    setattr(one.store, harm, operation)
    for _ in range(3):
        await company.at_once()
    assert (await one.view()).total.in_flight == len(held)
    late = await company.join(POOL)
    assert tick_of(late).standings == before.standings
    await settle_all(held)
    assert (await one.view()).total == InUse()


async def test_a_replica_that_missed_the_loss_does_not_take_new_books_for_old(
    company: Company,
) -> None:
    """They have come as far as those that it knew when it was held up."""
    leader, slow = await company.join_all(2)
    company.alive.remove(slow)
    await run_into_debt(company, leader)
    company.lose_the_books()
    await company.at_once()
    company.alive.append(slow)
    await company.at_once()
    assert tick_of(slow) == tick_of(leader)


async def test_lost_books_are_opened_with_the_configuration_that_was_loaded_last_known(
    company: Company,
) -> None:
    """Replicas whose configurations differ agree again on one of them, and go on together."""
    old, new = await company.join_all(2)
    await reload(new, replace(POOL, capacity=replace(CAPACITY, concurrency=4)))
    await company.pass_ms(1_000)
    company.lose_the_books()
    await company.pass_ms(2_000)
    assert tick_of(old) == tick_of(new)
    number = tick_of(new).number
    await company.pass_ms(5_000)
    assert tick_of(old) == tick_of(new)
    assert tick_of(new).number == number + 5
