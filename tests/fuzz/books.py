"""
A memory store that takes its time, fails when told, and writes down what became of every lease.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.core.admission import Claim, Lease, Settlement
from envoy_tokenpools.core.ledger import LedgerView
from envoy_tokenpools.core.tick import Tick
from envoy_tokenpools.errors import StoreError
from envoy_tokenpools.store.base import (
    Listener,
    Opening,
    Renewal,
    Reply,
    Sight,
    Survivor,
    TickReading,
)
from envoy_tokenpools.store.memory import MemoryStore


class CountingStore:
    """
    A memory store at the end of a slow wire.

    Attributes:
        there: turns of the event loop that a call takes until it is carried out.
        back: turns that the reply takes; whoever is cancelled then does not learn of it.
        fails_there: calls never arrive.
        fails_back: calls are carried out, but their replies are lost.
        on_the_way: calls that have not returned.
        failures: calls that failed, by operation.
        leased: every lease that was given.
        asked: settlements by lease, as often as they were asked for.
        ended: leases that were settled in time or expired, as often as they did.
    """

    def __init__(self, clock: Clock) -> None:
        self._memory = MemoryStore(clock)
        self.there = 0
        self.back = 0
        self.fails_there = False
        self.fails_back = False
        self.on_the_way = 0
        self.failures: Counter[str] = Counter()
        self.leased: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()

    async def reserve(self, pool: str, claim: Claim) -> Reply:
        """See `Store`."""
        with self._travel():
            await self._go("reserve")
            reply = await self._memory.reserve(pool, claim)
            if isinstance(reply.outcome, Lease):
                self.leased.add(reply.outcome.lease_id)
            await self._return("reserve")
            return reply

    async def settle(self, pool: str, lease_id: str, tokens: int) -> Settlement | None:
        """See `Store`."""
        self.asked[lease_id] += 1
        with self._travel():
            await self._go("settle")
            settlement = await self._memory.settle(pool, lease_id, tokens)
            if settlement is not None and not settlement.late:
                self.ended[lease_id] += 1
            await self._return("settle")
            return settlement

    async def renew(self, pool: str, lease_ids: Sequence[str], ttl_ms: int) -> Renewal:
        """See `Store`; housekeeping takes no time here, and never fails."""
        return await self._memory.renew(pool, lease_ids, ttl_ms)

    async def restore(self, pool: str, survivors: Sequence[Survivor], ttl_ms: int) -> None:
        """See `Store`."""
        self.leased.update(survivor.lease.lease_id for survivor in survivors)
        await self._memory.restore(pool, survivors, ttl_ms)

    async def open(self, pool: str, fingerprint: str) -> Opening:
        """See `Store`."""
        return await self._memory.open(pool, fingerprint)

    async def look(self, pool: str, known: Tick) -> Sight:
        """See `Store`."""
        return await self._memory.look(pool, known)

    def listen(self, listener: Listener) -> None:
        """See `Store`."""

    async def sweep(self, pool: str) -> tuple[Lease, ...]:
        """See `Store`."""
        expired = await self._memory.sweep(pool)
        self.ended.update(lease.lease_id for lease in expired)
        return expired

    async def close_tick(self, pool: str, after_ms: int = 0) -> TickReading | None:
        """See `Store`."""
        return await self._memory.close_tick(pool, after_ms)

    async def publish(self, pool: str, tick: Tick, window_ms: int) -> bool:
        """See `Store`."""
        return await self._memory.publish(pool, tick, window_ms)

    async def snapshot(self, pool: str) -> LedgerView:
        """See `Store`."""
        return await self._memory.snapshot(pool)

    async def close(self) -> None:
        """See `Store`."""

    @contextlib.contextmanager
    def _travel(self) -> Iterator[None]:
        self.on_the_way += 1
        try:
            yield
        finally:
            self.on_the_way -= 1

    async def quiet(self) -> None:
        """Wait until no call is on the way."""
        while self.on_the_way:  # noqa: ASYNC110 - it takes turns, not time
            await asyncio.sleep(0)

    async def _go(self, operation: str) -> None:
        for _ in range(self.there):
            await asyncio.sleep(0)
        if self.fails_there:
            self._fail(operation)

    async def _return(self, operation: str) -> None:
        for _ in range(self.back):
            await asyncio.sleep(0)
        if self.fails_back:
            self._fail(operation)

    def _fail(self, operation: str) -> None:
        self.failures[operation] += 1
        raise StoreError(f"{operation} cannot be reached", transient=True)
