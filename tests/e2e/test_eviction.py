"""Leases that are taken back, on a real Envoy: what clients and the backend see."""

import asyncio
import contextlib
import random
import statistics
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

from envoy_tokenpools.lab.backend import SimulatedBackend
from envoy_tokenpools.lab.dialect import Offer
from envoy_tokenpools.lab.engine import EngineShape
from envoy_tokenpools.standalone import Standalone
from tests.support.stack import metric_lines, settled_state, standalone, total

MODEL = "demo-model"
POOL = """
pools:
  - name: pool
    models: [demo-model]
    capacity: {tokens_per_second: 1M, kv_cache: 64GiB, concurrency: 1000}
    kv_bytes_per_token: 144KiB
    entitlements:
      - {name: night, class: preemptible, keys: [{plain: key}]}
      - name: day
        class: guaranteed
        baseline: {tokens_per_second: 1k, kv_cache: 1GiB, concurrency: 2}
        keys: [{plain: vip}]
"""
SHAPE = EngineShape(slots=1_000, tokens_per_second=50_000, prefill_tokens_per_second=500)
"""Fifty tokens per second and sequence; a prompt of a hundred words takes a fifth of a second."""
WITHIN_S = 15.0


@dataclass(slots=True)
class Rig:
    """Backend, filter and Envoy."""

    backend: SimulatedBackend
    both: Standalone

    def body(self, *, stream: bool, words: int) -> dict[str, object]:
        """A chat whose answer takes a long time."""
        messages = [{"role": "user", "content": "word " * words}]
        return {"model": MODEL, "stream": stream, "messages": messages, "max_tokens": 600}

    async def running(self, count: int) -> None:
        """Wait until the backend runs so many sequences."""
        async with asyncio.timeout(WITHIN_S):
            while self.backend.stats.running != count:
                await asyncio.sleep(0.001)

    def evict(self, *lease_ids: str) -> None:
        """The store wants these leases back; all of them if none is named."""
        house = self.both.filter.gate.house
        for lease_id in lease_ids or self.leases:
            house.evict("pool", lease_id)

    @property
    def leases(self) -> list[str]:
        """What is held, oldest first."""
        return self.both.filter.gate.house.held("pool")


@contextlib.asynccontextmanager
async def rigged(pools: str = POOL, shape: EngineShape = SHAPE) -> AsyncIterator[Rig]:
    """All of it, gone afterwards."""
    backend = SimulatedBackend(shape, Offer(models=(MODEL,)))
    url = await backend.start("127.0.0.1", 0)
    try:
        async with standalone(pools, url) as both:
            yield Rig(backend, both)
    finally:
        await backend.stop()


@dataclass(slots=True)
class Heard:
    """What a client heard: status, headers, bytes, and whether the answer broke off."""

    status: int
    headers: httpx.Headers
    body: bytes
    broke_off: bool


async def ask(rig: Rig, client: httpx.AsyncClient, *, stream: bool, words: int = 1) -> Heard:
    """A request of the preemptible entitlement, heard to its end."""
    headers = {"authorization": "Bearer key"}
    body = rig.body(stream=stream, words=words)
    heard = b""
    async with client.stream(
        "POST", f"{rig.both.url}/v1/chat/completions", json=body, headers=headers
    ) as answer:
        try:
            async for piece in answer.aiter_raw():
                heard += piece
        except httpx.RemoteProtocolError:
            return Heard(answer.status_code, answer.headers, heard, broke_off=True)
    return Heard(answer.status_code, answer.headers, heard, broke_off=False)


async def test_before_its_answer_an_evicted_request_gets_a_429() -> None:
    """The backend is rid of it at once; nothing is charged."""
    async with rigged() as rig, httpx.AsyncClient(timeout=WITHIN_S) as client:
        asking = asyncio.create_task(ask(rig, client, stream=False))
        await rig.running(1)
        rig.evict()
        heard = await asking
        assert (heard.status, heard.headers["x-tokenpools-reason"]) == (429, "evicted")
        assert int(heard.headers["retry-after-ms"]) >= 1_000
        await rig.running(0)
        state = await settled_state(rig.both)
        assert not any(state["in_use"].values())
        metrics = await metric_lines(rig.both)
        assert total(metrics, "tokenpools_completions_total", 'ending="evicted"') == 1
        assert total(metrics, "tokenpools_requests_total", 'outcome="evicted"') == 1
        assert total(metrics, "tokenpools_tokens_total", 'kind="prompt"') == 0


async def test_an_answer_that_has_begun_breaks_off() -> None:
    """The client sees that it is not whole; what was delivered is charged; the backend is rid of it within moments."""
    freed_ms: list[float] = []
    loop = asyncio.get_running_loop()
    async with rigged() as rig, httpx.AsyncClient(timeout=WITHIN_S) as client:
        for _ in range(5):
            before = rig.backend.stats.generated_tokens
            asking = asyncio.create_task(ask(rig, client, stream=True))
            while rig.backend.stats.generated_tokens < before + 3:
                await asyncio.sleep(0.002)
            evicted_at = loop.time()
            rig.evict()
            await rig.running(0)
            freed_ms.append((loop.time() - evicted_at) * 1_000)
            heard = await asking
            assert (heard.status, heard.broke_off) == (200, True)
            assert b'"content":' in heard.body
        assert not any((await settled_state(rig.both))["in_use"].values())
        metrics = await metric_lines(rig.both)
        assert total(metrics, "tokenpools_completions_total", 'ending="evicted"') == 5
        assert total(metrics, "tokenpools_tokens_total", 'kind="completion"') >= 5
    print(f"the backend was rid of an evicted stream after {statistics.median(freed_ms):.1f} ms")
    assert statistics.median(freed_ms) < 500


async def test_two_hundred_streams_evicted_anywhere_leave_nothing() -> None:
    """Half of them, at random instants; some clients leave in the same moment."""
    rng = random.Random(11)
    limits = httpx.Limits(max_connections=None)
    async with rigged() as rig, httpx.AsyncClient(timeout=60, limits=limits) as client:
        asking = [
            asyncio.create_task(
                ask(rig, client, stream=rng.random() < 0.5, words=rng.randint(1, 60))
            )
            for _ in range(200)
        ]
        await rig.running(200)
        leases = rig.leases
        rng.shuffle(leases)
        for lease_id in leases[:100]:
            rig.evict(lease_id)
            if rng.random() < 0.1:
                rng.choice(asking).cancel()
            await asyncio.sleep(rng.random() * 0.01)
        for task in asking:
            if rng.random() < 0.5:
                task.cancel()
        await asyncio.sleep(0.2)
        rig.evict()
        await asyncio.gather(*asking, return_exceptions=True)
        await rig.running(0)
        assert not any((await settled_state(rig.both))["in_use"].values())
        metrics = await metric_lines(rig.both)
        assert total(metrics, "tokenpools_completions_total") == 200
        assert total(metrics, "tokenpools_completions_total", 'ending="evicted"') >= 100
