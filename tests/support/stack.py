"""
The product as it runs: filter and real Envoy on free loopback ports, in front of some backend.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx

from envoy_tokenpools.config import load_config
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from envoy_tokenpools.server import Listen
from envoy_tokenpools.standalone import Standalone

GENEROUS = """
server: {unknown_endpoints: pass}
pools:
  - name: pool
    models: [tiny, m, demo-model]
    capacity: {tokens_per_second: 1M, kv_cache: 64GiB, concurrency: 1000}
    kv_bytes_per_token: 144KiB
    tick: 1s
    entitlements:
      - name: tenant
        class: elastic
        slo_target: 500ms
        baseline: {tokens_per_second: 100k, kv_cache: 8GiB, concurrency: 500}
        keys: [{plain: key}]
"""
"""A pool in which nothing is ever short."""

UNTOUCHED = GENEROUS.replace("tick: 1s", "tick: 1s\n    inject_usage: false")
"""The same pool, with not even usage asked for."""

AUTHORIZATION = {"authorization": "Bearer key"}


@contextlib.asynccontextmanager
async def standalone(config: str, backend_url: str) -> AsyncIterator[Standalone]:
    """Filter and Envoy in front of `backend_url`, stopped at the end."""
    both = Standalone(
        load_config(config, env={}),
        EnvoyOptions(backend_url=backend_url, listen_host="127.0.0.1", listen_port=0, admin_port=0),
        Listen("127.0.0.1:0", "127.0.0.1", 0),
        envoy_log_level="error",
    )
    await both.start()
    try:
        yield both
    finally:
        await both.stop()


async def state_of(both: Standalone) -> dict[str, Any]:
    """The first pool of `/state`, as an operator sees it."""
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{both.filter.admin_port}/state")
    pool: dict[str, Any] = answer.json()["pools"][0]
    return pool


async def metric_lines(both: Standalone) -> dict[str, float]:
    """Every series of `/metrics` with its value."""
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{both.filter.admin_port}/metrics")
    lines = (line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def total(metrics: dict[str, float], name: str, *labels: str) -> float:
    """The sum of all series of `name` that carry all of `labels` (written as `label="value"`)."""
    return sum(
        value
        for series, value in metrics.items()
        if series.partition("{")[0] == name and all(label in series for label in labels)
    )


async def settled_state(both: Standalone, within_s: float = 1.0) -> dict[str, Any]:
    """The state once nothing is in flight, or as it is after `within_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        state = await state_of(both)
        if not any(state["in_use"].values()) or loop.time() > deadline:
            return state
        await asyncio.sleep(0.02)


NOTHING_IN_USE = {"in_flight": 0, "concurrency": 0, "tokens_reserved": 0, "kv_bytes": 0}
