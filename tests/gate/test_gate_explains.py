"""The gate remembers what it decided, and tells who waited for how long."""

import asyncio
from dataclasses import replace

import pytest

from envoy_tokenpools.config import ServerSettings
from envoy_tokenpools.core.pool import EntitlementState, ServiceClass
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.gate.order import Admitted, Verdict
from envoy_tokenpools.observer import Ending, Explanation, Outcome, WaitEnd
from tests.support.gate import GateDesk, by_ids, order_for
from tests.support.pools import amount, entitlement, pool

FIRM = entitlement("firm", ServiceClass.GUARANTEED, amount(1_000, 1, 10_000_000))
SPOT = entitlement("spot", ServiceClass.SPOT)
PATIENT = replace(entitlement("patient", ServiceClass.SPOT), max_wait_ms=1_000)
GONE = replace(entitlement("gone", ServiceClass.SPOT), state=EntitlementState.PENDING)
POOL = pool(amount(sequences=2), FIRM, SPOT, PATIENT, GONE)


async def ask(desk: GateDesk, name: str, request_id: str, tokens: int = 10) -> Verdict:
    """A request with an id."""
    order = order_for(desk.gate.config, by_ids(tokens), name)
    return await desk.gate.admit(replace(order, request_id=request_id))


def explained(desk: GateDesk, request_id: str) -> Explanation:
    """What must be known."""
    explanation = desk.gate.explain(request_id)
    assert explanation is not None
    return explanation


async def test_every_way_of_a_decision_can_be_asked_for() -> None:
    """Inside a baseline, by what is free, shed, and without capacity behind it."""
    desk = await GateDesk.open(POOL)
    await ask(desk, "spot", "free")
    await ask(desk, "spot", "full-1")
    await ask(desk, "spot", "full-2")
    await ask(desk, "firm", "reserved")
    await ask(desk, "gone", "pending")
    desk.clock.advance(250)
    told = {name: explained(desk, name) for name in ("free", "full-2", "reserved", "pending")}
    assert [each.rule[:7] for each in told.values()] == ["rule 5c", "rule 5b", "rule 5a", "rule 3:"]
    assert [each.outcome for each in told.values()] == [
        *(Outcome.ADMITTED, Outcome.SHED, Outcome.ADMITTED, Outcome.REJECTED),
    ]
    assert told["full-2"].shortage is not None
    assert told["full-2"].shortage.need == 1
    assert told["full-2"].age_ms == 250
    priority = told["reserved"].priority
    assert priority is not None
    assert priority.weight > 100
    assert desk.gate.explain("unknown") is None


async def test_the_end_and_an_eviction_are_added() -> None:
    """By the request's own id."""
    desk = await GateDesk.open(POOL)
    for request_id, ending in (("good", Ending.COMPLETED), ("bad", Ending.EVICTED)):
        verdict = await ask(desk, "spot", request_id)
        assert isinstance(verdict, Admitted)
        await desk.settle(verdict, ending=ending)
    assert explained(desk, "good").ended is not None
    assert explained(desk, "bad").outcome is Outcome.EVICTED


async def test_a_request_that_can_never_fit_is_explained_too() -> None:
    """It is a 400, and no rule of admission."""
    small = replace(POOL, capacity=amount(sequences=2, kv_bytes=20_000))
    desk = await GateDesk.open(small)
    with pytest.raises(RequestError):
        await ask(desk, "spot", "huge", tokens=1_000)
    assert explained(desk, "huge").rule.startswith("none: ")


async def test_nothing_is_kept_if_nothing_is_to_be() -> None:
    """`explain_last: 0` turns it off."""
    desk = await GateDesk.open(POOL, server=ServerSettings(explain_last=0))
    await ask(desk, "spot", "free")
    assert desk.gate.explain("free") is None


async def test_a_wait_is_told_with_its_end() -> None:
    """Admitted when capacity comes free, gone with the client; and shed when nobody has time any more."""
    desk = await GateDesk.open(pool(amount(sequences=1), SPOT, PATIENT))
    held = await ask(desk, "spot", "held")
    assert isinstance(held, Admitted)
    waiting = asyncio.create_task(ask(desk, "patient", "patient"))
    leaving = asyncio.create_task(ask(desk, "patient", "leaving"))
    closing = asyncio.create_task(ask(desk, "patient", "closing"))
    for _ in range(5):
        await asyncio.sleep(0)
    (report,) = desk.gate.report()
    assert report.waiting == 3
    assert {each.name: each.waiting for each in report.entitlements}["patient"] == 3
    desk.clock.advance(300)
    assert desk.gate.report()[0].oldest_wait_ms == 300
    leaving.cancel()
    await desk.settle(held)
    assert isinstance(await waiting, Admitted)
    await desk.gate.close()
    await closing
    ends = {(event.end, event.waited_ms) for event in desk.observer.waits}
    assert ends == {(WaitEnd.GONE, 300), (WaitEnd.ADMITTED, 300), (WaitEnd.SHED, 300)}
    assert len(desk.observer.waits) == 3
    told = explained(desk, "patient")
    assert told.waited_ms == 300
    assert told.rule.endswith("; admitted after a wait of 300 ms")
    assert explained(desk, "closing").rule.endswith("; shed after a wait of 300 ms")
