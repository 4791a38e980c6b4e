"""Admission: what the gate asks of the store, answers and tells."""

import asyncio
import json
from dataclasses import replace

import pytest

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import (
    Entitlement,
    EntitlementState,
    Limits,
    Mode,
    OutputEstimate,
    Pool,
    ServiceClass,
)
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.gate.order import Admitted, Refused
from envoy_tokenpools.observer import Decided, Outcome
from envoy_tokenpools.openai.request import Endpoint
from envoy_tokenpools.openai.usage import Usage
from envoy_tokenpools.store.base import Store
from envoy_tokenpools.store.memory import MemoryStore
from tests.support.extproc import chat
from tests.support.gate import DistantStore, GateDesk, by_ids, metered
from tests.support.pools import KV_BYTES_PER_TOKEN, amount, entitlement, pool

SPOT = entitlement("a", ServiceClass.SPOT)
OTHER = entitlement("b", ServiceClass.SPOT)
WIDE = amount()


def small(capacity: Resources = WIDE, *who: Entitlement, window_ms: int = 1_000) -> Pool:
    """A pool whose buckets are a second deep."""
    return replace(pool(capacity, *(who or (SPOT, OTHER))), window_ms=window_ms)


def headers_of(refused: Refused) -> dict[str, str]:
    """Headers of the answer."""
    return dict(refused.answer.headers)


# Admitted and shed


async def test_an_admitted_request_holds_its_cost() -> None:
    """60 tokens of prompt, 40 reserved for the output, one sequence; told as such."""
    desk = await GateDesk.open(small())
    admitted = await desk.admit(by_ids(100, output=40))
    cost = admitted.lease.cost
    assert (cost.prompt_tokens, cost.output_tokens, cost.concurrency) == (60, 40, 1)
    assert cost.kv_bytes == 100 * KV_BYTES_PER_TOKEN
    assert admitted.raw_prompt_tokens == 60
    assert await desk.total() == InUse(1, 1, 100, 100 * KV_BYTES_PER_TOKEN)
    assert desk.observer.decisions == [
        Decided(
            Outcome.ADMITTED,
            pool="pool",
            entitlement="a",
            service_class=ServiceClass.SPOT,
            estimated_prompt_tokens=60,
            reserved_tokens=100,
        )
    ]


async def test_a_decision_is_timed() -> None:
    """In microseconds, from the question to the answer."""
    desk = await GateDesk.open(small(), store=DistantStore)
    asking = asyncio.create_task(desk.ask(by_ids(10)))
    await asyncio.sleep(0)
    desk.clock.advance(7)
    await asking
    assert desk.observer.decisions[0].decision_us == 7_000


async def test_a_shed_request_is_answered_and_told() -> None:
    """429 with what is missing; nothing is held for it."""
    desk = await GateDesk.open(small(amount(sequences=1)))
    await desk.admit(by_ids(100))
    before = await desk.total()
    refused = await desk.refuse(by_ids(50), "b")
    assert refused.answer.status == 429
    assert headers_of(refused)["x-tokenpools-reason"] == "pool_contended"
    assert await desk.total() == before
    assert desk.observer.decisions[1] == Decided(
        Outcome.SHED,
        reason="pool_contended",
        pool="pool",
        entitlement="b",
        service_class=ServiceClass.SPOT,
        estimated_prompt_tokens=50,
    )


async def test_the_wait_of_a_shed_request_is_jittered() -> None:
    """By the gate's own dice, so that clients do not come back together."""
    waits = []
    for jitter in (0.0, 0.5):
        desk = await GateDesk.open(small(amount(1_000)), jitter=jitter)
        await desk.admit(by_ids(1_000))
        waits.append(headers_of(await desk.refuse(by_ids(400)))["retry-after-ms"])
    assert waits == ["400", "450"]


async def test_every_request_has_a_lease_of_its_own() -> None:
    """Ids are asked for one by one."""
    desk = await GateDesk.open(small())
    ids = [(await desk.admit(by_ids(1))).lease.lease_id for _ in range(3)]
    assert ids == ["lease-1", "lease-2", "lease-3"]


async def test_a_lone_request_on_an_idle_pool_is_admitted() -> None:
    """Also without a stated maximum, where the pool's default is larger than the pool; the second waits."""
    desk = await GateDesk.open(replace(small(amount(1_000)), default_max_tokens=1_024))
    body = b'{"model":"m","prompt":"hi"}'
    await desk.admit(body)
    assert (await desk.refuse(body, "b")).answer.status == 429


@pytest.mark.parametrize("store", [MemoryStore, DistantStore])
async def test_exactly_two_of_five_fit(store: type[MemoryStore] | type[DistantStore]) -> None:
    """Five requests of 100 tokens at the same time on 250, two hundred times over."""

    def open_store(clock: Clock) -> Store:
        return store(clock)

    for _ in range(200):
        desk = await GateDesk.open(small(amount(250)), store=open_store)
        verdicts = await asyncio.gather(*(desk.ask(by_ids(100), "ab"[n % 2]) for n in range(5)))
        assert sum(isinstance(verdict, Admitted) for verdict in verdicts) == 2
        assert (await desk.total()).reserved_tokens == 200


async def test_a_request_that_was_shed_is_one_demand_however_often_it_comes() -> None:
    """By its fingerprint, and by what the client's library says."""
    desk = await GateDesk.open(small(amount(1_000)))
    await desk.admit(by_ids(1_000))
    for _ in range(3):
        await desk.refuse(by_ids(300), "b")
    await desk.ask(by_ids(500), "b", is_retry=True)
    reading = await desk.store.close_tick("pool")
    assert reading is not None
    assert reading.meters["b"].demanded_tokens == 300


# Modes and states


async def test_shadow_mode_lets_everything_pass_and_tells() -> None:
    """The reason is that for which it would have been shed."""
    desk = await GateDesk.open(replace(small(amount(sequences=1)), mode=Mode.SHADOW))
    for _ in range(3):
        await desk.admit(by_ids(10))
    assert (await desk.total()).in_flight == 3
    assert desk.observer.outcomes() == [
        (Outcome.ADMITTED, ""),
        (Outcome.ADMITTED, "pool_contended"),
        (Outcome.ADMITTED, "pool_contended"),
    ]


async def test_what_is_only_observed_is_not_refused() -> None:
    """Envoy asks for no verdict: it is counted as it is."""
    desk = await GateDesk.open(small(amount(sequences=1)))
    await desk.admit(by_ids(10))
    assert isinstance(await desk.ask(by_ids(10), enforce=False), Admitted)
    assert (await desk.total()).in_flight == 2


@pytest.mark.parametrize("state", [EntitlementState.PENDING, EntitlementState.EXPIRED])
async def test_an_entitlement_without_capacity_is_not_served(state: EntitlementState) -> None:
    """503 however idle the pool is; the store is not asked."""
    desk = await GateDesk.open(small(amount(), replace(SPOT, state=state)), store=DistantStore)
    assert isinstance(desk.store, DistantStore)
    desk.store.calls.clear()
    refused = await desk.refuse(by_ids(10))
    assert refused.answer.status == 503
    reason = f"entitlement_{state.value.lower()}"
    assert desk.observer.outcomes() == [(Outcome.REJECTED, reason)]
    assert desk.store.calls == []


async def test_a_degraded_entitlement_lives_from_the_surplus() -> None:
    """Served while there is room, without its baseline when there is none."""
    gold = entitlement("a", ServiceClass.GUARANTEED, amount(100, 1, 10**9))
    degraded = replace(gold, state=EntitlementState.DEGRADED)
    for who, admitted in ((gold, True), (degraded, False)):
        desk = await GateDesk.open(small(amount(sequences=1), who, OTHER))
        await desk.admit(by_ids(10), "b")
        assert isinstance(await desk.ask(by_ids(10)), Admitted) is admitted
    desk = await GateDesk.open(small(amount(sequences=1), degraded, OTHER))
    await desk.admit(by_ids(10))


async def test_a_store_that_is_away_answers_503_and_is_counted() -> None:
    """Never silently; it is back as soon as the store is."""
    desk = await GateDesk.open(small(), store=DistantStore)
    assert isinstance(desk.store, DistantStore)
    desk.store.failing.add("reserve")
    refused = await desk.refuse(by_ids(10))
    assert (refused.answer.status, headers_of(refused)["retry-after"]) == (503, "1")
    assert desk.observer.store_failures == ["reserve"]
    assert desk.observer.outcomes() == [(Outcome.REJECTED, "store_unavailable")]
    desk.store.failing.clear()
    await desk.admit(by_ids(10))


# Never to fit


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (by_ids(1_001), "context_length_exceeded"),
        (by_ids(1_001, output=900), "context_length_exceeded"),
        (by_ids(10, output=2, n=5), "too_many_sequences"),
    ],
)
async def test_a_request_that_can_never_fit_is_an_error(body: bytes, code: str) -> None:
    """400, for the exchange to answer; told once with its owner, and nothing is held."""
    capacity = amount(kv_bytes=1_000 * KV_BYTES_PER_TOKEN)
    who = replace(SPOT, limits=Limits(concurrency=4))
    desk = await GateDesk.open(small(capacity, who))
    with pytest.raises(RequestError) as raised:
        await desk.ask(body)
    assert (raised.value.status, raised.value.code) == (400, code)
    assert await desk.total() == InUse()
    assert desk.observer.decisions == [
        Decided(
            Outcome.REJECTED,
            reason=code,
            pool="pool",
            entitlement="a",
            service_class=ServiceClass.SPOT,
        )
    ]


async def test_a_request_wider_than_what_is_not_withheld_runs_alone() -> None:
    """Sixteen sequences where four are somebody's own are twelve; who comes meanwhile waits, and none for ever."""
    own = entitlement("d", ServiceClass.DEDICATED, amount(1, 4, 1))
    wide = entitlement("a", ServiceClass.ELASTIC, amount(1, 1, 1))
    desk = await GateDesk.open(small(amount(sequences=16), own, wide, OTHER))
    admitted = await desk.admit(by_ids(10, output=2, n=16))
    assert admitted.lease.cost.concurrency == 12
    refused = await desk.refuse(by_ids(10), "b")
    assert headers_of(refused)["x-tokenpools-reason"] == "pool_contended"
    await desk.settle(admitted)
    await desk.admit(by_ids(10), "b")


async def test_long_prompts_of_one_entitlement_are_counted_one_at_a_time() -> None:
    """They hold up their own, and nobody else's."""
    desk = await GateDesk.open(small())
    desk.counter.held = asyncio.Event()
    asking = [
        asyncio.create_task(desk.ask(b'{"model":"m","prompt":"%s"}' % text, name))
        for text, name in ((b"one", "a"), (b"two", "a"), (b"three", "b"))
    ]
    for _ in range(20):
        await asyncio.sleep(0)
    assert desk.counter.counted == [("one",), ("three",)]
    asking[0].cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert desk.counter.counted == [("one",), ("three",), ("two",)]
    desk.counter.held.set()
    verdicts = await asyncio.gather(*asking, return_exceptions=True)
    assert [isinstance(verdict, Admitted) for verdict in verdicts] == [False, True, True]


# Costs


async def test_words_ids_and_framing_are_counted() -> None:
    """Text by the tokenizer, framing by the dialect."""
    desk = await GateDesk.open(small())
    admitted = await desk.ask(chat("one two three", max_tokens=5), endpoint=Endpoint.CHAT)
    assert isinstance(admitted, Admitted)
    facts = admitted.order.facts
    assert facts.overhead_tokens > 0
    words = sum(len(text.split()) for text in facts.texts)
    assert admitted.lease.cost.prompt_tokens == words + facts.overhead_tokens


async def test_pictures_and_sounds_cost_what_is_configured() -> None:
    """Once each, whatever their size; the learned ratio is for text."""
    one = replace(small(), image_tokens=500, audio_tokens=70)
    desk = await GateDesk.open(one)
    desk.gate.house.pool(one).prompt_ratio("m").value = 2.0
    parts = [
        {"type": "text", "text": "what is this"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5_000}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ]
    plain = await desk.ask(chat(parts[:1], max_tokens=1), endpoint=Endpoint.CHAT)
    rich = await desk.ask(chat(parts, max_tokens=1), endpoint=Endpoint.CHAT)
    assert isinstance(plain, Admitted)
    assert isinstance(rich, Admitted)
    assert plain.lease.cost.prompt_tokens == 2 * plain.raw_prompt_tokens
    assert rich.lease.cost.prompt_tokens - plain.lease.cost.prompt_tokens == 570
    assert rich.raw_prompt_tokens == plain.raw_prompt_tokens


async def test_what_is_read_with_every_document_counts_that_often() -> None:
    """The query of a reranking, three words with each of two documents of four words in all."""
    desk = await GateDesk.open(small())
    body = {"model": "m", "query": "one two three", "documents": ["a", "b c d"]}
    admitted = await desk.ask(json.dumps(body).encode(), endpoint=Endpoint.RERANK)
    assert isinstance(admitted, Admitted)
    facts = admitted.order.facts
    assert (facts.prompts, facts.shared_texts) == (2, ("one two three",))
    assert admitted.raw_prompt_tokens - facts.overhead_tokens == 10


async def test_work_that_is_no_text_costs_a_flat_amount() -> None:
    """Each picture that is made, beside the words that ask for it."""
    desk = await GateDesk.open(replace(small(), flat_tokens=300))
    body = {"model": "m", "prompt": "a cat " * 100, "n": 2}
    admitted = await desk.ask(json.dumps(body).encode(), endpoint=Endpoint.IMAGES)
    assert isinstance(admitted, Admitted)
    words = admitted.raw_prompt_tokens
    assert admitted.lease.cost.prompt_tokens - words == 600
    assert admitted.lease.cost.output_tokens == 0
    live = desk.gate.house.pool(admitted.order.pool)
    await desk.settle(admitted, metered(Usage(9_000, 0)))
    assert live.prompt_ratio("m").value == 1.0


@pytest.mark.parametrize(
    ("output_estimate", "reserved"), [(OutputEstimate.P95, 10), (OutputEstimate.MAX_TOKENS, 4_000)]
)
async def test_outputs_are_reserved_as_they_were_learned(
    output_estimate: OutputEstimate, reserved: int
) -> None:
    """A client that always asks for 4000 and gets 10 is held for 10, unless configured otherwise."""
    desk = await GateDesk.open(replace(small(), output_estimate=output_estimate))
    for _ in range(20):
        admitted = await desk.admit(by_ids(4_010, output=4_000))
        assert admitted.lease.cost.output_tokens == 4_000
        await desk.settle(admitted, metered(Usage(10, 10), "x"))
    assert (await desk.admit(by_ids(4_010, output=4_000))).lease.cost.output_tokens == reserved
    assert (await desk.admit(by_ids(15, output=5))).lease.cost.output_tokens == 5
    assert (await desk.admit(by_ids(4_010, output=4_000), "b")).lease.cost.output_tokens == 4_000


async def test_prompts_are_corrected_as_the_backend_reports() -> None:
    """A tokenizer that splits twice as fine is learned; other models are not affected."""
    desk = await GateDesk.open(replace(small(), models=("m", "n")))
    for _ in range(200):
        admitted = await desk.admit(by_ids(200))
        await desk.settle(admitted, metered(Usage(400, 1), "x"))
    assert (await desk.admit(by_ids(200))).lease.cost.prompt_tokens == 400
    assert (await desk.admit(by_ids(200, model="n"))).lease.cost.prompt_tokens == 200


async def test_names_that_clients_make_up_teach_nothing_new() -> None:
    """In the default pool any name is served, and learned under the pool's own."""
    desk = await GateDesk.open(small(), default_pool="pool")
    for number in range(30):
        admitted = await desk.admit(by_ids(200, model=f"junk-{number}"))
        await desk.settle(admitted, metered(Usage(400, 1), "x"))
    (report,) = desk.gate.report()
    assert list(report.prompt_ratios) == ["m"]
    assert len(desk.gate.house.pool(admitted.order.pool).outputs) == 1
