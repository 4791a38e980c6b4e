"""What goes on between requests."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from envoy_tokenpools.config import ServerSettings
from envoy_tokenpools.core.admission import Lease
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import OnStoreError, Pool, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Tick
from envoy_tokenpools.errors import StoreError
from envoy_tokenpools.gate import housekeeping
from envoy_tokenpools.gate.housekeeping import RENEWALS_PER_TTL
from envoy_tokenpools.observer import Ending, Settled
from envoy_tokenpools.openai.usage import Usage, UsageSource
from tests.support.gate import DistantStore, GateDesk, by_ids, configured, metered
from tests.support.pools import amount, claim, cost, entitlement, pool, terms

SPOT = entitlement("a", ServiceClass.SPOT)
ELASTIC = entitlement("b", ServiceClass.ELASTIC, amount(500, 4, 10**9))
CAPACITY = Resources(tokens_per_second=1_000, kv_bytes=10**9, concurrency=8)
POOL = replace(pool(CAPACITY, SPOT, ELASTIC), window_ms=1_000)
TTL_MS = ServerSettings().lease_ttl_ms


async def distant(*pools: Pool) -> tuple[GateDesk, DistantStore]:
    """A gate whose store can be made to fail, and that store."""
    desk = await GateDesk.open(*(pools or (POOL,)), store=DistantStore)
    assert isinstance(desk.store, DistantStore)
    return desk, desk.store


def tick_of(desk: GateDesk, name: str = "pool") -> Tick:
    """The latest tick of a pool."""
    return desk.gate.house.pool(desk.gate.config.pools[name]).tick


# Ticks


async def test_a_tick_is_taken_when_it_is_due() -> None:
    """Every `tick_ms`, not before; a late one counts once."""
    desk = await GateDesk.open(POOL, now_ms=777)
    for passed_ms, number in ((0, 0), (4_999, 0), (1, 1), (4_999, 1), (1, 2), (60_000, 3), (1, 3)):
        await desk.pass_ms(passed_ms)
        assert tick_of(desk).number == number


async def test_every_pool_has_its_own_ticks() -> None:
    """Of its own length."""
    fast = replace(POOL, name="fast", models=("f",), tick_ms=1_000)
    desk = await GateDesk.open(POOL, fast)
    for _ in range(5):
        await desk.pass_ms(1_000)
    assert (tick_of(desk).number, tick_of(desk, "fast").number) == (1, 5)


async def test_a_tick_moves_debts_and_shares() -> None:
    """What was demanded and not delivered is owed, and the next terms are in force."""
    desk = await GateDesk.open(replace(POOL, capacity=replace(CAPACITY, concurrency=1)))
    await desk.admit(by_ids(100))
    await desk.refuse(by_ids(300), "b")
    before = tick_of(desk)
    await desk.pass_ms(5_000)
    after = tick_of(desk)
    assert after.standings["b"].debt > before.standings["b"].debt == 0.0
    assert after.terms["b"].weight > before.terms["b"].weight
    (report,) = desk.gate.report()
    assert report.entitlements[1].debt == after.standings["b"].debt


async def test_a_tick_that_another_replica_took_changes_nothing() -> None:
    """Its reading is not ours; ours is due again in its time."""
    desk, store = await distant()

    async def taken(_: str, __: int) -> None:
        store.calls.append("close_tick")

    store.close_tick = taken  # type: ignore[method-assign, assignment]
    before = tick_of(desk)
    await desk.pass_ms(5_000)
    await desk.pass_ms(4_999)
    assert tick_of(desk) is before
    assert store.calls.count("close_tick") == 1


# Leases


async def test_a_held_lease_is_renewed_for_as_long_as_it_is_held() -> None:
    """An hour of streaming loses nothing."""
    desk = await GateDesk.open(POOL)
    admitted = await desk.admit(by_ids(100))
    for _ in range(60):
        await desk.pass_ms(60_000 // RENEWALS_PER_TTL)
    assert (await desk.total()).in_flight == 1
    await desk.settle(admitted, metered(Usage(100, 1), "x"))
    assert await desk.total() == InUse()
    assert [event.ending for event in desk.observer.settlements] == [Ending.COMPLETED]


async def test_leases_are_renewed_three_times_in_their_life() -> None:
    """Not in every round."""
    desk, store = await distant()
    await desk.admit(by_ids(100))
    store.calls.clear()
    for _ in range(60):
        await desk.pass_ms(TTL_MS // 60)
    assert store.calls.count("renew") == RENEWALS_PER_TTL


async def test_a_pool_without_leases_is_not_asked_to_renew_any() -> None:
    """Nor one whose leases have ended."""
    desk, store = await distant()
    await desk.settle(await desk.admit(by_ids(10)), metered(Usage(10, 1), "x"))
    await desk.pass_ms(TTL_MS)
    assert "renew" not in store.calls


async def test_a_lease_of_ours_survives_that_we_were_held_up() -> None:
    """Longer than its life: what is still held is renewed before anything is swept."""
    desk = await GateDesk.open(POOL)
    await desk.admit(by_ids(100))
    await desk.pass_ms(0)
    await desk.pass_ms(TTL_MS + 1)
    assert (await desk.total()).in_flight == 1
    assert desk.observer.settlements == []


async def test_a_renewal_that_failed_is_tried_again_in_the_next_round() -> None:
    """Not a third of a life later."""
    desk, store = await distant()
    await desk.admit(by_ids(100))
    store.failing.add("renew")
    await desk.pass_ms(TTL_MS - 500)
    assert desk.observer.store_failures == ["renew"]
    store.failing.clear()
    await desk.pass_ms(250)
    await desk.pass_ms(TTL_MS - 1)
    assert (await desk.total()).in_flight == 1


async def test_a_pool_may_get_its_first_lease_while_others_are_renewed() -> None:
    """Renewing takes time, and requests do not wait for it."""
    other = replace(POOL, name="other", models=("o",))
    desk, store = await distant(POOL, other)
    held = await desk.admit(by_ids(100))
    desk.clock.advance(TTL_MS // 2)
    looking_after = asyncio.create_task(desk.gate.house.round())
    await asyncio.sleep(0)
    assert store.calls[-1] == "renew"
    desk.gate.house.hold(
        desk.gate.house.pool(other), replace(held.lease, lease_id="lease-of-another-pool")
    )
    await looking_after
    assert desk.gate.is_ready


async def test_a_lost_lease_is_taken_back_and_told() -> None:
    """Its owner is gone: what it reserved stays charged, by estimate."""
    desk = await GateDesk.open(POOL)
    lost = claim("foreign", cost(100, 2), terms("a"), CAPACITY, ttl_ms=10_000)
    await desk.store.reserve("pool", lost)
    await desk.pass_ms(9_999)
    assert desk.observer.settlements == []
    await desk.pass_ms(1)
    assert await desk.total() == InUse()
    assert desk.observer.settlements == [
        Settled(
            pool="pool",
            entitlement="a",
            service_class=ServiceClass.SPOT,
            ending=Ending.EXPIRED,
            prompt_tokens=100,
            prompt_source=UsageSource.ESTIMATED,
            completion_tokens=0,
            completion_source=UsageSource.ESTIMATED,
            estimated_prompt_tokens=100,
            held_ms=10_000,
        )
    ]


async def test_a_lost_lease_of_nobody_known_is_taken_back_silently() -> None:
    """Of an entitlement that a reload removed: there is no label to count it under."""
    desk = await GateDesk.open(POOL)
    await desk.store.reserve("pool", claim("foreign", cost(), terms("gone"), CAPACITY, ttl_ms=1))
    await desk.pass_ms(1)
    assert await desk.total() == InUse()
    assert desk.observer.settlements == []


# Failures


async def test_readiness_follows_the_store() -> None:
    """Where nobody is admitted without it: lost with the first failure, back with the first round that works."""
    nobody = dict.fromkeys(ServiceClass, OnStoreError.DENY)
    desk, store = await distant(replace(POOL, on_store_error=nobody))
    assert desk.gate.is_ready
    store.failing.update(("sweep", "publish"))
    await desk.pass_ms(250)
    await desk.pass_ms(250)
    assert not desk.gate.is_ready
    assert desk.observer.store_failures == ["housekeeping", "housekeeping"]
    store.failing.clear()
    await desk.pass_ms(250)
    assert desk.gate.is_ready


async def test_nothing_is_ready_before_the_start() -> None:
    """Terms are not in force yet."""
    desk, store = await distant()
    fresh = housekeeping.Housekeeper(
        desk.config, store=store, clock=desk.clock, observer=desk.observer
    )
    assert not fresh.is_ready
    await fresh.start()
    assert fresh.is_ready


@pytest.mark.parametrize("operation", ["start", "reload"])
async def test_terms_that_could_not_be_published_are_published_in_the_next_round(
    operation: str,
) -> None:
    """Until then we are not ready: what is held back for a dedicated baseline is not held back yet."""
    gold = entitlement("gold", ServiceClass.DEDICATED, amount(500, 8, 10**8))
    dedicated = replace(POOL, entitlements={"a": SPOT, "gold": gold})
    desk, store = await distant(POOL)
    store.failing.add("publish")
    house = desk.gate.house
    if operation == "start":
        house = housekeeping.Housekeeper(
            configured(dedicated), store=store, clock=desk.clock, observer=desk.observer
        )
        await house.start()
    else:
        await desk.gate.reload(configured(dedicated))
    assert not house.store_answers
    assert house.is_ready is (operation == "reload"), (
        "it decides alone, but not before it ever knew the books"
    )
    assert desk.observer.store_failures == ["open"]
    store.failing.clear()
    desk.clock.advance(250)
    await house.round()
    assert house.store_answers
    spare = claim("1", cost(), terms("a"), CAPACITY)
    assert not isinstance((await store.reserve("pool", spare)).outcome, Lease)


async def test_a_tick_whose_terms_could_not_be_published_is_taken_again() -> None:
    """In the next round, not in the next tick."""
    desk, store = await distant()
    store.failing.add("publish")
    await desk.pass_ms(5_000)
    store.failing.clear()
    store.calls.clear()
    await desk.pass_ms(250)
    assert store.calls.count("publish") == 1
    await desk.pass_ms(250)
    assert store.calls.count("publish") == 1


async def test_what_fails_for_one_pool_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the store's failures nor a fault of ours: the other's lost leases return, and its ticks are taken."""
    faults: tuple[Exception, ...] = (StoreError("away", transient=True), ZeroDivisionError())
    for fault in faults:
        desk, store = await distant(POOL, replace(POOL, name="other", models=("n",)))
        sweep = store.sweep

        async def failing(
            name: str,
            fault: Exception = fault,
            sweep: Callable[[str], Awaitable[tuple[Lease, ...]]] = sweep,
        ) -> tuple[Lease, ...]:
            if name == "pool":
                raise fault
            return await sweep(name)

        store.sweep = failing  # type: ignore[method-assign, assignment]
        lost = claim("foreign", cost(), terms("a"), CAPACITY, ttl_ms=1)
        await store.reserve("other", lost)
        await desk.pass_ms(5_000)
        assert await desk.total("other") == InUse()
        assert (tick_of(desk).number, tick_of(desk, "other").number) == (0, 1)
        assert not desk.gate.house.store_answers
    assert "housekeeping failed" in [record.getMessage() for record in caplog.records]


async def test_a_report_keeps_the_last_reading_when_the_store_is_away() -> None:
    """Gauges do not fall to nothing."""
    desk, store = await distant()
    await desk.admit(by_ids(100, output=40))
    await desk.gate.refresh()
    store.failing.add("snapshot")
    await desk.gate.refresh()
    assert desk.observer.store_failures == ["snapshot"]
    (report,) = desk.gate.report()
    assert (report.in_flight, report.concurrency, report.reserved_tokens) == (1, 1, 100)
    (spot, elastic) = report.entitlements
    assert (spot.in_flight, spot.reserved_tokens, elastic.in_flight) == (1, 100, 0)
    assert (elastic.baseline, elastic.service_class) == (ELASTIC.baseline, ServiceClass.ELASTIC)


async def test_a_fault_in_one_round_does_not_end_the_house(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without renewals and sweeps every lease would be lost: it is logged, and the next round comes."""
    monkeypatch.setattr(housekeeping, "ROUND_SECONDS", 0)
    desk, store = await distant()
    rounds = 0
    again = asyncio.Event()

    async def sweep(_: str) -> Sequence[Lease]:
        nonlocal rounds
        rounds += 1
        await asyncio.sleep(0)
        if rounds == 1:
            raise ZeroDivisionError
        again.set()
        return ()

    store.sweep = sweep  # type: ignore[method-assign, assignment]
    running = asyncio.create_task(desk.gate.house.run())
    await asyncio.wait(
        (running, asyncio.ensure_future(again.wait())), return_when="FIRST_COMPLETED"
    )
    assert again.is_set()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
