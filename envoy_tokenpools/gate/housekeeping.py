"""
What goes on between requests: ticks, renewal of leases, the sweep of lost ones, and the change of configuration.
"""

import asyncio
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


class Housekeeper:
    """Owns the live pools and the leases that this replica holds."""

    def __init__(self, config: Config, *, store: Store, clock: Clock, observer: Observer) -> None:
        self._config = config
        self._store = store
        self._clock = clock
        self._observer = observer
        self._held: dict[str, dict[str, Holding]] = {}
        self._live: dict[str, LivePool] = {}
        self._renew_due_ms = 0
        self._store_answers = False
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

    def hold(self, pool: str, lease_id: str) -> Holding:
        """Keep a lease alive until it is released."""
        held = self._held.setdefault(pool, {})
        return held.setdefault(lease_id, Holding(lease_id))

    def release(self, pool: str, lease_id: str) -> None:
        """Stop keeping a lease alive."""
        holding = self._held.get(pool, {}).pop(lease_id, None)
        if holding is not None:
            holding.release()

    def evict(self, pool: str, lease_id: str) -> None:
        """The store wants a lease back: tell whoever holds it, if that is here."""
        holding = self._held.get(pool, {}).get(lease_id)
        if holding is not None:
            holding.evict()

    @property
    def is_ready(self) -> bool:
        """Whether the store answered the last time it was asked."""
        return self._store_answers

    async def start(self) -> None:
        """Put the first terms in force."""
        await self._publish_all()

    async def run(self) -> None:
        """Look after the house until cancelled."""
        while True:
            await self.round()
            await asyncio.sleep(ROUND_SECONDS)

    async def round(self) -> None:
        """
        Do whatever is due: renew, sweep, tick.

        What fails for one pool is counted, tried again next round, and holds up no other pool.
        """
        # First, for we may have been held up longer than leases live, and those held here are not lost.
        answers = await self._answers(self._renew) if self._is_renewal_due() else True
        for live in list(self._live.values()):
            answers = await self._answers(self._look_after, live) and answers
        self._store_answers = answers

    async def _answers(self, work: Callable[..., Awaitable[None]], *about: LivePool) -> bool:
        """Do something that needs the store; False if it failed."""
        try:
            await work(*about)
        except StoreError as error:
            tell_store_failure(self._observer, "housekeeping", error)
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
            if not self._held.get(name) and not live.waiting.total:
                self._forget(name)
        elif now_ms >= live.tick_due_ms or self._has_moved(live, now_ms):
            await self._tick(live)

    def _has_moved(self, live: LivePool, now_ms: int) -> bool:
        """Whether a ramp has changed what is usable since a second ago: guarantees must not wait for a long tick."""
        moved = live.ramp.usable(now_ms) != live.tick.usable
        return moved and now_ms >= live.tick_due_ms - live.pool.tick_ms + RAMP_STEP_MS

    def _is_renewal_due(self) -> bool:
        return self._clock.now_ms() >= self._renew_due_ms

    def _forget(self, name: str) -> None:
        """A pool that is gone and holds nothing."""
        del self._live[name]
        self._held.pop(name, None)

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
            live.tick_due_ms = min(live.tick_due_ms, now_ms + pool.tick_ms)
            live.tick = first_tick(pool, live.ramp.usable(now_ms), live.tick.standings)
        self._config = config
        self._renew_due_ms = now_ms  # leases taken from now on may live shorter
        await self._publish_all()

    async def refresh(self) -> None:
        """Read all books for a report; on a store failure the last reading stays."""
        try:
            for live in self.pools():
                live.view = await self._store.snapshot(live.pool.name)
        except StoreError as error:
            tell_store_failure(self._observer, "snapshot", error)

    # ------------------------------------------------------------------

    def _new_pool(self, pool: Pool, now_ms: int) -> LivePool:
        return LivePool(
            pool=pool,
            ramp=Ramp.steady(pool.capacity, per_second=pool.ramp_per_second),
            tick=first_tick(pool, pool.capacity),
            tick_due_ms=now_ms + pool.tick_ms,
        )

    async def _publish_all(self) -> None:
        try:
            for live in self.pools():
                await self._store.publish(live.pool.name, live.tick, live.pool.window_ms)
            self._store_answers = True
        except StoreError as error:
            self._store_answers = False
            for live in self.pools():
                live.tick_due_ms = self._clock.now_ms()
            tell_store_failure(self._observer, "publish", error)

    async def _tick(self, live: LivePool) -> None:
        reading = await self._store.close_tick(live.pool.name)
        now_ms = self._clock.now_ms()
        if reading is not None:
            live.tick = next_tick(
                live.pool,
                live.tick,
                live.ramp.usable(now_ms),
                reading.meters,
                max(1, reading.elapsed_ms),
            )
            await self._store.publish(live.pool.name, live.tick, live.pool.window_ms)
        live.tick_due_ms = now_ms + live.pool.tick_ms

    async def _renew(self) -> None:
        ttl_ms = self._config.server.lease_ttl_ms
        for pool, lease_ids in list(self._held.items()):
            if lease_ids:
                await self._store.renew(pool, list(lease_ids), ttl_ms)
        self._renew_due_ms = self._clock.now_ms() + ttl_ms // RENEWALS_PER_TTL

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
