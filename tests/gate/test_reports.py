"""Reports: who waits here, by entitlement, and how long the first of them has."""

import asyncio

import pytest

from envoy_tokenpools.clock import ManualClock
from envoy_tokenpools.config import Config
from envoy_tokenpools.core.admission import Balance, Reason, Refusal, Resource
from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.gate.housekeeping import Housekeeper
from envoy_tokenpools.gate.live import LivePool
from envoy_tokenpools.gate.reports import pool_report
from envoy_tokenpools.gate.waiting import Waiter
from envoy_tokenpools.store.base import Reply
from envoy_tokenpools.store.memory import MemoryStore
from tests.support.gate import configured
from tests.support.observers import RecordingObserver
from tests.support.pools import amount, claim, cost, entitlement, pool, terms

USABLE = amount(100, 4, 1_000)
POOL = pool(USABLE, entitlement("a", ServiceClass.SPOT), entitlement("b", ServiceClass.SPOT))
NO = Reply(
    Refusal(Reason.POOL_CONTENDED, Resource.CONCURRENCY, 1, 0, 10), Balance(0, 0, 0, 0, 0, 0)
)


@pytest.fixture
async def live() -> LivePool:
    """The pool, with nobody in it."""
    config: Config = configured(POOL)
    clock = ManualClock(0)
    house = Housekeeper(config, store=MemoryStore(clock), clock=clock, observer=RecordingObserver())
    await house.start()
    return house.pool(POOL)


def enter(live: LivePool, name: str, since_ms: int) -> Waiter:
    """Somebody begins to wait."""
    wanted = claim(f"lease-{name}-{since_ms}", cost(), terms(name), USABLE)
    waiter = Waiter(wanted, NO, since_ms, asyncio.get_running_loop().create_future())
    assert live.waiting.enter(waiter, 10)
    return waiter


async def test_nobody_waits_is_zero(live: LivePool) -> None:
    """For the pool as for each entitlement."""
    report = pool_report(live, USABLE, 5_000)
    assert (report.waiting, report.oldest_wait_ms) == (0, 0)
    assert [each.waiting for each in report.entitlements] == [0, 0]


async def test_who_waits_is_counted_by_entitlement(live: LivePool) -> None:
    """And the first to come tells how long; when it has gone, the next does."""
    first = enter(live, "b", 1_000)
    for since_ms in (2_000, 3_000):
        enter(live, "b", since_ms)
    enter(live, "gone", 4_000)
    report = pool_report(live, USABLE, 5_500)
    assert (report.waiting, report.oldest_wait_ms) == (4, 4_500)
    assert {each.name: each.waiting for each in report.entitlements} == {"a": 0, "b": 3}
    live.waiting.leave(first)
    report = pool_report(live, USABLE, 5_500)
    assert (report.waiting, report.oldest_wait_ms) == (3, 3_500)
