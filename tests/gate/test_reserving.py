"""Requests that wait for capacity: who gets it, who does not, and that nothing is left of either."""

import asyncio
from dataclasses import replace

import pytest

from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import Entitlement, Limits, Mode, Pool, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.gate.order import Admitted, Refused, Verdict
from envoy_tokenpools.observer import Decided, Ending, Outcome
from envoy_tokenpools.store.memory import MemoryStore
from tests.support.gate import DistantStore, GateDesk, by_ids, configured, order_for
from tests.support.pools import amount, entitlement, pool

StoreKind = type[MemoryStore] | type[DistantStore]

LONG_MS = 60_000
"""Longer than any test takes: who waits this long waits for something to happen."""

A = replace(entitlement("a", ServiceClass.SPOT), max_wait_ms=LONG_MS)
B = replace(entitlement("b", ServiceClass.SPOT), max_wait_ms=LONG_MS)
HASTY = entitlement("hasty", ServiceClass.SPOT)
BODY = by_ids(10)


def one_at_a_time(*who: Entitlement, sequences: int = 1) -> Pool:
    """A pool that runs one sequence."""
    return replace(pool(amount(sequences=sequences), *(who or (A, B, HASTY))), window_ms=1_000)


async def turns(count: int = 5) -> None:
    """Let whatever is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


class Queue:
    """A gate whose capacity is taken, and those who ask it."""

    def __init__(self, desk: GateDesk, held: list[Admitted]) -> None:
        self.desk = desk
        self.held = held
        self.waits_told: list[int] = []

    @classmethod
    async def open(cls, *pools: Pool, store: StoreKind = MemoryStore, takes: int = 1) -> "Queue":
        """The pools, the first of which is full."""
        desk = await GateDesk.open(*(pools or (one_at_a_time(),)), store=store)
        held = [await desk.admit(by_ids(10), "hasty") for _ in range(takes)]
        return cls(desk, held)

    @property
    def waiting(self) -> int:
        """How many wait."""
        config = self.desk.gate.config
        return self.desk.gate.house.pool(config.pools["pool"]).waiting.total

    async def ask(self, name: str = "a", body: bytes = BODY) -> "asyncio.Task[Verdict]":
        """A request that has had time to be refused once."""

        async def told(max_wait_ms: int) -> None:
            self.waits_told.append(max_wait_ms)

        order = order_for(self.desk.gate.config, body, name)
        asking = asyncio.create_task(self.desk.gate.admit(order, told))
        await turns()
        return asking

    async def free(self) -> None:
        """One of those that run ends."""
        await self.desk.settle(self.held.pop())
        await turns()

    async def is_empty(self) -> bool:
        """Whether nothing is held, and nobody waits."""
        await turns()
        return await self.desk.total() == InUse() and self.waiting == 0


async def test_freed_capacity_goes_to_who_waits() -> None:
    """Its verdict comes when the running request ends; it was told once for how long it may wait."""
    queue = await Queue.open()
    asking = await queue.ask()
    assert (asking.done(), queue.waiting, queue.waits_told) == (False, 1, [LONG_MS])
    await queue.free()
    verdict = await asking
    assert isinstance(verdict, Admitted)
    assert queue.waiting == 0
    assert [event.outcome for event in queue.desk.observer.decisions] == [Outcome.ADMITTED] * 2
    await queue.desk.settle(verdict)
    assert await queue.is_empty()


async def test_who_may_not_wait_is_shed_at_once() -> None:
    """Without `max_wait`."""
    queue = await Queue.open()
    verdict = await (await queue.ask("hasty"))
    assert isinstance(verdict, Refused)
    assert queue.waits_told == []


async def test_the_wait_ends_with_the_deadline() -> None:
    """The answer is the last refusal, and it is told as shed, once."""
    queue = await Queue.open(one_at_a_time(replace(A, max_wait_ms=1), HASTY))
    verdict = await (await queue.ask())
    assert isinstance(verdict, Refused)
    assert verdict.answer.status == 429
    assert [
        (event.outcome, event.reason)
        for event in queue.desk.observer.decisions
        if event.entitlement == "a"
    ] == [(Outcome.SHED, "pool_contended")]
    await queue.free()
    assert await queue.is_empty()


async def test_the_heavier_entitlement_is_served_first() -> None:
    """Whoever came first; between equals the first."""
    heavy = replace(
        entitlement("heavy", ServiceClass.ELASTIC, Resources(1, 1, 1)), max_wait_ms=LONG_MS
    )
    queue = await Queue.open(one_at_a_time(A, B, HASTY, heavy))
    first, second, third = await queue.ask("b"), await queue.ask("a"), await queue.ask("heavy")
    order = []
    for _ in range(3):
        await queue.free()
        done = {"first": first, "second": second, "third": third}
        (served,) = [name for name, one in done.items() if one.done() and name not in order]
        order.append(served)
        verdict = done[served].result()
        assert isinstance(verdict, Admitted)
        queue.held.append(verdict)
    assert order == ["third", "first", "second"]
    await queue.free()
    assert await queue.is_empty()


async def test_one_that_waits_for_its_own_limit_holds_up_nobody_else() -> None:
    """Its neighbour behind it fits."""
    narrow = replace(A, limits=Limits(concurrency=1))
    queue = await Queue.open(one_at_a_time(narrow, B, HASTY, sequences=3))
    own = await queue.ask("a")
    blocked, other = await queue.ask("a"), None
    full = await queue.ask("b")
    assert isinstance(full.result(), Admitted)
    other = await queue.ask("b")
    assert (own.done(), blocked.done(), other.done(), queue.waiting) == (True, False, False, 2)
    await queue.free()
    assert (blocked.done(), other.done()) == (False, True)
    blocked.cancel()
    await turns()
    assert queue.waiting == 0


@pytest.mark.parametrize("store", [MemoryStore, DistantStore])
async def test_a_client_that_leaves_waits_no_longer(store: StoreKind) -> None:
    """Nothing is held for it, then or later."""
    queue = await Queue.open(store=store)
    asking = await queue.ask()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert queue.waiting == 0
    await queue.free()
    assert await queue.is_empty()


@pytest.mark.parametrize("store", [MemoryStore, DistantStore])
@pytest.mark.parametrize("passed", range(9))
async def test_a_client_that_leaves_just_when_it_is_served(store: StoreKind, passed: int) -> None:
    """Whichever comes first: it has its lease, or the lease goes back."""
    queue = await Queue.open(store=store)
    asking = await queue.ask()
    settling = asyncio.create_task(queue.desk.settle(queue.held.pop()))
    await turns(passed)
    asking.cancel()
    await turns(20)
    await settling
    if not asking.cancelled():
        verdict = asking.result()
        assert isinstance(verdict, Admitted)
        await queue.desk.settle(verdict)
    assert await queue.is_empty()


@pytest.mark.parametrize("passed", range(9))
async def test_the_deadline_strikes_just_when_it_is_served(passed: int) -> None:
    """A lease that comes too late goes back."""
    queue = await Queue.open(store=DistantStore)
    asking = await queue.ask()
    (waiter,) = queue.desk.gate.house.pool(queue.desk.gate.config.pools["pool"]).waiting.in_order(
        {}
    )
    settling = asyncio.create_task(queue.desk.settle(queue.held.pop()))
    await turns(passed)
    waiter.give_up()
    await turns(20)
    await settling
    verdict = await asking
    if isinstance(verdict, Admitted):
        await queue.desk.settle(verdict)
    assert await queue.is_empty()


async def test_an_entitlement_that_is_removed_waits_no_longer() -> None:
    """A reload took it away."""
    queue = await Queue.open()
    asking = await queue.ask()
    await queue.desk.gate.reload(configured(one_at_a_time(B, HASTY)))
    await queue.free()
    with pytest.raises(RequestError, match="removed"):
        await asking
    assert await queue.is_empty()


async def test_a_store_that_fails_is_told_to_who_waits() -> None:
    """503, as it is told to whoever comes then."""
    queue = await Queue.open(store=DistantStore)
    asking = await queue.ask()
    assert isinstance(queue.desk.store, DistantStore)
    queue.desk.store.failing = {"reserve"}
    await queue.free()
    verdict = await asking
    assert isinstance(verdict, Refused)
    assert verdict.answer.status == 503
    assert await queue.is_empty()


async def test_nobody_waits_in_shadow_mode() -> None:
    """What would be shed passes at once."""
    queue = await Queue.open(replace(one_at_a_time(), mode=Mode.SHADOW))
    assert isinstance(await (await queue.ask()), Admitted)
    assert queue.waits_told == []


async def test_nobody_waits_for_what_never_comes() -> None:
    """A pool whose token rate is all withheld for another."""
    dedicated = entitlement("d", ServiceClass.DEDICATED, Resources(1_000, 1, 1))
    full = replace(pool(Resources(1_000, 10**9, 4), dedicated, A), window_ms=1_000)
    desk = await GateDesk.open(full)
    assert isinstance(await desk.ask(BODY), Refused)


async def test_who_waits_is_known_by_what_it_asked_for() -> None:
    """Asked again while it waits, it is the same demand, though it has no body to be known by."""
    queue = await Queue.open()
    order = replace(order_for(queue.desk.gate.config, BODY, "a"), fingerprint=0)
    asking = asyncio.create_task(queue.desk.gate.admit(order))
    await turns()
    live = queue.desk.gate.house.pool(order.pool)
    for _ in range(3):
        live.waiting.has_news = True
        await queue.desk.gate._reservations.serve(live)
    reading = await queue.desk.store.close_tick("pool")
    assert reading is not None
    assert reading.meters["a"].demanded_tokens == 10
    assert reading.meters["a"].pending_concurrency == 1
    asking.cancel()


async def test_closing_sends_everybody_away() -> None:
    """With the refusal that they had."""
    queue = await Queue.open()
    asking = await queue.ask()
    await queue.desk.gate.close()
    assert isinstance(await asking, Refused)
    await queue.free()
    assert await queue.is_empty()


async def test_a_full_waiting_room_sheds() -> None:
    """Beyond `max_waiting` nobody waits."""
    queue = await Queue.open(replace(one_at_a_time(), max_waiting=1))
    first = await queue.ask()
    assert isinstance(await (await queue.ask("b")), Refused)
    await queue.free()
    assert isinstance(await first, Admitted)


async def test_a_waiting_request_counts_its_decision_without_the_wait() -> None:
    """Decision time says what we cost, not how full the pool was."""
    queue = await Queue.open()
    asking = await queue.ask()
    queue.desk.clock.advance(500)
    await queue.free()
    await asking
    decided: list[Decided] = queue.desk.observer.decisions
    assert [event.decision_us for event in decided] == [0, 0]


async def test_an_evicted_request_is_charged_nothing_before_its_answer() -> None:
    """And what was delivered of it afterwards."""
    desk = await GateDesk.open(one_at_a_time())
    admitted = await desk.admit(by_ids(100, output=40))
    await desk.settle(admitted, ending=Ending.EVICTED, status=None)
    assert desk.observer.settlements[0].prompt_tokens == 0
