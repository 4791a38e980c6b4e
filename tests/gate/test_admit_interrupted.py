"""Admission that is interrupted: by a client that leaves, or by a reload."""

import asyncio
import json
from dataclasses import replace

import pytest

from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import Entitlement, Pool, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.gate.order import Admitted
from envoy_tokenpools.openai.usage import Usage
from tests.support.gate import DistantStore, GateDesk, by_ids, configured, metered
from tests.support.pools import amount, entitlement, pool

SPOT = entitlement("a", ServiceClass.SPOT)
OTHER = entitlement("b", ServiceClass.SPOT)
WIDE = amount()


def small(capacity: Resources = WIDE, *who: Entitlement) -> Pool:
    """A pool whose buckets are a second deep."""
    return replace(pool(capacity, *(who or (SPOT, OTHER))), window_ms=1_000)


# Cancelled on the way


async def test_a_caller_that_leaves_while_counting_leaves_nothing() -> None:
    """The prompt was large, and the client impatient."""
    desk = await GateDesk.open(small())
    desk.counter.held = asyncio.Event()
    asking = asyncio.create_task(desk.ask(by_ids(10)))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    desk.counter.held.set()
    assert await desk.total() == InUse()
    assert desk.observer.decisions == []


async def test_a_large_prompt_is_counted_elsewhere() -> None:
    """And then decided as any other."""
    desk = await GateDesk.open(small())
    desk.counter.held = asyncio.Event()
    asking = asyncio.create_task(desk.ask(json.dumps({"model": "m", "prompt": "a b c"}).encode()))
    await asyncio.sleep(0)
    assert not asking.done()
    desk.counter.held.set()
    verdict = await asking
    assert isinstance(verdict, Admitted)
    assert verdict.raw_prompt_tokens == 3


@pytest.mark.parametrize("turns", range(1, 5))
async def test_a_caller_that_leaves_while_the_store_is_asked_leaves_nothing(turns: int) -> None:
    """Whether the claim was on its way or its answer was: what was taken is given back."""
    desk = await GateDesk.open(small(amount(100)), store=DistantStore)
    asking = asyncio.create_task(desk.ask(by_ids(100)))
    for _ in range(turns):
        await asyncio.sleep(0)
    if not asking.done():
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    else:
        verdict = asking.result()
        assert isinstance(verdict, Admitted)
        await desk.settle(verdict, metered(Usage(0, 0)))
    await desk.gate.close()
    assert await desk.total() == InUse()
    await desk.admit(by_ids(100))


async def test_undoing_that_fails_is_counted() -> None:
    """The lease then returns by its time to live: nobody renews it."""
    desk = await GateDesk.open(small(), store=DistantStore)
    assert isinstance(desk.store, DistantStore)
    desk.store.failing.add("settle")
    asking = asyncio.create_task(desk.ask(by_ids(10)))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await desk.gate.close()
    assert desk.observer.store_failures == ["settle"]
    await desk.pass_ms(desk.config.server.lease_ttl_ms)
    assert await desk.total() == InUse()


# Reloads on the way


async def test_a_reload_that_removes_the_entitlement_meanwhile_is_an_error() -> None:
    """404 as for any other who has none."""
    desk = await GateDesk.open(small())
    desk.counter.held = asyncio.Event()
    asking = asyncio.create_task(desk.ask(by_ids(10)))
    await asyncio.sleep(0)
    await desk.gate.reload(configured(small(amount(), OTHER)))
    desk.counter.held.set()
    with pytest.raises(RequestError) as raised:
        await asking
    assert raised.value.status == 404
    assert await desk.total() == InUse()


async def test_a_reload_that_removes_the_pool_meanwhile_decides_by_its_last_terms() -> None:
    """The request was let in before; its lease is settled in the books of that pool."""
    desk = await GateDesk.open(small())
    desk.counter.held = asyncio.Event()
    asking = asyncio.create_task(desk.ask(by_ids(10)))
    await asyncio.sleep(0)
    await desk.gate.reload(configured(replace(small(), name="new", models=("n",))))
    desk.counter.held.set()
    verdict = await asking
    assert isinstance(verdict, Admitted)
    assert (await desk.total()).in_flight == 1
    await desk.settle(verdict, metered(Usage(10, 1), "x"))
    assert await desk.total() == InUse()
