"""Why was it shed: an operator asks with the id that the client was told, on a real Envoy."""

import asyncio
from typing import Any

import httpx

from envoy_tokenpools.lab.backend import SimulatedBackend
from envoy_tokenpools.lab.dialect import Offer
from envoy_tokenpools.lab.engine import EngineShape
from envoy_tokenpools.standalone import Standalone
from tests.support.stack import AUTHORIZATION, GENEROUS, standalone, state_of

MODEL = "demo-model"
TIGHT = GENEROUS.replace("concurrency: 500}", "concurrency: 1}\n        limits: {concurrency: 1}")
SHAPE = EngineShape(slots=4, tokens_per_second=40, prefill_tokens_per_second=10_000)
CHAT = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "x"}]}


async def why(both: Standalone, request_id: str) -> dict[str, Any]:
    """What the admin says of a request."""
    async with httpx.AsyncClient() as client:
        answer = await client.get(
            f"http://127.0.0.1:{both.filter.admin_port}/explain", params={"request_id": request_id}
        )
    assert answer.status_code == 200
    told: dict[str, Any] = answer.json()
    return told


async def test_a_request_is_explained_by_the_id_of_its_answer() -> None:
    """By Envoy's own, which a shed client is told, or the client's; one that was admitted tells how it ended."""
    backend = SimulatedBackend(SHAPE, Offer(models=(MODEL,)))
    url = await backend.start()
    try:
        async with standalone(TIGHT, url) as both, httpx.AsyncClient() as client:
            ask = f"http://127.0.0.1:{both.envoy.listen_port}/v1/chat/completions"
            mine = AUTHORIZATION | {"x-request-id": "mine-1"}
            running = asyncio.create_task(client.post(ask, json=CHAT, headers=mine))
            async with asyncio.timeout(10):
                while (await state_of(both))["in_use"]["in_flight"] == 0:
                    await asyncio.sleep(0.01)
            shed = await client.post(ask, json=CHAT, headers=AUTHORIZATION)
            assert shed.status_code == 429
            told = await why(both, shed.headers["x-request-id"])
            assert (told["outcome"], told["reason"]) == ("shed", "concurrency_limit")
            assert told["rule"].startswith("rule 4: ")
            assert (told["shortage"]["need"], told["shortage"]["available"]) == (1, 0)

            assert (await why(both, "mine-1"))["ended"] is None
            answer = await running
            assert answer.status_code == 200
            assert "x-request-id" not in answer.headers  # the backend's answers are its own
            told = await why(both, "mine-1")
            assert (told["outcome"], told["entitlement"]) == ("admitted", "tenant")
            assert told["ended"]["ending"] == "completed"
    finally:
        await backend.stop()
