"""
The books of one pool, and callers who keep them busy: each admits and settles one request after the other.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from envoy_tokenpools.clock import SystemClock
from envoy_tokenpools.core.admission import Claim, Lease
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.pool import Pool, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Tick, first_tick
from envoy_tokenpools.store.base import Store
from envoy_tokenpools.store.factory import open_store
from envoy_tokenpools.store.redis import server as redis_server
from envoy_tokenpools.store.redis import store as redis_store
from tests.support.pools import entitlement, pool

_CAPACITY = Resources(tokens_per_second=10**9, kv_bytes=10**15, concurrency=100_000)
"""Nothing is ever short, so that every request takes the whole way of an admitted one."""

_KV_BYTES_PER_TOKEN = 144 * 1024
_COST = Cost(prompt_tokens=23, output_tokens=64, kv_bytes=87 * _KV_BYTES_PER_TOKEN, concurrency=1)
_USED_TOKENS = 31
_WINDOW_MS = 10_000

_TTL_MS = 3_600_000
"""Nobody renews leases here."""

PATIENCE_S = 30
"""What is slow is to be measured, not to fail."""

_AT_ONCE = 64
"""Leases that are taken at once before the measurement."""


@dataclass(frozen=True, slots=True)
class Busy:
    """
    What callers did.

    Attributes:
        requests: admitted and settled.
        seconds: that it took.
        cpu_s: processor time of this process.
        durations_us: of each admission, ascending.
    """

    requests: int
    seconds: float
    cpu_s: float
    durations_us: Sequence[float]

    def percentile_us(self, percent: int) -> float:
        """Of the time that an admission took."""
        return self.durations_us[(len(self.durations_us) - 1) * percent // 100]


@dataclass(frozen=True, slots=True)
class Books:
    """A pool of some store, with its terms in force."""

    store: Store
    pool: Pool
    tick: Tick
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def publish(self) -> None:
        """Put the terms in force."""
        await self.store.open(self.pool.name, "bench")
        if not await self.store.publish(self.pool.name, self.tick, _WINDOW_MS):
            raise RuntimeError("another replica leads the pool")

    async def hold(self, leases: int) -> None:
        """Take so many leases, and keep them."""
        for first in range(0, leases, _AT_ONCE):
            await asyncio.gather(
                *(self._admit() for _ in range(first, min(leases, first + _AT_ONCE)))
            )

    async def busy(self, callers: int, seconds: float) -> Busy:
        """Keep so many callers busy at the same time."""
        durations_us: list[float] = []
        cpu_s, began = time.process_time(), time.perf_counter()
        await asyncio.gather(*(self._call(durations_us, began + seconds) for _ in range(callers)))
        elapsed, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
        return Busy(len(durations_us), elapsed, cpu_s, sorted(durations_us))

    async def _call(self, durations_us: list[float], stop_at: float) -> None:
        began = time.perf_counter()
        while began < stop_at:
            lease_id = await self._admit()
            durations_us.append((time.perf_counter() - began) * 1e6)
            await self.store.settle(self.pool.name, lease_id, _USED_TOKENS)
            began = time.perf_counter()

    async def _admit(self) -> str:
        number = next(self._numbers)
        name = f"tenant-{number % len(self.tick.terms):05}"
        claim = Claim(
            lease_id=f"{number:032x}",
            terms=self.tick.terms[name],
            cost=_COST,
            usable=self.tick.usable,
            window_ms=_WINDOW_MS,
            ttl_ms=_TTL_MS,
            fingerprint=number,
        )
        reply = await self.store.reserve(self.pool.name, claim)
        if not isinstance(reply.outcome, Lease):
            raise RuntimeError(f"a request was refused: {reply.outcome}")  # noqa: TRY004
        return claim.lease_id


def books(store: Store, name: str, *, entitlements: int) -> Books:
    """The books of a pool of this name; nothing is written yet."""
    baseline = Resources(
        _CAPACITY.tokens_per_second // (2 * entitlements),
        _CAPACITY.kv_bytes // (2 * entitlements),
        _CAPACITY.concurrency // (2 * entitlements),
    )
    members = (
        entitlement(f"tenant-{number:05}", ServiceClass.ELASTIC, baseline, slo_target_ms=500)
        for number in range(entitlements)
    )
    opened = replace(pool(_CAPACITY, *members), name=name)
    return Books(store, opened, first_tick(opened, _CAPACITY))


@contextlib.asynccontextmanager
async def patient_store(url: str) -> AsyncIterator[Store]:
    """A store that waits for its server."""
    before = redis_store.WITHIN_S, redis_server.CALL_TIMEOUT_S
    redis_store.WITHIN_S = redis_server.CALL_TIMEOUT_S = PATIENCE_S
    store = open_store(url, SystemClock(), deadline_ms=PATIENCE_S * 1_000)
    try:
        yield store
    finally:
        await store.close()
        redis_store.WITHIN_S, redis_server.CALL_TIMEOUT_S = before
