"""One replica's gate on a shared store, in real time: decisions, settlements, and the housekeeping in between."""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from envoy_tokenpools.clock import SystemClock
from envoy_tokenpools.config import Config, parse_address
from envoy_tokenpools.core.ledger import LedgerView
from envoy_tokenpools.core.pool import Pool
from envoy_tokenpools.gate.gate import Gate
from envoy_tokenpools.gate.order import Admitted, Outcome, Refused
from envoy_tokenpools.observer import Ending
from envoy_tokenpools.openai.usage import Usage
from envoy_tokenpools.store.redis.server import RedisServer
from envoy_tokenpools.store.redis.store import RedisStore
from tests.support.gate import WordCounter, by_ids, configured, metered, order_for
from tests.support.observers import RecordingObserver

_BODIES = itertools.count(1)


@dataclass(slots=True)
class Replica:
    """
    A gate whose store is a server.

    Attributes:
        gate: it.
        store: its store.
        config: its configuration.
        observer: what it was told.
        took_s: how long each decision took.
    """

    gate: Gate
    store: RedisStore
    config: Config
    observer: RecordingObserver
    took_s: list[float] = field(default_factory=list)

    async def ask(
        self, name: str, tokens: int = 10, output: int = 5, model: str = "m"
    ) -> Admitted | Refused:
        """A request of entitlement `name`, unlike any before."""
        body = by_ids(tokens, output, user=str(next(_BODIES)), model=model)
        loop = asyncio.get_running_loop()
        began = loop.time()
        verdict = await self.gate.admit(order_for(self.config, body, name))
        self.took_s.append(loop.time() - began)
        return verdict

    async def admit(
        self, name: str, tokens: int = 10, output: int = 5, model: str = "m"
    ) -> Admitted:
        """One that must be admitted."""
        verdict = await self.ask(name, tokens, output, model)
        assert isinstance(verdict, Admitted), verdict
        return verdict

    async def settle(self, admitted: Admitted) -> None:
        """It has ended, and used what was reserved."""
        cost = admitted.lease.cost
        seen = metered(Usage(cost.prompt_tokens, cost.output_tokens), "x")
        await self.gate.settle(Outcome(admitted, Ending.COMPLETED, 200, seen))

    async def view(self, pool: str = "pool") -> LedgerView:
        """The books as the server shows them."""
        return await self.store.snapshot(pool)


@contextlib.asynccontextmanager
async def replica(url: str, *pools: Pool, deadline_ms: int = 50) -> AsyncIterator[Replica]:
    """A replica that looks after its house until the end."""
    config = configured(*pools)
    clock, observer = SystemClock(), RecordingObserver()
    address = parse_address(url)
    owner = secrets.token_hex(4)
    store = RedisStore(
        RedisServer(address), owner=owner, prefix=address.prefix, deadline_ms=deadline_ms
    )
    numbers = itertools.count(1)
    gate = Gate(
        config,
        store=store,
        counter=WordCounter(),
        clock=clock,
        observer=observer,
        new_lease_id=lambda: f"{owner}-{next(numbers)}",
        jitter=lambda: 0.0,
    )
    await gate.house.start()
    keeping = asyncio.create_task(gate.house.run())
    try:
        yield Replica(gate, store, config, observer)
    finally:
        await gate.close()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await store.close()
