"""
The store of any number of replicas: the port, spoken to a server that keeps the books.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.core.admission import Claim, Lease, Settlement, Terms
from envoy_tokenpools.core.ledger import LedgerView
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import NEW_STANDING, Standing, Tick
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
from envoy_tokenpools.store.redis import wire
from envoy_tokenpools.store.redis.calls import Line
from envoy_tokenpools.store.redis.script import channel, pool_keys
from envoy_tokenpools.store.redis.server import Server
from envoy_tokenpools.store.redis.wire import Answer

WITHIN_S = 1.0
"""How long anything but a decision waits for the server."""

FAREWELL_S = 2.0
"""How long the last settlements may take when the store is closed."""

RECONNECT_S = 0.5
"""How long after a lost subscription it is renewed."""


@dataclass(slots=True)
class _Shared:
    """
    What this replica knows of a pool's books.

    Attributes:
        line: the way there.
        fingerprint: of the configuration that this replica has loaded.
        config: its number.
        fence: of this replica's leading; -1 if it does not.
        version: of `tick`; -1 if that is not known.
        epoch: of the books that it is of.
        tick: the one in force, as last seen or published here.
        seen: epoch of the books in which the leases of this replica are.
    """

    line: Line
    fingerprint: str = ""
    config: int = 0
    fence: int = -1
    version: int = -1
    epoch: str = ""
    tick: Tick | None = None
    seen: str = ""


class RedisStore:
    """
    Keeps the books on a server.

    Decisions take at most the deadline: then they fail, whatever becomes of the call. Settlements and restored leases
    are kept for a server that is away, and delivered in order when it is back.
    """

    def __init__(
        self,
        server: Server,
        *,
        owner: str,
        prefix: str = "tokenpools",
        deadline_ms: int = 50,
        clock: Clock | None = None,
    ) -> None:
        """
        Build the store; nothing is sent yet.

        Args:
            server: where the books are kept.
            owner: this replica, unlike any other.
            prefix: of all keys.
            deadline_ms: longer than this no decision takes.
            clock: pool time; the server's if None, as it has to be where there are several replicas.
        """
        self._server = server
        self._owner = owner
        self._prefix = prefix
        self._deadline_ms = deadline_ms
        self._clock = clock
        self._pools: dict[str, _Shared] = {}
        self._listener: Listener | None = None
        self._channels: Mapping[str, str] = {}
        self._subscription: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ requests

    async def reserve(self, pool: str, claim: Claim) -> Reply:
        """See `Store.reserve`."""
        operation = wire.reserve_operation(claim)
        answer = await self._shared(pool).line.decide(operation)
        return wire.read(wire.read_reply, wire.checked(operation, answer))

    async def settle(self, pool: str, lease_id: str, tokens: int) -> Settlement | None:
        """See `Store.settle`; on failure it is kept, and done as soon as the server is back."""
        answer = await self._ask(pool, wire.settle_operation(lease_id, tokens), is_kept=True)
        return wire.read(wire.read_settlement, answer)

    async def renew(self, pool: str, lease_ids: Sequence[str], ttl_ms: int) -> Renewal:
        """See `Store.renew`."""
        missing, evicted = await self._ask(pool, ("renew", tuple(lease_ids), ttl_ms))
        return Renewal(tuple(missing), tuple(evicted))

    async def restore(self, pool: str, survivors: Sequence[Survivor], ttl_ms: int) -> None:
        """See `Store.restore`; kept as settlements are."""
        await self._ask(pool, wire.restore_operation(survivors, ttl_ms), is_kept=True)

    async def sweep(self, pool: str) -> tuple[Lease, ...]:
        """See `Store.sweep`."""
        answer = await self._ask(pool, ("sweep",))
        return tuple(wire.read(wire.read_lease, each) for each in answer)

    # ------------------------------------------------------------------ ticks

    async def open(self, pool: str, fingerprint: str) -> Opening:
        """See `Store.open`."""
        shared = self._shared(pool)
        shared.fingerprint = fingerprint
        self._subscribe()
        number, fence, leads = await self._ask(pool, ("open", fingerprint))
        shared.config, shared.fence = number, fence
        shared.seen = shared.seen or shared.line.epoch  # else what is held here is not in them
        await self._look(pool, shared)
        return Opening(shared.tick, leads)

    async def look(self, pool: str, known: Tick) -> Sight:
        """See `Store.look`."""
        shared = self._shared(pool)
        version = shared.version
        evicted, replicas = await self._look(pool, shared)
        is_lost = bool(shared.seen) and shared.seen != shared.line.epoch
        shared.seen = shared.line.epoch
        # Whoever leads may know a tick that it has not published yet.
        is_news = shared.version != version or (shared.fence < 0 and shared.tick is not known)
        return Sight(shared.tick if is_news else None, evicted, is_lost, replicas)

    async def close_tick(self, pool: str, after_ms: int = 0) -> TickReading | None:
        """See `Store.close_tick`."""
        shared = self._shared(pool)
        answer = await self._ask(pool, ("close_tick", shared.config, after_ms))
        if not answer:
            shared.fence = -1
            return None
        shared.fence, elapsed_ms, meters = answer
        return TickReading(elapsed_ms, wire.read(wire.read_meters, meters))

    async def publish(self, pool: str, tick: Tick, window_ms: int) -> bool:
        """See `Store.publish`; only what has changed is sent, if what is in force is known."""
        shared = self._shared(pool)
        before = shared.tick if shared.version >= 0 else None
        if before is not None and before.terms.keys() == tick.terms.keys():
            answer = await self._publish(pool, shared, tick, window_ms, before)
            if answer == "stale":
                answer = await self._publish(pool, shared, tick, window_ms, None)
        else:
            answer = await self._publish(pool, shared, tick, window_ms, None)
        if isinstance(answer, str):
            shared.fence = -1
            return False
        shared.version, shared.epoch, shared.tick = answer, shared.line.epoch, tick
        return True

    async def snapshot(self, pool: str) -> LedgerView:
        """See `Store.snapshot`."""
        return wire.read(wire.read_view, await self._ask(pool, ("snapshot",)))

    # ------------------------------------------------------------------ whole

    def listen(self, listener: Listener) -> None:
        """See `Store.listen`."""
        self._listener = listener

    async def close(self) -> None:
        """See `Store.close`."""
        if self._subscription is not None:
            self._subscription.cancel()
            await asyncio.gather(self._subscription, return_exceptions=True)
        await asyncio.gather(*(self._leave(shared) for shared in self._pools.values()))
        await self._server.close()

    # ------------------------------------------------------------------

    def _shared(self, pool: str) -> _Shared:
        shared = self._pools.get(pool)
        if shared is None:
            keys = pool_keys(self._prefix, pool)
            line = Line(
                partial(self._send, keys, channel(self._prefix, pool)),
                deadline_ms=self._deadline_ms,
                on_epoch=partial(self._lost, pool),
            )
            shared = self._pools[pool] = _Shared(line)
        return shared

    async def _send(
        self, keys: Sequence[str], where: str, number: str, operations: bytes
    ) -> object:
        now_ms = -1 if self._clock is None else self._clock.now_ms()
        return await self._server.call(keys, (self._owner, number, str(now_ms), where, operations))

    async def _ask(self, pool: str, operation: wire.Operation, *, is_kept: bool = False) -> Answer:
        line = self._shared(pool).line
        answer = await line.ask(operation, within_s=WITHIN_S, is_kept=is_kept)
        return wire.checked(operation, answer)

    async def _look(self, pool: str, shared: _Shared) -> tuple[tuple[str, ...], int]:
        """Bring the tick up to date; which leases of this replica are to be ended, and how many replicas there are."""
        look = ("look", shared.version, shared.epoch)
        version, news, evicted, replicas = await self._ask(pool, look)
        if news:
            shared.tick = wire.read(partial(_merged, shared.tick), news)
            shared.version, shared.epoch = version, shared.line.epoch
        elif version == 0:
            shared.version, shared.tick = -1, None
        return tuple(evicted), replicas

    async def _publish(
        self, pool: str, shared: _Shared, tick: Tick, window_ms: int, before: Tick | None
    ) -> Answer:
        entries = []
        for name, terms in tick.terms.items():
            standing = tick.standings.get(name, NEW_STANDING)
            old = before.terms[name] if before is not None else None
            if before is None or old is not terms or before.standings.get(name) is not standing:
                entries.append(wire.publish_entry(standing, terms, with_terms=old != terms))
        operation = (
            *("publish", shared.fence, tick.number),
            *(shared.version if before is not None else -1, shared.epoch),
            *(shared.fingerprint, wire.resources(tick.usable), window_ms, tick.degraded, entries),
        )
        return await self._ask(pool, operation)

    async def _leave(self, shared: _Shared) -> None:
        """Behind all that is still to be done; whoever cannot say so is missed after a while."""
        with contextlib.suppress(StoreError):
            await shared.line.ask(("leave",), within_s=FAREWELL_S)
        await shared.line.close(FAREWELL_S)

    def _subscribe(self) -> None:
        """Hear of evictions in all pools that are known by now; whatever is missed is seen at the next look."""
        channels = {channel(self._prefix, pool): pool for pool in self._pools}
        if self._listener is None or channels == self._channels:
            return
        if self._subscription is not None:
            self._subscription.cancel()
        self._channels = channels
        self._subscription = asyncio.create_task(self._hear(self._listener, channels))

    async def _hear(self, listener: Listener, channels: Mapping[str, str]) -> None:
        while True:
            with contextlib.suppress(StoreError):
                async for where, message in self._server.messages(tuple(channels)):
                    for lease_id in wire.decode_lease_ids(message):
                        listener.evict(channels[where], lease_id)
            await asyncio.sleep(RECONNECT_S)

    def _lost(self, pool: str) -> None:
        if self._listener is not None:
            self._listener.lost(pool)


def _merged(before: Tick | None, news: Answer) -> Tick:
    """The tick in force, of what has changed since `before`."""
    number, usable, degraded, is_whole, texts = news
    standings: dict[str, Standing] = {}
    terms: dict[str, Terms] = {}
    if before is not None and not is_whole:
        standings.update(before.standings)
        terms.update(before.terms)
    for text in texts:
        standing, each = wire.read_standing(text)
        standings[each.entitlement], terms[each.entitlement] = standing, each
    return Tick(number, Resources(*usable), standings, terms, degraded)
