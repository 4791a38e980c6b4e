"""
What goes on between requests: ticks, renewal of leases, the sweep of lost ones, and the change of configuration.

Several replicas may share the pools. One of them ticks; the others take over what it publishes.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.config import Config
from envoy_tokenpools.core.admission import Lease
from envoy_tokenpools.core.pool import Pool
from envoy_tokenpools.core.ramp import Ramp
from envoy_tokenpools.core.tick import first_tick, next_tick
from envoy_tokenpools.errors import StoreError
from envoy_tokenpools.gate.failures import tell_store_failure
from envoy_tokenpools.gate.holding import Holding
from envoy_tokenpools.gate.live import LivePool
from envoy_tokenpools.observer import Ending, Observer, Settled
from envoy_tokenpools.openai.usage import UsageSource
from envoy_tokenpools.store.base import Store

log = logging.getLogger(__name__)

ROUND_SECONDS = 0.25
"""How often the house is looked after; the shortest tick is 1 s."""

RAMP_STEP_MS = 1_000
"""How often shares follow a ramp, whatever the tick."""

RENEWALS_PER_TTL = 3
"""A lease is renewed this often within its time to live, so that two lost renewals do not end it."""

YOUNG = 2
"""A tick that another replica has ended less than this part of its length ago is not ended again."""


class Housekeeper:
    """Owns the live pools and the leases that this replica holds; a store's listener."""

    def __init__(self, config: Config, *, store: Store, clock: Clock, observer: Observer) -> None:
        self._config = config
        self._store = store
        self._clock = clock
        self._observer = observer
        self._live: dict[str, LivePool] = {}
        self._renew_due_ms = 0
        self._store_answers = False
        self._news = asyncio.Event()
        now_ms = clock.now_ms()
        for pool in config.pools.values():
            self._live[pool.name] = self._new_pool(pool, now_ms)

    def pool(self, pool: Pool) -> LivePool:
        """The live state of `pool`, also of one that a reload has removed and whose requests still end."""
        live = self._live.get(pool.name)
        if live is None:
            live = self._live[pool.name] = self._new_pool(pool, self._clock.now_ms())
        return live

    def pools(self) -> Iterable[LivePool]:
        """The pools of the configuration in force."""
        return [self._live[name] for name in self._config.pools]

    def hold(self, live: LivePool, lease: Lease) -> Holding:
        """Keep a lease alive until it is released; also in a pool that was forgotten while it was on its way."""
        live = self._live.setdefault(live.pool.name, live)
        return live.held.hold(lease, self._clock.now_ms())

    def release(self, pool: str, lease_id: str) -> None:
        """Stop keeping a lease alive."""
        if pool in self._live:
            self._live[pool].held.release(lease_id)

    def evict(self, pool: str, lease_id: str) -> None:
        """The store wants a lease back: tell whoever holds it, if that is here."""
        if pool in self._live:
            self._live[pool].held.evict(lease_id)

    def held(self, pool: str) -> list[str]:
        """The leases of `pool` that are held here, oldest first."""
        return self._live[pool].held.lease_ids() if pool in self._live else []

    def lost(self, pool: str) -> None:  # noqa: ARG002
        """The store's books were opened anew: look after the house at once."""
        self._news.set()

    @property
    def is_ready(self) -> bool:
        """Whether terms are in force, and decisions can be made, by the store or without it."""
        return self._store_answers or any(live.may_decide_alone for live in self.pools())

    @property
    def store_answers(self) -> bool:
        """Whether the store answered the last time it was asked."""
        return self._store_answers

    async def start(self) -> None:
        """Put the first terms in force."""
        self._store.listen(self)
        await self._open_all()

    async def run(self) -> None:
        """Look after the house until cancelled."""
        while True:
            self._news.clear()
            await self.round()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), ROUND_SECONDS)

    async def round(self) -> None:
        """
        Do whatever is due: renew, sweep, look, tick.

        What fails for one pool is counted, tried again next round, and holds up no other pool.
        """
        # First, for we may have been held up longer than leases live, and those held here are not lost.
        answers = True
        if self._is_renewal_due():
            answers = await self._answers("renew", self._renew_all)
        # All at once: a store that is away keeps each of them waiting.
        looked = [
            self._answers("housekeeping", self._look_after, live)
            for live in list(self._live.values())
        ]
        answers = all(await asyncio.gather(*looked)) and answers
        if answers and not self._store_answers:
            self._renew_due_ms = self._clock.now_ms()  # what expired meanwhile is held again
        self._store_answers = answers

    async def _answers(
        self, operation: str, work: Callable[..., Awaitable[None]], *about: LivePool
    ) -> bool:
        """Do something that needs the store; False if it failed."""
        try:
            await work(*about)
        except StoreError as error:
            tell_store_failure(self._observer, operation, error)
        except Exception:
            # A fault of ours in one pool must not cost the others their leases.
            log.exception("housekeeping failed")
        else:
            return True
        return False

    async def _look_after(self, live: LivePool) -> None:
        name, now_ms = live.pool.name, self._clock.now_ms()
        for lease in await self._store.sweep(name):
            self._expired(live, lease)
        if name not in self._config.pools:
            if not len(live.held) and not live.waiting.total:
                del self._live[name]
            return
        if live.is_open:
            await self._look(live)
        if not live.is_open:
            await self._open(live)
        if live.is_lost:
            await self._restore_all(live)
        if not live.is_published:
            await self._publish(live)
        if now_ms >= live.tick_due_ms or self._has_moved(live, now_ms):
            await self._tick(live)

    async def _look(self, live: LivePool) -> None:
        """Take over what other replicas, or a loss of the books, have changed."""
        sight = await self._store.look(live.pool.name, live.tick)
        live.replicas = sight.replicas
        for lease_id in sight.evicted:
            live.held.evict(lease_id)
        if sight.is_lost:
            log.warning("the store has lost the books", extra={"pool": live.pool.name})
            live.is_open, live.is_lost = False, True
        elif sight.tick is not None:
            live.tick, live.is_published = sight.tick, True

    async def _restore_all(self, live: LivePool) -> None:
        """Bring back what is held here, after a loss of the books."""
        survivors = live.held.survivors(self._clock.now_ms())
        await self._store.restore(live.pool.name, survivors, self._config.server.lease_ttl_ms)
        live.is_lost = False

    def _has_moved(self, live: LivePool, now_ms: int) -> bool:
        """Whether a ramp has changed what is usable since a second ago: guarantees must not wait for a long tick."""
        moved = live.ramp.usable(now_ms) != live.tick.usable
        return moved and now_ms >= live.tick_due_ms - live.pool.tick_ms + RAMP_STEP_MS

    def _is_renewal_due(self) -> bool:
        return self._clock.now_ms() >= self._renew_due_ms

    async def reload(self, config: Config) -> None:
        """
        Take over a new configuration: capacity that was lost counts at once, restored capacity ramps up.

        Debts, bursts and what was learned stay with pools and entitlements of the same name.
        """
        now_ms = self._clock.now_ms()
        for pool in config.pools.values():
            live = self._live.get(pool.name)
            if live is None:
                self._live[pool.name] = self._new_pool(pool, now_ms)
                continue
            if pool.capacity != live.pool.capacity:
                live.ramp = live.ramp.toward(
                    pool.capacity, now_ms=now_ms, per_second=pool.ramp_per_second
                )
            live.pool = pool
            live.keep_learned(pool)
            live.is_open = False
            live.tick_due_ms = min(live.tick_due_ms, now_ms + pool.tick_ms)
            live.tick = first_tick(pool, live.ramp.usable(now_ms), live.tick.standings)
            live.own_terms = live.tick.terms
        self._config = config
        self._renew_due_ms = now_ms  # leases taken from now on may live shorter
        await self._open_all()

    async def refresh(self) -> None:
        """Read all books for a report; on a store failure the last reading stays."""
        try:
            for live in self.pools():
                live.view = await self._store.snapshot(live.pool.name)
        except StoreError as error:
            tell_store_failure(self._observer, "snapshot", error)

    # ------------------------------------------------------------------

    def _new_pool(self, pool: Pool, now_ms: int) -> LivePool:
        tick = first_tick(pool, pool.capacity)
        return LivePool(
            pool=pool,
            ramp=Ramp.steady(pool.capacity, per_second=pool.ramp_per_second),
            tick=tick,
            tick_due_ms=now_ms + pool.tick_ms,
            own_terms=tick.terms,
        )

    async def _open_all(self) -> None:
        """Open the books of all pools; what fails is tried again in the next round."""
        answers = True
        for live in self.pools():
            answers = await self._answers("open", self._open, live) and answers
        self._store_answers = answers

    async def _open(self, live: LivePool) -> None:
        """
        Join those who share the pool, or begin.

        Whoever comes with a configuration of its own puts that in force, with the debts and bursts that there are.
        """
        pool, now_ms = live.pool, self._clock.now_ms()
        opening = await self._store.open(pool.name, _fingerprint(pool))
        found = opening.tick
        if found is not None and not opening.leads:
            live.tick = found
        elif found is not None:
            live.ramp = Ramp.steady(found.usable, per_second=pool.ramp_per_second).toward(
                pool.capacity, now_ms=now_ms, per_second=pool.ramp_per_second
            )
            live.tick = first_tick(pool, live.ramp.usable(now_ms), found.standings)
        if found is None or opening.leads:
            await self._publish(live)
        live.is_open = live.has_joined = True

    async def _publish(self, live: LivePool) -> None:
        """Put the tick in force, unless another replica has taken over meanwhile; then its own is seen soon."""
        live.is_published = False
        await self._store.publish(live.pool.name, live.tick, live.pool.window_ms)
        live.is_published = True

    async def _tick(self, live: LivePool) -> None:
        pool, now_ms = live.pool, self._clock.now_ms()
        after_ms = min(pool.tick_ms, RAMP_STEP_MS) // YOUNG
        if now_ms >= live.tick_due_ms:
            after_ms = pool.tick_ms // YOUNG
        reading = await self._store.close_tick(pool.name, after_ms)
        now_ms = self._clock.now_ms()
        if reading is not None:
            usable, elapsed_ms = live.ramp.usable(now_ms), max(1, reading.elapsed_ms)
            live.tick = next_tick(pool, live.tick, usable, reading.meters, elapsed_ms)
            live.is_published = False
        live.tick_due_ms = now_ms + pool.tick_ms
        if not live.is_published:
            await self._publish(live)

    async def _renew_all(self) -> None:
        for live in list(self._live.values()):
            if len(live.held):
                await self._renew(live)
        ttl_ms = self._config.server.lease_ttl_ms
        self._renew_due_ms = self._clock.now_ms() + ttl_ms // RENEWALS_PER_TTL

    async def _renew(self, live: LivePool) -> None:
        """Keep all leases alive; those that the store has lost are held again, those that it wants back end."""
        name, ttl_ms = live.pool.name, self._config.server.lease_ttl_ms
        renewal = await self._store.renew(name, live.held.lease_ids(), ttl_ms)
        for lease_id in renewal.evicted:
            live.held.evict(lease_id)
        survivors = live.held.survivors(self._clock.now_ms(), renewal.missing)
        if survivors:
            await self._store.restore(name, survivors, ttl_ms)

    def _expired(self, live: LivePool, lease: Lease) -> None:
        """A lease was lost with its owner: what it reserved stays charged."""
        entitlement = live.pool.entitlements.get(lease.entitlement)
        log.warning(
            "lease expired", extra={"pool": live.pool.name, "entitlement": lease.entitlement}
        )
        if entitlement is None:
            return
        self._observer.settled(
            Settled(
                pool=live.pool.name,
                entitlement=lease.entitlement,
                service_class=entitlement.service_class,
                ending=Ending.EXPIRED,
                prompt_tokens=lease.cost.prompt_tokens,
                prompt_source=UsageSource.ESTIMATED,
                completion_tokens=lease.cost.output_tokens,
                completion_source=UsageSource.ESTIMATED,
                estimated_prompt_tokens=lease.cost.prompt_tokens,
                held_ms=max(0, lease.expires_at_ms - lease.admitted_at_ms),
            )
        )


def _fingerprint(pool: Pool) -> str:
    """Of a pool's configuration: equal ones on all replicas are equal."""
    return hashlib.blake2b(repr(pool).encode(), digest_size=16).hexdigest()
