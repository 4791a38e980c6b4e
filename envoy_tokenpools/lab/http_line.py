"""
A request's way in a real-time run: over HTTP to whatever listens there.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.core.pool import Reclaim
from envoy_tokenpools.lab.calling import BROKEN_OFF, Call, chat_body
from envoy_tokenpools.lab.clients import Seen, Wish
from envoy_tokenpools.lab.dialect import MESSAGE_TOKENS
from envoy_tokenpools.lab.record import Result
from envoy_tokenpools.lab.scenario import Load, Scenario

EVICTED = "evicted"


@contextlib.asynccontextmanager
async def http_line(scenario: Scenario, base_url: str, clock: Clock) -> AsyncIterator["HttpLine"]:
    """
    A line to a server.

    Args:
        scenario: says which model to ask for, and whose requests may be ended early.
        base_url: the server, without a path.
        clock: the time of what is seen.
    """
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(base_url, connector=connector, timeout=timeout) as session:
        yield HttpLine(scenario, session, clock)


@dataclass(frozen=True, slots=True)
class HttpLine:
    """Streams chat answers; see `http_line`."""

    scenario: Scenario
    session: aiohttp.ClientSession
    clock: Clock

    async def send(self, wish: Wish, retries: int, seen: Seen) -> None:
        """See `Line.send`."""
        call = Call(self.clock)
        try:
            await call.send(
                self.session, self._body(wish), key=wish.load.key, retries=retries, stream=True
            )
        except asyncio.CancelledError:
            _look(call, seen)
            raise
        _look(call, seen)
        seen.asked_wait_ms = call.asked_wait_ms
        seen.result, seen.reason = self._judged(call, wish.load)

    def _body(self, wish: Wish) -> bytes:
        """The same for every attempt; where the length is stated exactly, the backend has to keep to it."""
        return chat_body(
            self.scenario.model,
            f"{wish.load.entitlement}-{wish.number}",
            prompt_words=max(1, wish.prompt_tokens - MESSAGE_TOKENS),
            max_tokens=wish.max_tokens,
            include_usage=True,
            ignore_eos=wish.load.max_tokens is None,
        )

    def _judged(self, call: Call, load: Load) -> tuple[Result, str]:
        if call.completed:
            return Result.COMPLETED, ""
        if call.status == 429:
            evicted = call.shed_reason == EVICTED
            return Result.EVICTED if evicted else Result.SHED, call.shed_reason
        if call.failure == BROKEN_OFF and self._may_be_evicted(load):
            # All that a client sees of it once its answer has begun.
            return Result.EVICTED, EVICTED
        return Result.FAILED, call.failure or str(call.status)

    def _may_be_evicted(self, load: Load) -> bool:
        entitlement = self.scenario.pool.entitlements[load.entitlement]
        return self.scenario.enforces and entitlement.reclaim is Reclaim.EVICT


def _look(call: Call, seen: Seen) -> None:
    seen.decided_us = call.decided_us
    seen.first_token_us = call.first_text_us
    seen.output_tokens = call.tokens
