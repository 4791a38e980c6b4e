"""Requests that wait for capacity, on a real Envoy whose own patience is far shorter."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

from envoy_tokenpools.config import load_config
from envoy_tokenpools.envoyconf.child import EnvoyChild
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from envoy_tokenpools.lab.backend import SimulatedBackend
from envoy_tokenpools.lab.dialect import Offer
from envoy_tokenpools.lab.engine import EngineShape
from envoy_tokenpools.server import FilterServer, Listen

MODEL = "demo-model"
POOL = """
server: {drain: 1s}
pools:
  - name: pool
    models: [demo-model]
    capacity: {tokens_per_second: 100k, kv_cache: 64GiB, concurrency: 1}
    kv_bytes_per_token: 144KiB
    entitlements:
      - name: patient
        class: elastic
        baseline: {tokens_per_second: 100, kv_cache: 1GiB, concurrency: 1}
        max_wait: 20s
        keys: [{plain: patient}]
      - name: brief
        class: elastic
        baseline: {tokens_per_second: 100, kv_cache: 1GiB, concurrency: 1}
        max_wait: 600ms
        keys: [{plain: brief}]
"""
MESSAGE_TIMEOUT_MS = 300
"""What Envoy waits for an answer of the filter, unless it is told otherwise."""
SHAPE = EngineShape(slots=1, tokens_per_second=20, prefill_tokens_per_second=1_000)


@dataclass(slots=True)
class Rig:
    """A backend that runs one sequence, the filter, and an impatient Envoy."""

    filter: FilterServer
    client: httpx.AsyncClient

    async def ask(self, key: str, max_tokens: int) -> httpx.Response:
        """A chat that takes a twentieth of a second per token."""
        body = {"model": MODEL, "max_tokens": max_tokens} | {
            "messages": [{"role": "user", "content": f"hi {key}"}]
        }
        headers = {"authorization": f"Bearer {key}"}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def waiting(self) -> int:
        """How many wait, as `/state` tells."""
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://127.0.0.1:{self.filter.admin_port}/state")
        pool = json.loads(answer.text)["pools"][0]
        return sum(entitlement["waiting"] for entitlement in pool["entitlements"])

    async def until_waiting(self, count: int) -> None:
        """Wait until so many wait."""
        async with asyncio.timeout(10):
            while await self.waiting() != count:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def rigged() -> AsyncIterator[Rig]:
    """All of it, gone afterwards."""
    backend = SimulatedBackend(SHAPE, Offer(models=(MODEL,)))
    url = await backend.start("127.0.0.1", 0)
    server = FilterServer(load_config(POOL, env={}), Listen("127.0.0.1:0", "127.0.0.1", 0))
    await server.start()
    envoy = EnvoyChild(
        EnvoyOptions(
            backend_url=url,
            listen_host="127.0.0.1",
            listen_port=0,
            admin_port=0,
            ext_proc_port=server.ext_proc_port,
            message_timeout_ms=MESSAGE_TIMEOUT_MS,
        ),
        log_level="error",
    )
    try:
        await envoy.start()
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{envoy.listen_port}", timeout=30
        ) as client:
            yield Rig(server, client)
    finally:
        await envoy.stop()
        await server.stop()
        await backend.stop()


async def test_waiting_ends_with_capacity_the_deadline_or_the_client() -> None:
    """Longer than Envoy's own timeout; who leaves or waited long enough holds nothing, and the next one is served."""
    async with rigged() as rig:
        loop = asyncio.get_running_loop()
        first = asyncio.create_task(rig.ask("patient", 40))
        await asyncio.sleep(0.2)
        began = loop.time()
        patient = asyncio.create_task(rig.ask("patient", 2))
        leaving = asyncio.create_task(rig.ask("patient", 2))
        await rig.until_waiting(2)
        brief = await rig.ask("brief", 2)
        assert brief.status_code == 429
        assert brief.headers["x-tokenpools-reason"] == "pool_contended"
        assert 0.6 <= loop.time() - began < 1.5
        leaving.cancel()
        await rig.until_waiting(1)
        assert (await first).status_code == 200
        served = await patient
        assert served.status_code == 200
        assert loop.time() - began > 1.0 > MESSAGE_TIMEOUT_MS / 1_000
        after = await rig.ask("brief", 1)
        assert after.status_code == 200
        assert await rig.waiting() == 0
