"""Every way in which a request begins, waits and ends: one settlement, nothing left, through the real gate."""

import asyncio
import json
from collections.abc import Sequence

import pytest

from envoy_tokenpools.core.admission import Claim
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.observer import Ending
from envoy_tokenpools.store.base import Reply
from tests.support.cases import FRAME, ONE_AT_A_TIME, SSE, THOUSAND, Filter, running
from tests.support.extproc import (
    HI,
    BodyMode,
    Message,
    chat,
    immediate_of,
    kind_of,
    post_rh,
    rb,
    rh,
    sb,
    sh,
    with_protocol,
)
from tests.support.gate import DistantStore, by_ids
from tests.support.streams import S, chunk, stream_of

COMPLETIONS = "/v1/completions"
HELLO = stream_of(chunk({"content": "Hello"}))


def used(prompt: int, completion: int) -> bytes:
    """A whole answer that reports these tokens."""
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return json.dumps({"choices": [], "usage": usage}).encode()


# Case 36


async def test_what_was_reserved_too_much_is_given_back() -> None:
    """Case 36: 990 reserved and 12 used leave 988 of 1000 at once, not 10."""
    async with running(THOUSAND) as desk:
        stream = await desk.admit(by_ids(990, output=980), COMPLETIONS)
        assert sum(desk.reserved) == 990
        await desk.answer(stream, used(10, 2), content_type="application/json")
        assert desk.charged == (10, 2)
        assert await desk.in_use() == InUse()
        status, _, _ = await desk.refuse(by_ids(989), COMPLETIONS)
        assert status == 429
        last = await desk.admit(by_ids(988), COMPLETIONS)
        await last.end()


async def test_what_was_reserved_too_little_is_owed() -> None:
    """Case 36: 1000 reserved and 1200 used: the stream goes on, the next is refused until the budget has refilled."""
    async with running(THOUSAND) as desk:
        stream = await desk.admit(by_ids(1_000, output=990), COMPLETIONS)
        replies = await desk.answer(stream, used(10, 1_190), content_type="application/json")
        assert all(reply.immediate_response is None for reply in replies)
        assert desk.charged == (10, 1_190)
        status, headers, answer = await desk.refuse(HI)
        assert status == 429
        assert headers["x-ratelimit-remaining-tokens"] == "0"
        assert " 0 available" in answer["error"]["message"]
        desk.clock.advance(12_000)
        last = await desk.admit(HI)
        await last.end()


# Case 37

STAGES: Sequence[Sequence[Message]] = (
    (post_rh(),),
    (post_rh(), rb(chat(stream=True))),
    (post_rh(), rb(chat(stream=True)), sh(200, SSE)),
    (post_rh(), rb(chat(stream=True)), sh(200, SSE), sb(HELLO)),
    (post_rh(), rb(chat(stream=True)), sh(200, SSE), sb(HELLO), sb(S[:20])),
    (post_rh(), rb(chat(stream=True)), sh(200, SSE), sb(S)),
)
"""After the head, the body, the answer's head, a delta, in the middle of an event, and behind `[DONE]`."""


@pytest.mark.parametrize("stage", range(len(STAGES)))
async def test_a_client_that_leaves_frees_its_place(stage: int) -> None:
    """Case 37: with room for one, the next request is served each of a hundred times, wherever the last one left."""
    async with running(ONE_AT_A_TIME) as desk:
        for _ in range(100):
            stream = desk.stream()
            await stream.say(*STAGES[stage])
            await stream.cancel()
            await desk.settled()
            assert await desk.in_use() == InUse()
        assert len(desk.observer.settlements) == (100 if stage else 0)
        if stage:
            expected = [0, 0, 0, 1, 1, 9][stage]
            assert desk.charged == ((26, 9) if stage == 5 else (1 + FRAME, expected))
        await desk.at_rest()


class FarStore(DistantStore):
    """A store whose answers travel too."""

    async def reserve(self, pool: str, claim: Claim) -> Reply:
        """See `Store`."""
        reply = await super().reserve(pool, claim)
        await asyncio.sleep(0)
        return reply


@pytest.mark.parametrize("rounds", range(5))
async def test_a_client_that_leaves_while_the_store_decides_frees_its_place(rounds: int) -> None:
    """Case 37: the reservation that is on its way, or just made, is undone."""
    async with running(ONE_AT_A_TIME, store=FarStore) as desk:
        for _ in range(25):
            stream = desk.stream()
            await stream.say(post_rh())
            stream.begin(rb(HI))
            for _ in range(rounds):
                await asyncio.sleep(0)
            await stream.cancel()
            await desk.settled()
        await desk.at_rest()


# Case 39


async def test_a_limit_of_one_admits_one_and_what_fits_exactly_is_admitted() -> None:
    """Case 39: the first of two is served and the second shed; a cost that equals what remains fits."""
    async with running(ONE_AT_A_TIME) as desk:
        first = await desk.admit(HI)
        status, _, _ = await desk.refuse(HI)
        assert status == 429
        await first.end()
        await desk.at_rest()
    async with running(THOUSAND) as desk:
        first = await desk.admit(by_ids(300), COMPLETIONS)
        exact = await desk.admit(by_ids(700), COMPLETIONS)
        status, _, _ = await desk.refuse(by_ids(1), COMPLETIONS)
        assert status == 429
        await first.end()
        await exact.end()


async def test_of_five_requests_at_once_exactly_two_fit() -> None:
    """Case 39: five of 100 tokens on 250, two hundred times, over a store that yields in between."""
    document = THOUSAND.replace("tokens_per_second: 100,", "tokens_per_second: 25,")
    async with running(document, store=DistantStore) as desk:
        for _ in range(200):
            streams = [desk.stream() for _ in range(5)]
            for stream in streams:
                await stream.say(post_rh(COMPLETIONS))
                stream.begin(rb(by_ids(100)))
            await asyncio.gather(*(stream.heard() for stream in streams))
            shed = [stream.replies[-1].immediate_response is not None for stream in streams]
            assert sorted(shed) == [False, False, True, True, True]
            for stream, was_shed in zip(streams, shed, strict=True):
                if not was_shed:
                    await stream.say(sh(500, eos=True))
                await stream.end()
            await desk.settled()
            assert await desk.in_use() == InUse()


# Cases 41 and 42


@pytest.mark.parametrize(
    "messages",
    [
        (post_rh("/v1/chat/completions", ("content-length", "10")),),
        (post_rh(), rb(HI, eos=False)),
        (with_protocol(post_rh(), BodyMode.STREAMED, BodyMode.STREAMED), rb(HI, eos=False)),
    ],
)
async def test_a_body_without_an_end_holds_nothing(messages: Sequence[Message]) -> None:
    """Case 41: however long it is silent, nothing is reserved, and nothing is left when it goes."""
    async with running(ONE_AT_A_TIME) as desk:
        silent = desk.stream()
        await silent.say(*messages)
        desk.clock.advance(3_600_000)
        await desk.gate.house.round()
        assert await desk.in_use() == InUse()
        await desk.answer(await desk.admit(HI), status=500)
        await silent.cancel()
        await desk.at_rest()


async def test_a_request_that_waits_for_leave_to_send_is_judged_by_its_length_alone() -> None:
    """Case 41: 11 MB behind `expect: 100-continue` are refused unsent; less than the limit waits without reserving."""
    async with running(ONE_AT_A_TIME) as desk:
        holder = await desk.admit(HI)
        before = await desk.in_use()
        expects = ("expect", "100-continue")
        too_large = desk.stream()
        (reply,) = await too_large.say(
            post_rh("/v1/chat/completions", expects, ("content-length", "11000000"))
        )
        assert immediate_of(reply)[0] == 413
        await too_large.end()
        waiting = desk.stream()
        (reply,) = await waiting.say(
            post_rh("/v1/chat/completions", expects, ("content-length", "1000000"))
        )
        assert reply.immediate_response is None
        assert await desk.in_use() == before
        await waiting.cancel()
        await holder.end()
        await desk.at_rest()


@pytest.mark.parametrize(
    ("method", "path", "more", "answer"),
    [
        ("GET", "/v1/models", (), [sh(200), sb(b'{"object":"list"}', eos=True)]),
        ("HEAD", "/", (), [sh(200, None, ("content-length", "512"), eos=True)]),
        ("OPTIONS", "/v1/chat/completions", (), [sh(204, None, eos=True)]),
        ("GET", "/v1/realtime", (("upgrade", "websocket"),), [sh(101, None)]),
    ],
)
async def test_what_has_no_body_goes_on_at_once(
    method: str, path: str, more: tuple[tuple[str, str], ...], answer: list[Message]
) -> None:
    """Case 42: CONTINUE at the head, which asks for no body; no tokens, no reservation, no wait behind the end."""
    async with running(ONE_AT_A_TIME) as desk:
        stream = desk.stream()
        head = rh([(":method", method), (":path", path), *more], eos=not more)
        (reply,) = await stream.say(head)
        assert kind_of(reply) == "request_headers"
        assert reply.mode_override is not None
        assert reply.mode_override.request_body_mode is BodyMode.NONE
        assert await desk.in_use() == InUse()
        await stream.say(*answer)
        await stream.end()
        assert desk.observer.settlements == []
        await desk.at_rest()


async def test_a_chat_without_a_body_is_refused() -> None:
    """Case 42: the head says that nothing follows."""
    async with running(ONE_AT_A_TIME) as desk:
        stream = desk.stream()
        (reply,) = await stream.say(post_rh(eos=True))
        assert immediate_of(reply)[0] == 400
        await stream.end()
        await desk.at_rest()


# Case 59

CLASSES = """
pools:
  - name: pool
    models: [m]
    capacity: {tokens_per_second: 100, kv_cache: 1Gi, concurrency: 100}
    kv_bytes_per_token: 1Ki
    entitlements:
      - name: critical
        class: elastic
        baseline: {tokens_per_second: 90, kv_cache: 512Mi, concurrency: 90}
        keys: [{plain: key-critical}]
      - {name: batch, class: spot, keys: [{plain: key-batch}]}
"""


async def asked(desk: Filter, tokens: int, who: str) -> int:
    """The status of a request of this many tokens, which stays in flight if it is admitted."""
    _, reply = await desk.ask(by_ids(tokens), COMPLETIONS, key=f"key-{who}")
    return 200 if reply.immediate_response is None else immediate_of(reply)[0]


async def test_batch_is_shed_at_once_and_critical_is_not() -> None:
    """Case 59: 950 of 1000 reserved: batch 100 is refused, critical 50 served, batch 50 refused."""
    async with running(CLASSES) as desk:
        assert await asked(desk, 950, "critical") == 200
        assert await asked(desk, 100, "batch") == 429
        assert await asked(desk, 50, "critical") == 200
        assert await asked(desk, 50, "batch") == 429


async def test_a_lone_batch_request_on_an_idle_pool_is_served() -> None:
    """Case 59: nobody of low class starves: not after refusals, not where it is larger than the pool's budget."""
    async with running(CLASSES) as desk:
        assert await asked(desk, 990, "critical") == 200
        assert await asked(desk, 100, "batch") == 429
        await desk.close()
        desk.clock.advance(60_000)
        await desk.gate.house.round()
        assert await asked(desk, 5_000, "batch") == 200


async def test_a_tenant_idle_for_longer_than_it_is_remembered_is_charged_for_its_late_stream() -> (
    None
):
    """Case 59: a stream that runs for an hour keeps its lease, and its tokens are the right tenant's."""
    async with running(CLASSES) as desk:
        stream = await desk.admit(by_ids(100), COMPLETIONS, key="key-batch")
        await stream.say(sh(200, SSE))
        for _ in range(3_600 // 15):
            desk.clock.advance(15_000)
            await desk.gate.house.round()
        assert (await desk.in_use()).in_flight == 1
        await stream.say(sb(S, eos=True))
        await stream.end()
        await desk.settled()
        assert (desk.last_settled.entitlement, desk.charged) == ("batch", (26, 9))
        assert desk.last_settled.ending is Ending.COMPLETED
        assert await desk.in_use() == InUse()
