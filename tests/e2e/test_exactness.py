"""
Exactly as much as there is room for, through a real Envoy.
"""

import asyncio
import json

import httpx

from tests.support.replay import Received, ReplayBackend, json_response
from tests.support.stack import AUTHORIZATION, NOTHING_IN_USE, settled_state, standalone

ROUNDS = 200

# 10 tokens per second, 25 s deep: a budget of 250 that does not refill noticeably within one round.
BUDGET_OF_250 = """
pools:
  - name: pool
    models: [m]
    capacity: {tokens_per_second: 1, kv_cache: 1GiB, concurrency: 100}
    kv_bytes_per_token: 1KiB
    window: 250s
    output_estimate: max_tokens
    entitlements:
      - name: tenant
        class: spot
        keys: [{plain: key}]
"""

# Refunds everything, so that each round starts with the whole budget.
FREE = json.dumps(
    {
        "object": "chat.completion",
        "choices": [],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
).encode()

REQUEST = json.dumps({"model": "m", "prompt": [1] * 60, "max_tokens": 40, "stream": False}).encode()
"""60 token ids and 40 tokens of output: 100 tokens."""


class _Gathering:
    """Holds answers back until they are let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def respond(self, _: Received, writer: asyncio.StreamWriter) -> None:
        await self.go.wait()
        writer.write(json_response(FREE))


async def test_of_five_requests_that_need_100_of_250_tokens_two_are_admitted() -> None:
    """Exactly two of five concurrent requests pass, in each of 200 rounds."""
    gathering = _Gathering()
    backend = ReplayBackend(gathering.respond)
    async with (
        standalone(BUDGET_OF_250, await backend.start()) as both,
        httpx.AsyncClient() as client,
    ):
        for _ in range(ROUNDS):
            gathering.go = asyncio.Event()
            asked = [
                asyncio.create_task(
                    client.post(
                        both.url + "/v1/completions", content=REQUEST, headers=AUTHORIZATION
                    )
                )
                for _ in range(5)
            ]
            shed = 0
            for next_answer in asyncio.as_completed(asked):
                answer = await next_answer
                shed += answer.status_code == 429
                if shed == 3:
                    gathering.go.set()
            statuses = sorted([(await task).status_code for task in asked])
            assert statuses == [200, 200, 429, 429, 429]
            assert (await settled_state(both))["in_use"] == NOTHING_IN_USE
    await backend.stop()
