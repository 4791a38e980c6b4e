"""Configurations, counters, stores and whole gates on a time that moves only when told."""

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from envoy_tokenpools.clock import Clock, ManualClock
from envoy_tokenpools.config import Config, EntitlementRef, ServerSettings, credential_digest
from envoy_tokenpools.core.admission import Claim, Lease, Settlement
from envoy_tokenpools.core.ledger import InUse, LedgerView
from envoy_tokenpools.core.pool import Pool
from envoy_tokenpools.core.tick import Tick
from envoy_tokenpools.errors import StoreError
from envoy_tokenpools.gate.directory import Directory
from envoy_tokenpools.gate.gate import Gate
from envoy_tokenpools.gate.order import Admitted, Order, Outcome, Refused, Verdict, fingerprint_of
from envoy_tokenpools.observer import Ending
from envoy_tokenpools.openai.request import Endpoint, parse_request
from envoy_tokenpools.openai.usage import Metered, Usage
from envoy_tokenpools.store.base import (
    Listener,
    Opening,
    Renewal,
    Reply,
    Sight,
    Store,
    Survivor,
    TickReading,
)
from envoy_tokenpools.store.memory import MemoryStore
from tests.support.observers import RecordingObserver


def configured(
    *pools: Pool,
    default_pool: str | None = None,
    server: ServerSettings = ServerSettings(),  # noqa: B008 - frozen
) -> Config:
    """A configuration where `key-NAME` identifies entitlement NAME in every pool that has one."""
    keys: dict[bytes, tuple[EntitlementRef, ...]] = {}
    for pool in pools:
        for name in pool.entitlements:
            digest = credential_digest(f"key-{name}")
            keys[digest] = (*keys.get(digest, ()), EntitlementRef(pool.name, name))
    return Config(
        state="memory://",
        pools={pool.name: pool for pool in pools},
        pool_of_model={model: pool.name for pool in pools for model in pool.models},
        default_pool=default_pool,
        keys=keys,
        server=server,
    )


@dataclass(slots=True)
class WordCounter:
    """
    A word is a token.

    Attributes:
        held: while set, counting takes until the event is.
        error: raised by every count that takes long.
        counted: the texts of every count that took long.
    """

    held: asyncio.Event | None = None
    error: Exception | None = None
    counted: list[tuple[str, ...]] = field(default_factory=list)

    def count_now(self, vocabulary: str, texts: Sequence[str]) -> int | None:
        """The words, unless counting is to take long."""
        return None if self.held is not None else self._words(vocabulary, texts)

    async def count(self, vocabulary: str, texts: Sequence[str]) -> int:
        """The words, when the time has come."""
        self.counted.append(tuple(texts))
        if self.held is not None:
            await self.held.wait()
        if self.error is not None:
            raise self.error
        return self._words(vocabulary, texts)

    @staticmethod
    def _words(_: str, texts: Sequence[str]) -> int:
        return sum(len(text.split()) for text in texts)


class DistantStore:
    """
    A memory store at the end of a wire: every call yields to the event loop, and the operations in `failing` fail.
    """

    def __init__(self, clock: Clock) -> None:
        self._memory = MemoryStore(clock)
        self.failing: set[str] = set()
        self.calls: list[str] = []

    async def reserve(self, pool: str, claim: Claim) -> Reply:
        """See `Store`."""
        await self._travel("reserve")
        return await self._memory.reserve(pool, claim)

    async def settle(self, pool: str, lease_id: str, tokens: int) -> Settlement | None:
        """See `Store`."""
        await self._travel("settle")
        return await self._memory.settle(pool, lease_id, tokens)

    async def renew(self, pool: str, lease_ids: Sequence[str], ttl_ms: int) -> Renewal:
        """See `Store`."""
        await self._travel("renew")
        return await self._memory.renew(pool, lease_ids, ttl_ms)

    async def restore(self, pool: str, survivors: Sequence[Survivor], ttl_ms: int) -> None:
        """See `Store`."""
        await self._travel("restore")
        await self._memory.restore(pool, survivors, ttl_ms)

    async def sweep(self, pool: str) -> tuple[Lease, ...]:
        """See `Store`."""
        await self._travel("sweep")
        return await self._memory.sweep(pool)

    async def open(self, pool: str, fingerprint: str) -> Opening:
        """See `Store`."""
        await self._travel("open")
        return await self._memory.open(pool, fingerprint)

    async def look(self, pool: str, known: Tick) -> Sight:
        """See `Store`."""
        await self._travel("look")
        return await self._memory.look(pool, known)

    async def close_tick(self, pool: str, after_ms: int = 0) -> TickReading | None:
        """See `Store`."""
        await self._travel("close_tick")
        return await self._memory.close_tick(pool, after_ms)

    async def publish(self, pool: str, tick: Tick, window_ms: int) -> bool:
        """See `Store`."""
        await self._travel("publish")
        return await self._memory.publish(pool, tick, window_ms)

    async def snapshot(self, pool: str) -> LedgerView:
        """See `Store`."""
        await self._travel("snapshot")
        return await self._memory.snapshot(pool)

    def listen(self, listener: Listener) -> None:
        """See `Store`."""
        self.listener = listener

    async def close(self) -> None:
        """See `Store`."""
        await self._travel("close")

    async def _travel(self, operation: str) -> None:
        self.calls.append(operation)
        await asyncio.sleep(0)
        if operation in self.failing:
            raise StoreError(f"{operation} cannot be reached", transient=True)


def by_ids(tokens: int, output: int = 0, **fields: object) -> bytes:
    """A completion request of exactly `tokens`, `output` of them generated: its prompt comes as token ids."""
    body = {"model": "m", "prompt": [7] * (tokens - output), "max_tokens": max(1, output)}
    if output == 0:
        body |= {"max_tokens": 0, "echo": True}
    return json.dumps(body | fields).encode()


def order_for(
    config: Config,
    body: bytes,
    name: str = "a",
    *,
    endpoint: Endpoint = Endpoint.COMPLETIONS,
    is_retry: bool = False,
    enforce: bool = True,
) -> Order:
    """What the exchange would ask for entitlement `name`."""
    directory = Directory(config)
    facts = parse_request(endpoint, body)
    pool, entitlement = directory.resolve(directory.identify(f"key-{name}"), facts.model)
    return Order(
        pool=pool,
        entitlement=entitlement,
        facts=facts,
        fingerprint=fingerprint_of(body),
        is_retry=is_retry,
        arrived_us=0,
        enforce=enforce,
    )


def metered(
    usage: Usage | None = None,
    *texts: str,
    finished: bool = True,
    overflow_chars: int = 0,
    unread: int = 0,
    token_ids: int = 0,
) -> Metered:
    """What was seen of a response."""
    return Metered(
        usage,
        texts,
        finished,
        error=False,
        overflow_chars=overflow_chars,
        unread=unread,
        token_ids=token_ids,
    )


@dataclass(slots=True)
class GateDesk:
    """A gate with all that it is made of."""

    config: Config
    gate: Gate
    store: Store
    counter: WordCounter
    clock: ManualClock
    observer: RecordingObserver

    @classmethod
    async def open(
        cls,
        *pools: Pool,
        store: Callable[[Clock], Store] = MemoryStore,
        server: ServerSettings = ServerSettings(),  # noqa: B008 - frozen
        default_pool: str | None = None,
        jitter: float = 0.0,
        now_ms: int = 0,
    ) -> "GateDesk":
        """A gate whose first terms are in force."""
        config = configured(*pools, server=server, default_pool=default_pool)
        clock = ManualClock(now_ms)
        books = store(clock)
        counter = WordCounter()
        observer = RecordingObserver()
        numbers = itertools.count(1)
        gate = Gate(
            config,
            store=books,
            counter=counter,
            clock=clock,
            observer=observer,
            new_lease_id=lambda: f"lease-{next(numbers)}",
            jitter=lambda: jitter,
        )
        await gate.house.start()
        return cls(config, gate, books, counter, clock, observer)

    async def ask(
        self,
        body: bytes,
        name: str = "a",
        *,
        endpoint: Endpoint = Endpoint.COMPLETIONS,
        is_retry: bool = False,
        enforce: bool = True,
    ) -> Verdict:
        """Ask for entitlement `name` to have this request admitted."""
        order = order_for(
            self.gate.config, body, name, endpoint=endpoint, is_retry=is_retry, enforce=enforce
        )
        return await self.gate.admit(order)

    async def admit(self, body: bytes, name: str = "a") -> Admitted:
        """Ask for what must be admitted."""
        verdict = await self.ask(body, name)
        assert isinstance(verdict, Admitted), verdict
        return verdict

    async def refuse(self, body: bytes, name: str = "a") -> Refused:
        """Ask for what must be refused."""
        verdict = await self.ask(body, name)
        assert isinstance(verdict, Refused), verdict
        return verdict

    async def settle(
        self,
        admitted: Admitted,
        seen: Metered | None = None,
        *,
        ending: Ending = Ending.COMPLETED,
        status: int | None = 200,
    ) -> None:
        """End an admitted request; by default it was answered well and could not be read."""
        await self.gate.settle(Outcome(admitted, ending, status, seen))

    async def total(self, pool: str = "pool") -> InUse:
        """What the pool has in use."""
        return (await self.store.snapshot(pool)).total

    async def pass_ms(self, ms: int) -> None:
        """Let time pass, and look after the house at its end."""
        self.clock.advance(ms)
        await self.gate.house.round()
