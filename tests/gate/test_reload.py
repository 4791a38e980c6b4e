"""What a new configuration changes, what it keeps, and what becomes of pools that are gone."""

from dataclasses import replace

from envoy_tokenpools.config import ServerSettings
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Tick
from envoy_tokenpools.gate.housekeeping import RENEWALS_PER_TTL
from envoy_tokenpools.gate.order import Admitted
from envoy_tokenpools.openai.usage import Usage
from tests.support.gate import GateDesk, by_ids, configured, metered, order_for
from tests.support.pools import amount, entitlement, pool

SPOT = entitlement("a", ServiceClass.SPOT)
ELASTIC = entitlement("b", ServiceClass.ELASTIC, amount(500, 4, 10**9))
CAPACITY = Resources(tokens_per_second=1_000, kv_bytes=10**9, concurrency=8)
POOL = replace(pool(CAPACITY, SPOT, ELASTIC), window_ms=1_000)
TTL_MS = ServerSettings().lease_ttl_ms


def tick_of(desk: GateDesk, name: str = "pool") -> Tick:
    """The latest tick of a pool."""
    return desk.gate.house.pool(desk.gate.config.pools[name]).tick


async def test_a_reload_keeps_leases_debts_and_lessons() -> None:
    """Of pools and entitlements of the same name."""
    desk = await GateDesk.open(replace(POOL, capacity=replace(CAPACITY, concurrency=1)))
    admitted = await desk.admit(by_ids(100))
    await desk.refuse(by_ids(300), "b")
    await desk.pass_ms(5_000)
    live = desk.gate.house.pool(POOL)
    live.prompt_ratio("m").value = 2.0
    debt = tick_of(desk).standings["b"].debt
    assert debt > 0
    wider = replace(ELASTIC, slo_target_ms=100)
    await desk.gate.reload(configured(replace(POOL, entitlements={"a": SPOT, "b": wider})))
    assert tick_of(desk).standings["b"].debt == debt
    assert (await desk.total()).in_flight == 1
    await desk.pass_ms(4_000)  # the ramp of what the reload added
    assert (await desk.admit(by_ids(100), "b")).lease.cost.prompt_tokens == 200
    await desk.pass_ms(TTL_MS // RENEWALS_PER_TTL)
    await desk.pass_ms(TTL_MS - 1)
    await desk.settle(admitted, metered(Usage(100, 1), "x"))
    assert (await desk.total()).in_flight == 1


async def test_lost_capacity_counts_at_once_and_returns_slowly() -> None:
    """A quarter of what came back each second; a reload in between does not start it over."""
    desk = await GateDesk.open(POOL)
    half = replace(POOL, capacity=replace(CAPACITY, concurrency=4))
    await desk.gate.reload(configured(half))
    assert desk.gate.report()[0].usable.concurrency == 4
    for number in range(4):
        await desk.admit(by_ids(1 + number))
    assert (await desk.refuse(by_ids(1), "b")).answer.status == 429
    await desk.gate.reload(configured(POOL))
    assert (await desk.refuse(by_ids(1), "b")).answer.status == 429
    desk.clock.advance(1_000)
    await desk.gate.reload(configured(replace(POOL, image_tokens=7)))
    await desk.admit(by_ids(2), "b")
    assert (await desk.refuse(by_ids(1), "b")).answer.status == 429
    for second, sequences in ((1, 5), (2, 6), (3, 7), (4, 8), (5, 8)):
        assert desk.gate.report()[0].usable.concurrency == sequences, second
        desk.clock.advance(1_000)


async def test_shorter_lives_and_ticks_count_from_the_reload_on() -> None:
    """Not only when the next renewal or tick of the old length is due."""
    slow = replace(POOL, tick_ms=30_000)
    desk = await GateDesk.open(slow, server=ServerSettings(lease_ttl_ms=3_600_000))
    await desk.pass_ms(0)
    short = ServerSettings(lease_ttl_ms=5_000)
    await desk.gate.reload(configured(replace(POOL, tick_ms=1_000), server=short))
    await desk.admit(by_ids(100))
    for _ in range(6):
        await desk.pass_ms(1_000)
    assert (await desk.total()).in_flight == 1
    assert tick_of(desk).number == 6


async def test_a_reload_adds_and_removes_pools() -> None:
    """The new one serves at once; leases of the old one are settled in its books."""
    desk = await GateDesk.open(POOL)
    admitted = await desk.admit(by_ids(100))
    new = replace(POOL, name="new", models=("m",), entitlements={"a": SPOT})
    await desk.gate.reload(configured(new))
    assert [report.name for report in desk.gate.report()] == ["new"]
    assert (await desk.admit(by_ids(100))).order.pool.name == "new"
    for _ in range(4):
        await desk.pass_ms(TTL_MS // 2)
    assert (await desk.total("pool")).in_flight == 1
    await desk.settle(admitted, metered(Usage(100, 1), "x"))
    assert await desk.total("pool") == InUse()


async def test_a_reload_changes_who_is_known() -> None:
    """By the new configuration alone."""
    desk = await GateDesk.open(POOL)
    changed = configured(replace(POOL, entitlements={"c": replace(SPOT, name="c")}))
    await desk.gate.reload(changed)
    assert desk.gate.config is changed
    await desk.admit(by_ids(10), "c")
    assert desk.gate.directory.identify("key-c")


async def test_a_pool_that_is_gone_is_kept_until_its_last_request_has_ended() -> None:
    """Its leases are swept and renewed until then; afterwards nothing of it is left."""
    other = replace(POOL, name="other", models=("n",))
    desk = await GateDesk.open(POOL, other)
    admitted = await desk.ask(by_ids(100, model="n"))
    assert isinstance(admitted, Admitted)
    await desk.gate.reload(configured(POOL))
    for _ in range(3 * RENEWALS_PER_TTL):
        await desk.pass_ms(TTL_MS // RENEWALS_PER_TTL)
        assert (await desk.total("other")).in_flight == 1
    assert "other" in desk.gate.house._live
    await desk.settle(admitted)
    assert await desk.total("other") == InUse()
    await desk.pass_ms(250)
    assert set(desk.gate.house._live) == {"pool"}


async def test_a_request_that_began_before_its_pool_was_forgotten_ends() -> None:
    """Its order was made under the old configuration; it is judged and settled all the same."""
    other = replace(POOL, name="other", models=("n",))
    desk = await GateDesk.open(POOL, other)
    order = order_for(desk.config, by_ids(100, model="n"))
    await desk.gate.reload(configured(POOL))
    await desk.pass_ms(250)
    assert "other" not in desk.gate.house._live
    admitted = await desk.gate.admit(order)
    assert isinstance(admitted, Admitted)
    await desk.settle(admitted)
    assert await desk.total("other") == InUse()


async def test_shares_follow_a_ramp_within_a_second() -> None:
    """Whatever the tick: guarantees that were scaled down with the capacity do not wait a minute to come back."""
    slow = replace(POOL, tick_ms=30_000, ramp_per_second=0.25)
    desk = await GateDesk.open(replace(slow, capacity=replace(CAPACITY, concurrency=0)))
    await desk.gate.reload(configured(slow))
    usable = []
    for _ in range(5):
        await desk.pass_ms(1_000)
        usable.append(tick_of(desk).usable.concurrency)
    assert usable == [2, 4, 6, 8, 8]
    assert tick_of(desk).number == 4
    await desk.pass_ms(999)
    assert tick_of(desk).number == 4


async def test_a_reload_forgets_what_was_learned_about_those_who_are_gone() -> None:
    """Of others it stays."""
    desk = await GateDesk.open(replace(POOL, models=("m", "n")))
    for name, model in (("a", "m"), ("a", "n"), ("b", "m")):
        admitted = await desk.ask(by_ids(200, model=model), name)
        assert isinstance(admitted, Admitted)
        await desk.settle(admitted, metered(Usage(200, 1), "x"))
    await desk.gate.reload(configured(replace(POOL, entitlements={"a": SPOT})))
    live = desk.gate.house.pool(POOL)
    assert (set(live.outputs), set(live.ratios)) == ({("a", "m")}, {"m"})
