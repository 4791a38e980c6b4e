"""What becomes of requests while the shared store is away: the pool's `on_store_error`, by class."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.core.admission import Claim
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import Mode, OnStoreError, Pool, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.errors import StoreError
from envoy_tokenpools.gate.order import Admitted, Refused, Verdict
from envoy_tokenpools.observer import Outcome, WaitEnd
from envoy_tokenpools.openai.usage import Usage
from envoy_tokenpools.store.base import Reply
from tests.config.documents import load, pools
from tests.support.gate import DistantStore, GateDesk, by_ids, configured, metered, order_for
from tests.support.pools import entitlement, pool

ALLOW, DENY = OnStoreError
STORE_AWAY = "store_unavailable"
LONG_MS = 60_000
"""Longer than any test takes."""

HANGS_S = 10.0
"""Whoever has no answer by then never gets one."""

BASELINE = Resources(tokens_per_second=1_000, kv_bytes=10**6, concurrency=2)
ALL = {
    each: entitlement(each.value, each, BASELINE if each.has_baseline else Resources.NONE)
    for each in ServiceClass
}
"""One entitlement of every class, of that name."""

CAPACITY = Resources(tokens_per_second=100_000, kv_bytes=10**9, concurrency=20)
POOL = replace(pool(CAPACITY, *ALL.values()), window_ms=1_000)

EVERYTHING = {
    *("reserve", "settle", "renew", "restore", "sweep", "open", "look", "close_tick", "publish"),
    "snapshot",
}


class ForgetfulStore(DistantStore):
    """
    Carries out every claim; while `reserve` fails, its answer is lost.

    Attributes:
        is_uncertain: whether the error says that this may be so.
    """

    is_uncertain = True

    async def reserve(self, pool: str, claim: Claim) -> Reply:
        """See `Store`."""
        await asyncio.sleep(0)
        reply = await self._memory.reserve(pool, claim)
        if "reserve" in self.failing:
            raise StoreError("no answer", transient=True, uncertain=self.is_uncertain)
        return reply


@dataclass(slots=True)
class Stage:
    """A gate, and a store that can be sent away."""

    desk: GateDesk
    store: DistantStore

    @classmethod
    async def open(cls, *pools: Pool, store: type[DistantStore] = DistantStore) -> "Stage":
        """The store is there."""
        desk = await GateDesk.open(*pools, store=store)
        assert isinstance(desk.store, DistantStore)
        return cls(desk, desk.store)

    def go_away(self) -> None:
        """Nothing is answered any more."""
        self.store.failing |= EVERYTHING

    def come_back(self) -> None:
        """Everything is."""
        self.store.failing.clear()

    def decided(self) -> list[tuple[str, Outcome, str]]:
        """Whose requests were decided how, and why."""
        decisions = self.desk.observer.decisions
        return [(event.entitlement, event.outcome, event.reason) for event in decisions]

    async def ask_late(self, name: str) -> "asyncio.Task[Verdict]":
        """A request that has had time to be refused once."""
        asking = asyncio.create_task(self.desk.ask(by_ids(10), name))
        await turns()
        return asking


async def turns(count: int = 5) -> None:
    """Let whatever is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def all_of(asking: Sequence["asyncio.Task[Verdict]"]) -> list[Verdict]:
    """Their verdicts; nobody may hang."""
    async with asyncio.timeout(HANGS_S):
        return await asyncio.gather(*asking)


def status_of(verdict: Verdict) -> int:
    """What the client sees; 200 if it is the backend's to say."""
    return verdict.answer.status if isinstance(verdict, Refused) else 200


def with_policy(policy: Mapping[ServiceClass, OnStoreError], one: Pool = POOL) -> Pool:
    """A pool with its `on_store_error`."""
    return replace(one, on_store_error=policy)


def read_policy(word: object) -> Mapping[ServiceClass, OnStoreError]:
    """`on_store_error` as a configuration states it; None if it does not."""
    changes = {} if word is None else {"on_store_error": word}
    return load(pools(changes)).pools["small"].on_store_error


# Who is admitted

DEFAULT = {"dedicated", "guaranteed", "elastic"}
EVERYBODY = {each.value for each in ServiceClass}


@pytest.mark.parametrize(
    ("word", "allowed"),
    [
        pytest.param(None, DEFAULT, id="default"),
        pytest.param("allow", EVERYBODY, id="allow"),
        pytest.param("deny", set[str](), id="deny"),
        pytest.param({"spot": "allow"}, DEFAULT | {"spot"}, id="spot too"),
        pytest.param({"elastic": "deny", "dedicated": "deny"}, {"guaranteed"}, id="guaranteed"),
    ],
)
async def test_the_class_says_who_is_admitted(word: object, allowed: set[str]) -> None:
    """By default those with a baseline; one word is for all classes, and a class may have a word of its own."""
    stage = await Stage.open(with_policy(read_policy(word)))
    stage.go_away()
    for name in EVERYBODY:
        verdict = await stage.desk.ask(by_ids(10), name)
        assert status_of(verdict) == (200 if name in allowed else 503), name


async def test_a_denied_request_is_told_to_come_back() -> None:
    """503 with its reason and when to try again, as of a service that is not available."""
    stage = await Stage.open(POOL)
    stage.go_away()
    answer = (await stage.desk.refuse(by_ids(10), "spot")).answer
    headers = dict(answer.headers)
    assert answer.status == 503
    assert headers["x-tokenpools-reason"] == STORE_AWAY
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("1", "1000")
    assert b"not reachable" in answer.body


@pytest.mark.parametrize("policy", OnStoreError)
async def test_nobody_waits_for_a_store_that_is_away(policy: OnStoreError) -> None:
    """Who would wait for capacity is decided on at once, by the policy, and is not told to wait."""
    patient = replace(ALL[ServiceClass.SPOT], max_wait_ms=LONG_MS)
    full = replace(pool(replace(CAPACITY, concurrency=0), patient), window_ms=1_000)
    stage = await Stage.open(with_policy(dict.fromkeys(ServiceClass, policy), full))
    stage.go_away()
    waits: list[int] = []

    async def told(max_wait_ms: int) -> None:
        waits.append(max_wait_ms)

    order = order_for(stage.desk.config, by_ids(10), "spot")
    async with asyncio.timeout(HANGS_S):
        verdict = await stage.desk.gate.admit(order, told)
    assert status_of(verdict) == (429 if policy is ALLOW else 503)
    assert waits == []
    assert stage.desk.observer.waits == []


async def test_a_denied_request_holds_nothing() -> None:
    """Neither here nor, when that is back, in the store."""
    stage = await Stage.open(POOL)
    stage.go_away()
    await stage.desk.refuse(by_ids(10), "spot")
    assert stage.desk.gate.house.held("pool") == []
    stage.come_back()
    await stage.desk.pass_ms(250)
    assert await stage.desk.total() == InUse()


async def test_every_decision_without_the_store_is_counted() -> None:
    """Admitted, shed or rejected: each says that the store was not asked, and each failure of the store is told."""
    stage = await Stage.open(POOL)
    stage.go_away()
    for name in ("guaranteed", "guaranteed", "guaranteed", "elastic", "spot"):
        await stage.desk.ask(by_ids(10), name)
    assert stage.decided() == [
        ("guaranteed", Outcome.ADMITTED, STORE_AWAY),
        ("guaranteed", Outcome.ADMITTED, STORE_AWAY),
        ("guaranteed", Outcome.SHED, STORE_AWAY),
        ("elastic", Outcome.ADMITTED, STORE_AWAY),
        ("spot", Outcome.REJECTED, STORE_AWAY),
    ]
    assert stage.desk.observer.store_failures.count("reserve") == 5
    reserved = [event.reserved_tokens for event in stage.desk.observer.decisions]
    assert reserved == [10, 10, 0, 10, 0]


async def test_decisions_of_the_store_are_its_own_again_when_it_is_back() -> None:
    """With the first request that it answers."""
    stage = await Stage.open(POOL)
    stage.go_away()
    await stage.desk.ask(by_ids(10), "elastic")
    stage.come_back()
    await stage.desk.ask(by_ids(10), "elastic")
    await stage.desk.ask(by_ids(10), "spot")
    assert stage.decided() == [
        ("elastic", Outcome.ADMITTED, STORE_AWAY),
        ("elastic", Outcome.ADMITTED, ""),
        ("spot", Outcome.ADMITTED, ""),
    ]


async def test_the_policy_is_each_pools_own() -> None:
    """One pool may deny what another allows, though one store is away for both."""
    other = replace(POOL, name="other", models=("n",))
    stage = await Stage.open(
        with_policy(dict.fromkeys(ServiceClass, DENY)),
        with_policy(dict.fromkeys(ServiceClass, ALLOW), other),
    )
    stage.go_away()
    here = await stage.desk.ask(by_ids(10), "spot")
    there = await stage.desk.ask(by_ids(10, model="n"), "spot")
    assert (status_of(here), status_of(there)) == (503, 200)


@pytest.mark.parametrize("is_observed", [False, True])
async def test_shadow_mode_refuses_nobody_for_a_store_that_is_away(*, is_observed: bool) -> None:
    """Where nothing is enforced, by the pool or because Envoy only observes, what would be denied passes and counts."""
    shadow = replace(POOL, mode=POOL.mode if is_observed else Mode.SHADOW)
    stage = await Stage.open(with_policy(dict.fromkeys(ServiceClass, DENY), shadow))
    stage.go_away()
    verdict = await stage.desk.ask(by_ids(10), "spot", enforce=not is_observed)
    assert isinstance(verdict, Admitted)
    assert stage.decided() == [("spot", Outcome.ADMITTED, STORE_AWAY)]


# Claims whose answer was lost


@pytest.mark.parametrize("name", ["spot", "guaranteed"])
async def test_a_claim_that_was_refused_here_and_may_be_held_there_is_undone(name: str) -> None:
    """Denied or shed: if the store has carried it out, it is given back."""
    stage = await Stage.open(POOL, store=ForgetfulStore)
    for _ in range(2):
        await stage.desk.admit(by_ids(10), "guaranteed")
    before = await stage.desk.total()
    assert before.in_flight == 2
    stage.store.failing.add("reserve")
    body = by_ids(10 if name == "spot" else 999)
    assert status_of(await stage.desk.ask(body, name)) == (503 if name == "spot" else 429)
    await turns()
    assert stage.store.calls.count("settle") == 1
    assert await stage.desk.total() == before


async def test_a_claim_that_was_never_sent_is_not_undone() -> None:
    """There is nothing to undo, and a store in trouble is spared."""
    stage = await Stage.open(POOL, store=ForgetfulStore)
    assert isinstance(stage.store, ForgetfulStore)
    stage.store.is_uncertain = False
    stage.store.failing.add("reserve")
    stage.store.calls.clear()
    await stage.desk.refuse(by_ids(10), "spot")
    await turns()
    assert stage.store.calls == []


async def test_a_claim_that_was_admitted_here_and_is_held_there_is_one_lease() -> None:
    """The answer was lost, and the request runs: it is held once, and its end gives it back."""
    stage = await Stage.open(POOL, store=ForgetfulStore)
    stage.store.failing.add("reserve")
    admitted = await stage.desk.admit(by_ids(10), "elastic")
    await turns()
    assert await stage.desk.total() == InUse(1, 1, 10, 10_000)
    await stage.desk.settle(admitted, metered(Usage(9, 1), "x"))
    assert await stage.desk.total() == InUse()


class SlowStore(DistantStore):
    """
    Carries out every claim; its answers are late.

    Attributes:
        answering: set when they may come.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.answering = asyncio.Event()

    async def reserve(self, pool: str, claim: Claim) -> Reply:
        """See `Store`."""
        reply = await super().reserve(pool, claim)
        await self.answering.wait()
        return reply


async def test_a_claim_that_is_answered_when_its_pool_is_gone_is_a_lease_all_the_same() -> None:
    """A reload has removed the pool while the claim was on its way: it is kept alive, and its end gives it back."""
    other = replace(POOL, name="other", models=("n",))
    stage = await Stage.open(POOL, other, store=SlowStore)
    assert isinstance(stage.store, SlowStore)
    asking = await stage.ask_late("spot")
    await stage.desk.gate.reload(configured(other))
    await stage.desk.pass_ms(250)
    stage.store.answering.set()
    admitted = await asking
    assert isinstance(admitted, Admitted)
    for _ in range(8):
        await stage.desk.pass_ms(stage.desk.config.server.lease_ttl_ms // 4)
    assert (await stage.desk.total()).in_flight == 1
    await stage.desk.settle(admitted, metered(Usage(9, 1), "x"))
    assert await stage.desk.total() == InUse()


# Those who wait when the store goes away

PATIENT = replace(ALL[ServiceClass.SPOT], max_wait_ms=LONG_MS)
ELASTIC = replace(ALL[ServiceClass.ELASTIC], max_wait_ms=LONG_MS)
NARROW = replace(pool(replace(CAPACITY, concurrency=2), PATIENT, ELASTIC), window_ms=1_000)


async def test_whoever_waits_is_denied_or_shed_by_the_policy() -> None:
    """Though nothing happens here: those who wait are looked after by a timer, and none of them hangs."""
    stage = await Stage.open(NARROW)
    for _ in range(2):
        await stage.desk.admit(by_ids(10), "spot")
    asking = [await stage.ask_late(name) for name in ("spot", "elastic", "spot", "elastic")]
    assert not any(each.done() for each in asking)
    stage.go_away()
    assert [status_of(each) for each in await all_of(asking)] == [503, 429, 503, 429]
    assert {reason for _, _, reason in stage.decided()[2:]} == {STORE_AWAY}
    assert stage.desk.gate.house.pool(NARROW).waiting.total == 0
    assert stage.desk.observer.store_failures.count("reserve") == 4


async def test_whoever_waits_gets_what_comes_free_meanwhile() -> None:
    """A request ends while the store is away: its place is given to one of those who waited, by the books kept here."""
    stage = await Stage.open(NARROW)
    held = [await stage.desk.admit(by_ids(10), "spot") for _ in range(2)]
    asking = [await stage.ask_late("elastic") for _ in range(2)]
    stage.go_away()
    await stage.desk.settle(held.pop(), metered(Usage(9, 1), "x"))
    assert [status_of(each) for each in await all_of(asking)] == [200, 429]
    stage.come_back()
    await stage.desk.pass_ms(0)
    await stage.desk.pass_ms(250)
    assert stage.desk.gate.house.held("pool") == [held[0].lease.lease_id, "lease-3"]


async def test_a_wait_that_ended_without_the_store_is_told_as_it_ended() -> None:
    """Whoever was admitted has not been shed, and the time that it waited is not that of the decision."""
    stage = await Stage.open(NARROW)
    held = [await stage.desk.admit(by_ids(10), "spot") for _ in range(2)]
    asking = [await stage.ask_late("elastic") for _ in range(2)]
    stage.desk.clock.advance(5_000)
    stage.go_away()
    await stage.desk.settle(held.pop(), metered(Usage(9, 1), "x"))
    await all_of(asking)
    waits = [(event.end, event.waited_ms) for event in stage.desk.observer.waits]
    assert waits == [(WaitEnd.ADMITTED, 5_000), (WaitEnd.SHED, 5_000)]
    assert [event.decision_us for event in stage.desk.observer.decisions[2:]] == [0, 0]


# Readiness


def away_from_the_start(clock: Clock) -> DistantStore:
    """A store that has never been there."""
    store = DistantStore(clock)
    store.failing |= EVERYTHING
    return store


async def test_nobody_is_ready_before_the_store_has_ever_answered() -> None:
    """Whatever the policy: what others hold and are owed is not known; then it comes by itself."""
    everybody = with_policy(dict.fromkeys(ServiceClass, ALLOW))
    desk = await GateDesk.open(everybody, store=away_from_the_start)
    assert isinstance(desk.store, DistantStore)
    for _ in range(3):
        assert (desk.gate.is_ready, desk.gate.store_answers) == (False, False)
        await desk.pass_ms(250)
    desk.store.failing.clear()
    await desk.pass_ms(250)
    assert (desk.gate.is_ready, desk.gate.store_answers) == (True, True)


@pytest.mark.parametrize("allowed", [None, *ServiceClass])
async def test_ready_is_who_can_decide(allowed: ServiceClass | None) -> None:
    """While the store is away that is whoever admits any class without it; afterwards everybody is again, by itself."""
    policy = {each: ALLOW if each is allowed else DENY for each in ServiceClass}
    stage = await Stage.open(with_policy(policy))
    gate = stage.desk.gate
    assert (gate.is_ready, gate.store_answers) == (True, True)
    stage.go_away()
    for _ in range(3):
        await stage.desk.pass_ms(250)
        assert (gate.is_ready, gate.store_answers) == (allowed is not None, False)
    stage.come_back()
    await stage.desk.pass_ms(250)
    assert (gate.is_ready, gate.store_answers) == (True, True)


async def test_ready_is_who_can_decide_in_any_pool() -> None:
    """One pool that denies everybody takes no other pool's requests away."""
    other = replace(POOL, name="other", models=("n",))
    stage = await Stage.open(with_policy(dict.fromkeys(ServiceClass, DENY)), other)
    stage.go_away()
    await stage.desk.pass_ms(250)
    assert stage.desk.gate.is_ready


async def test_a_pool_that_the_store_never_knew_is_nobodys_to_decide_on() -> None:
    """A reload has brought it while the store was away: nobody knows yet with whom it is shared."""
    new = replace(POOL, name="new", models=("n",))
    stage = await Stage.open(POOL)
    stage.go_away()
    await stage.desk.gate.reload(configured(POOL, new))
    known = await stage.desk.ask(by_ids(10), "elastic")
    unknown = await stage.desk.ask(by_ids(10, model="n"), "elastic")
    assert (status_of(known), status_of(unknown)) == (200, 503)
    assert stage.desk.gate.is_ready
    await stage.desk.gate.reload(configured(new))
    assert not stage.desk.gate.is_ready
    stage.come_back()
    await stage.desk.pass_ms(250)
    assert status_of(await stage.desk.ask(by_ids(10, model="n"), "elastic")) == 200
    stage.go_away()
    assert status_of(await stage.desk.ask(by_ids(10, model="n"), "elastic")) == 200
