"""
Every store, opened anew, on a time that moves only when told.

Another store is one more entry of `STORES`: the tests know nothing of it but the port and this handle.
"""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from envoy_tokenpools.clock import ManualClock
from envoy_tokenpools.config import parse_address
from envoy_tokenpools.core.admission import Claim, Lease, Refusal, Settlement
from envoy_tokenpools.store.base import Store
from envoy_tokenpools.store.factory import open_store
from envoy_tokenpools.store.redis.server import RedisServer
from envoy_tokenpools.store.redis.store import RedisStore
from tests.support.shared_redis import shared_server

_NUMBERS = itertools.count(1)


@dataclass(slots=True)
class Books:
    """
    One pool's books in some store.

    Attributes:
        store: where they are kept.
        pass_ms: lets the store's own time pass.
        pool: a name that no other test uses, for stores that outlive a test.
    """

    store: Store
    pass_ms: Callable[[int], Awaitable[None]]
    pool: str

    async def reserve(self, claim: Claim) -> Lease | Refusal:
        """The outcome of a claim."""
        return (await self.store.reserve(self.pool, claim)).outcome

    async def take(self, claim: Claim) -> Lease:
        """Claim what must be admitted."""
        outcome = await self.reserve(claim)
        assert isinstance(outcome, Lease), outcome
        return outcome

    async def refuse(self, claim: Claim) -> Refusal:
        """Claim what must be refused."""
        outcome = await self.reserve(claim)
        assert isinstance(outcome, Refusal), outcome
        return outcome

    async def settle(self, lease_id: str, tokens: int = 0) -> Settlement | None:
        """End a lease."""
        return await self.store.settle(self.pool, lease_id, tokens)


@asynccontextmanager
async def memory() -> AsyncIterator[Books]:
    """The embedded store."""
    clock = ManualClock(1_000_000)

    async def pass_ms(ms: int) -> None:
        clock.advance(ms)

    store = open_store("memory://", clock)
    yield Books(store, pass_ms, f"pool-{next(_NUMBERS)}")
    await store.close()


def redis_store(clock: ManualClock) -> Store:
    """Empty books on a real server."""
    address = parse_address(f"{shared_server()}?prefix=test-{next(_NUMBERS)}")
    return RedisStore(
        RedisServer(address), owner="0", prefix=address.prefix, deadline_ms=5_000, clock=clock
    )


@asynccontextmanager
async def redis() -> AsyncIterator[Books]:
    """The books on a real server, by our time."""
    clock = ManualClock(1_000_000)

    async def pass_ms(ms: int) -> None:
        clock.advance(ms)

    store = redis_store(clock)
    yield Books(store, pass_ms, "pool")
    await store.close()


Opener = Callable[[], AbstractAsyncContextManager[Books]]

STORES: dict[str, Opener] = {"memory": memory, "redis": redis}
