"""
The backend of a real-time run: the simulated one, or a server that exists already.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from envoy_tokenpools.lab.backend import SimulatedBackend
from envoy_tokenpools.lab.dialect import Offer
from envoy_tokenpools.lab.scenario import Scenario

_SCRAPE_SECONDS = 1.0
_RUNNING = "vllm:num_requests_running"
_QUEUED = "vllm:num_requests_waiting"


@dataclass(frozen=True, slots=True)
class Burden:
    """Sequences that a backend has in a slot, and that wait inside it for one; None if it does not tell."""

    running: int | None = None
    queued: int | None = None


class LiveBackend(Protocol):
    """Where admitted requests go."""

    @property
    def url(self) -> str:
        """Its address, without a path."""
        ...

    async def burden(self) -> Burden:
        """What it has to do now."""
        ...

    def resize(self, slots: int) -> None:
        """Lose or regain slots, if it can."""
        ...


@contextlib.asynccontextmanager
async def simulated(scenario: Scenario) -> AsyncIterator[LiveBackend]:
    """The scenario's engine as a server on a free loopback port."""
    longest = min(scenario.engine.kv_tokens, Offer((scenario.model,)).max_model_len)
    offer = Offer((scenario.model,), max_model_len=longest)
    backend = SimulatedBackend(scenario.engine, offer)
    url = await backend.start("127.0.0.1", 0)
    try:
        yield _Simulated(url, backend)
    finally:
        await backend.stop()


@contextlib.asynccontextmanager
async def existing(url: str) -> AsyncIterator[LiveBackend]:
    """A server such as vLLM; its queue is read from its metrics, its size is what it is."""
    timeout = aiohttp.ClientTimeout(total=_SCRAPE_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield _Existing(url, session)


@dataclass(frozen=True, slots=True)
class _Simulated:
    url: str
    backend: SimulatedBackend

    async def burden(self) -> Burden:
        stats = self.backend.stats
        return Burden(stats.running, stats.waiting)

    def resize(self, slots: int) -> None:
        self.backend.resize(slots)


@dataclass(frozen=True, slots=True)
class _Existing:
    url: str
    session: aiohttp.ClientSession

    async def burden(self) -> Burden:
        try:
            async with self.session.get(f"{self.url.rstrip('/')}/metrics") as answer:
                if answer.status != 200:
                    return Burden()
                return read_burden(await answer.text())
        except (aiohttp.ClientError, TimeoutError):
            return Burden()

    def resize(self, slots: int) -> None:
        """Not from here: only the filter is told."""


def read_burden(exposition: str) -> Burden:
    """What vLLM's metrics say, all of its engines together."""
    values: dict[str, int] = {}
    for line in exposition.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in (_RUNNING, _QUEUED):
            with contextlib.suppress(ValueError):
                values[name] = values.get(name, 0) + int(float(line.rsplit(" ", 1)[-1]))
    return Burden(values.get(_RUNNING), values.get(_QUEUED))
