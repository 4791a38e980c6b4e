"""Settlement: charged, given back, told, and learned from."""

import json
from dataclasses import replace

import pytest

from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import Pool, ServiceClass
from envoy_tokenpools.gate.live import LivePool
from envoy_tokenpools.gate.order import Admitted
from envoy_tokenpools.observer import Ending, Settled
from envoy_tokenpools.openai.request import Endpoint
from envoy_tokenpools.openai.usage import Metered, Usage, UsageSource
from tests.support.extproc import chat
from tests.support.gate import DistantStore, GateDesk, by_ids, metered
from tests.support.pools import amount, entitlement, pool
from tests.support.streams import of_body


def small(tokens: int = 1_000_000) -> Pool:
    """A pool with a bucket of `tokens`, filled in a second."""
    return replace(pool(amount(tokens), entitlement("a", ServiceClass.SPOT)), window_ms=1_000)


def live_of(desk: GateDesk) -> LivePool:
    """What was learned."""
    return desk.gate.house.pool(desk.config.pools["pool"])


async def test_a_settlement_gives_back_and_tells() -> None:
    """What the backend reported, beside what was estimated, and how long it was held."""
    desk = await GateDesk.open(small())
    admitted = await desk.admit(by_ids(100, output=40))
    desk.clock.advance(1_234)
    await desk.settle(admitted, metered(Usage(26, 9), "Hello"))
    assert await desk.total() == InUse()
    assert desk.observer.settlements == [
        Settled(
            pool="pool",
            entitlement="a",
            service_class=ServiceClass.SPOT,
            ending=Ending.COMPLETED,
            prompt_tokens=26,
            prompt_source=UsageSource.REPORTED,
            completion_tokens=9,
            completion_source=UsageSource.REPORTED,
            estimated_prompt_tokens=60,
            held_ms=1_234,
        )
    ]


async def test_an_over_estimate_is_given_back_at_once() -> None:
    """990 reserved, 12 used: 988 are there again, no more."""
    desk = await GateDesk.open(small(1_000))
    gone = Ending.CLIENT_GONE  # teaches nothing
    await desk.settle(await desk.admit(by_ids(990)), metered(Usage(10, 2), "x"), ending=gone)
    probe = await desk.admit(by_ids(988))
    assert probe.balance.remaining_tokens == 0
    assert (await desk.refuse(by_ids(1))).answer.status == 429


async def test_an_under_estimate_is_owed() -> None:
    """1000 reserved, 1200 used: the next waits until that has drained, and no number is negative."""
    desk = await GateDesk.open(small(1_000))
    await desk.settle(await desk.admit(by_ids(1_000)), metered(Usage(1_000, 200), "x"))
    headers = dict((await desk.refuse(by_ids(1))).answer.headers)
    assert headers["x-ratelimit-remaining-tokens"] == "0"
    assert headers["retry-after-ms"] == "201"
    desk.clock.advance(201)
    await desk.admit(by_ids(1))


async def test_unreported_text_is_counted() -> None:
    """Whole, by the pool's tokenizer."""
    desk = await GateDesk.open(small())
    admitted = await desk.admit(by_ids(10, output=5))
    await desk.settle(admitted, metered(None, "one two", "three"))
    (settled,) = desk.observer.settlements
    assert (settled.completion_tokens, settled.completion_source) == (3, UsageSource.COUNTED)
    assert desk.counter.counted == [("one two", "three")]


async def test_reported_text_is_not_counted() -> None:
    """Nor is nothing."""
    desk = await GateDesk.open(small())
    for seen in (metered(Usage(10, 3), "one two three"), metered(), None):
        await desk.settle(await desk.admit(by_ids(10)), seen)
    assert desk.counter.counted == []


async def test_a_store_that_is_away_at_the_end_is_counted() -> None:
    """The settlement is told all the same; the lease is no longer renewed and returns by itself."""
    desk = await GateDesk.open(small(), store=DistantStore)
    assert isinstance(desk.store, DistantStore)
    admitted = await desk.admit(by_ids(100))
    desk.store.failing.add("settle")
    await desk.settle(admitted, metered(Usage(26, 9), "x"))
    assert desk.observer.store_failures == ["settle"]
    (settled,) = desk.observer.settlements
    assert (settled.prompt_tokens, settled.held_ms) == (26, 0)
    ttl_ms = desk.config.server.lease_ttl_ms
    for _ in range(4):
        await desk.pass_ms(ttl_ms // 3)
    assert await desk.total() == InUse()


async def test_a_tokenizer_that_fails_at_the_end_holds_no_lease_for_ever() -> None:
    """Nobody renews what nobody will settle."""
    desk = await GateDesk.open(small())
    admitted = await desk.admit(by_ids(100))
    desk.counter.error = RuntimeError("the counter is closed")
    with pytest.raises(RuntimeError):
        await desk.settle(admitted, metered(None, "one two"))
    ttl_ms = desk.config.server.lease_ttl_ms
    for _ in range(4):
        await desk.pass_ms(ttl_ms // 3)
    assert await desk.total() == InUse()


async def test_a_settlement_after_the_lease_was_lost_still_charges() -> None:
    """The replica was held up: concurrency is back already, tokens are corrected now."""
    desk = await GateDesk.open(small(1_000))
    admitted = await desk.admit(by_ids(100))
    desk.clock.advance(desk.config.server.lease_ttl_ms)
    assert len(await desk.store.sweep("pool")) == 1
    await desk.settle(admitted, metered(Usage(100, 1_400), "x"))
    assert await desk.total() == InUse()
    assert (await desk.refuse(by_ids(1))).answer.status == 429


# Learning


async def learned(
    desk: GateDesk, admitted: Admitted, *outcomes: tuple[Ending, Metered | None]
) -> None:
    """End an admitted request several times over, as lessons."""
    for ending, seen in outcomes:
        await desk.settle(admitted, seen, ending=ending)


@pytest.mark.parametrize("ending", [e for e in Ending if e is not Ending.COMPLETED])
async def test_only_whole_answers_teach(ending: Ending) -> None:
    """What was cut says nothing about how long answers are."""
    desk = await GateDesk.open(small())
    admitted = await desk.admit(by_ids(1_000, output=50))
    await learned(desk, admitted, *[(ending, metered(Usage(5_000, 3), "x"))] * 30)
    assert live_of(desk).output_history("a", "m").p95 is None
    assert live_of(desk).prompt_ratio("m").value == 1.0
    await learned(desk, admitted, *[(Ending.COMPLETED, metered(Usage(5_000, 3), "x"))] * 30)
    assert live_of(desk).output_history("a", "m").p95 == 3
    assert live_of(desk).prompt_ratio("m").value > 1.0


async def test_what_was_only_reserved_teaches_nothing() -> None:
    """An answer that could not be read is charged as reserved: to learn that would confirm itself."""
    desk = await GateDesk.open(small())
    admitted = await desk.admit(by_ids(1_000, output=900))
    unread = ((Ending.COMPLETED, None), (Ending.COMPLETED, metered(unread=1)))
    await learned(desk, admitted, *unread * 30)
    assert live_of(desk).output_history("a", "m").p95 is None


async def test_an_answer_in_a_dialect_that_is_not_read_is_no_answer_of_nothing() -> None:
    """It is whole and says nothing that we understand: charged as reserved, and nothing is learned."""
    desk = await GateDesk.open(small())
    admitted = await desk.admit(by_ids(1_000, output=900))
    await learned(desk, admitted, *[(Ending.COMPLETED, of_body({"result": "one two"}))] * 30)
    settled = desk.observer.settlements[0]
    assert (settled.prompt_tokens, settled.completion_tokens) == (100, 900)
    assert settled.completion_source is UsageSource.ESTIMATED
    assert live_of(desk).output_history("a", "m").p95 is None


async def test_a_short_prompt_teaches_no_ratio() -> None:
    """What the chat template adds to a word says nothing of long prompts; its output teaches like any other."""
    desk = await GateDesk.open(small())
    admitted = await desk.admit(by_ids(60, output=50))
    await learned(desk, admitted, *[(Ending.COMPLETED, metered(Usage(40, 3), "x"))] * 30)
    assert live_of(desk).prompt_ratio("m").value == 1.0
    assert live_of(desk).output_history("a", "m").p95 == 3


async def test_counted_outputs_teach() -> None:
    """They were seen whole."""
    desk = await GateDesk.open(small())
    admitted = await desk.admit(by_ids(1_000, output=50))
    await learned(desk, admitted, *[(Ending.COMPLETED, metered(None, "one two three"))] * 30)
    assert live_of(desk).output_history("a", "m").p95 == 3
    assert live_of(desk).prompt_ratio("m").value == 1.0


async def test_an_output_is_learned_per_sequence() -> None:
    """Ten tokens of four answers are three each, rounded up."""
    desk = await GateDesk.open(small())
    admitted = await desk.admit(by_ids(100, output=50, n=4))
    await learned(desk, admitted, *[(Ending.COMPLETED, metered(Usage(50, 10), "x"))] * 30)
    assert live_of(desk).output_history("a", "m").p95 == 3


async def test_embeddings_teach_no_output() -> None:
    """They have none; their prompts teach like others."""
    desk = await GateDesk.open(small())
    body = json.dumps({"model": "m", "input": "one two " * 100}).encode()
    admitted = await desk.ask(body, endpoint=Endpoint.EMBEDDINGS)
    assert isinstance(admitted, Admitted)
    assert admitted.lease.cost.output_tokens == 0
    await learned(desk, admitted, *[(Ending.COMPLETED, metered(Usage(400, 0)))] * 30)
    assert live_of(desk).output_history("a", "m").p95 is None
    assert live_of(desk).prompt_ratio("m").value > 1.0


async def test_prompts_with_pictures_teach_no_ratio() -> None:
    """What the backend reports for them is not about text."""
    desk = await GateDesk.open(small())
    image = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    text = {"type": "text", "text": "one two " * 100}
    admitted = await desk.ask(chat([text, image], max_tokens=4), endpoint=Endpoint.CHAT)
    assert isinstance(admitted, Admitted)
    await learned(desk, admitted, *[(Ending.COMPLETED, metered(Usage(9_000, 3), "x"))] * 30)
    assert live_of(desk).prompt_ratio("m").value == 1.0
    assert live_of(desk).output_history("a", "m").p95 == 3
