"""
Clients that leave in the middle: everything is given back, and what was delivered is charged.
"""

import asyncio
import contextlib
import random

import httpx

from envoy_tokenpools.lab.backend import SimulatedBackend
from envoy_tokenpools.lab.dialect import Offer
from envoy_tokenpools.lab.engine import EngineShape
from tests.support.stack import (
    AUTHORIZATION,
    GENEROUS,
    NOTHING_IN_USE,
    metric_lines,
    settled_state,
    standalone,
    total,
)

STREAMS = 200
SLOW = EngineShape(slots=STREAMS, tokens_per_second=STREAMS * 40, prefill_tokens_per_second=100_000)


async def test_two_hundred_streams_cancelled_at_random_leave_nothing_and_are_charged() -> None:
    """In flight and reserved are 0 within 1 s; every request is settled once; delivered text is charged."""
    backend = SimulatedBackend(SLOW, Offer(models=("demo-model",)))
    rng = random.Random(7)
    async with standalone(GENEROUS, await backend.start("127.0.0.1", 0)) as both:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(limits=limits, timeout=30) as client:
            delivered = await asyncio.gather(
                *(_leave_early(client, both.url, rng, number) for number in range(STREAMS))
            )
        state = await settled_state(both)
        assert state["in_use"] == NOTHING_IN_USE
        metrics = await metric_lines(both)
        admitted = total(metrics, "tokenpools_requests_total", 'outcome="admitted"')
        assert total(metrics, "tokenpools_completions_total") == admitted
        assert STREAMS * 4 // 5 <= admitted <= STREAMS
        completion = total(metrics, "tokenpools_tokens_total", 'kind="completion"')
        # One word is one token in the simulator; what was still in a socket's buffer was seen here, not there.
        assert sum(delivered) <= completion <= backend.stats.generated_tokens
        prompt = total(metrics, "tokenpools_tokens_total", 'kind="prompt"')
        assert prompt > 0
    await backend.stop()


async def _leave_early(client: httpx.AsyncClient, url: str, rng: random.Random, number: int) -> int:
    """
    Stream one completion and leave in the middle; returns the words that arrived.

    One in five leaves after a moment, wherever the request is by then, the others after some words.
    """
    body = {
        "model": "demo-model",
        "messages": [{"role": "user", "content": f"request {number}"}],
        "max_tokens": 100,
        "stream": True,
    }
    patience_s = rng.uniform(0.0, 0.5) if number % 5 == 0 else 30.0
    enough = rng.randint(1, 60)
    words = 0

    async def read() -> None:
        nonlocal words
        async with client.stream(
            "POST", url + "/v1/chat/completions", json=body, headers=AUTHORIZATION
        ) as answer:
            async for line in answer.aiter_lines():
                words += line.count('"content":"') - line.count('"content":""')
                if words >= enough:
                    return

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(read(), patience_s)
    return words
