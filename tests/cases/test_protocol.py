"""The protocol with Envoy: kinds and order of replies, modes, our own answers, and decisions that come too late."""

import asyncio
import contextlib
import json

import pytest

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.core.admission import Claim, Settlement
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.observer import Outcome
from envoy_tokenpools.store.base import Reply
from tests.support.cases import ONE_AT_A_TIME, ROOMY, SSE, running
from tests.support.extproc import (
    HI,
    BodyMode,
    Message,
    immediate_of,
    kind_of,
    observed,
    post_rh,
    rb,
    rt,
    sb,
    sh,
    st,
    with_protocol,
)
from tests.support.gate import DistantStore
from tests.support.streams import S

EVERY_KIND = (
    post_rh(),
    rb(HI, eos=False),
    rt(),
    sh(200, SSE),
    sb(S),
    sb(eos=True),
    st(),
)


async def test_every_message_has_one_reply_of_its_own_kind() -> None:
    """Case 44: headers, bodies and trailers both ways; a mode is overridden by replies to headers only."""
    async with running(ROOMY) as desk:
        stream = desk.stream()
        replies = await stream.say(*EVERY_KIND)
        assert [kind_of(reply) for reply in replies] == [kind_of(m) for m in EVERY_KIND]
        assert all(reply.mode_override is None for reply in replies)
        await stream.end()
        await desk.settled()
        assert desk.charged == (26, 9)
        await desk.at_rest()


@pytest.mark.parametrize("mode", [BodyMode.NONE, None])
@pytest.mark.parametrize("reports", [True, False])
async def test_a_body_that_is_kept_from_us_costs_the_flat_amount(
    mode: BodyMode | None, *, reports: bool
) -> None:
    """Case 44: where overriding is not allowed the answer comes next: it goes on, and is charged."""
    async with running(ROOMY) as desk:
        stream = desk.stream()
        first = post_rh() if mode is None else with_protocol(post_rh(), mode, BodyMode.NONE)
        await stream.say(first)
        assert await desk.in_use() == InUse()
        (reply,) = await stream.say(sh(200, SSE))
        assert kind_of(reply) == "response_headers"
        assert (await desk.in_use()).in_flight == 1
        if reports:
            await stream.say(sb(S), sb(eos=True))
        await stream.end()
        await desk.settled()
        assert desk.charged == ((26, 9) if reports else (1_024, 0))
        await desk.at_rest()


async def test_an_observer_is_silent_and_counts() -> None:
    """Case 44: `observability_mode` on every message: no reply at all, and the usage is charged."""
    async with running(ONE_AT_A_TIME) as desk:
        holder = await desk.admit(HI)
        stream = desk.stream()
        assert await stream.say(*(observed(Message.parse(bytes(m))) for m in EVERY_KIND)) == []
        await stream.end()
        await desk.settled()
        assert desk.charged == (26, 9)
        await holder.end()
        await desk.at_rest()


async def test_messages_before_their_turn_get_their_replies_in_order() -> None:
    """Case 44: bodies before the reply to the head, and a response body before any request body."""
    async with running(ROOMY) as desk:
        stream = desk.stream()
        early = (post_rh(), rb(HI[:9], eos=False), rb(HI[9:]), sh(200, SSE), sb(S, eos=True))
        for message in early:
            stream.begin(message)
        while len(stream.payloads) < len(early):
            await stream.heard()
            stream._asks.clear()
        assert [kind_of(reply) for reply in stream.replies] == [kind_of(m) for m in early]
        await stream.end()
        odd = desk.stream()
        replies = await odd.say(post_rh(), sb(b"x"), rb(HI), sh(200, SSE), sb(S, eos=True))
        assert [kind_of(reply) for reply in replies][1:3] == ["response_body", "request_body"]
        await odd.end()
        await desk.at_rest()


async def test_our_own_429_on_its_way_back_is_counted_once() -> None:
    """Case 47: it is no response of a backend: not changed, not settled, not charged, not counted again."""
    async with running(ONE_AT_A_TIME) as desk:
        holder = await desk.admit(HI)
        stream, reply = await desk.ask(HI)
        status, headers, answer = immediate_of(reply)
        decisions = len(desk.observer.decisions)
        replies = await stream.say(
            sh(status, None, *headers.items()), sb(json.dumps(answer).encode(), eos=True)
        )
        assert [bytes(reply) for reply in replies] == [b"\x12\x02\n\x00", b"\x22\x02\n\x00"]
        await stream.end()
        await desk.settled()
        assert [event.outcome for event in desk.observer.decisions[:decisions]] == [
            Outcome.ADMITTED,
            Outcome.SHED,
        ]
        assert len(desk.observer.decisions) == decisions
        assert desk.observer.settlements == []
        await holder.end()
        await desk.at_rest()


class LateStore(DistantStore):
    """A store whose reservations are made when it is told, whether or not anybody waits for them."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.go = asyncio.Event()
        self.is_slow = True

    async def reserve(self, pool: str, claim: Claim) -> Reply:
        """See `Store`."""
        if not self.is_slow:
            return await super().reserve(pool, claim)
        made = asyncio.create_task(self._made_late(pool, claim))
        return await asyncio.shield(made)

    async def settle(self, pool: str, lease_id: str, tokens: int) -> Settlement | None:
        """See `Store`; it keeps the order of what it is told."""
        await self.go.wait()
        await asyncio.sleep(0)
        return await super().settle(pool, lease_id, tokens)

    async def _made_late(self, pool: str, claim: Claim) -> Reply:
        await self.go.wait()
        return await super().reserve(pool, claim)


async def test_a_reservation_that_comes_after_the_end_is_undone() -> None:
    """Case 48: Envoy gave up while the store was slow; what is committed afterwards does not stay."""
    async with running(ONE_AT_A_TIME, store=LateStore) as desk:
        assert isinstance(desk.store, LateStore)
        stream = desk.stream()
        await stream.say(post_rh())
        stream.begin(rb(HI))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stream.heard(), 0.01)
        await stream.cancel()
        assert len(stream.payloads) == 1
        desk.store.go.set()
        desk.store.is_slow = False
        await desk.at_rest()
