"""
How a claim becomes a lease: asked at once, again while it waits, and undone when nobody wants it any more.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.core.admission import Claim, Lease, Reason, Refusal
from envoy_tokenpools.core.judging import NEVER_MS
from envoy_tokenpools.errors import RequestError, StoreError
from envoy_tokenpools.gate.alone import Alone
from envoy_tokenpools.gate.failures import tell_store_failure
from envoy_tokenpools.gate.housekeeping import Housekeeper
from envoy_tokenpools.gate.live import LivePool
from envoy_tokenpools.gate.waiting import Waiter
from envoy_tokenpools.observer import Observer, Waited, WaitEnd
from envoy_tokenpools.store.base import Reply, Store, Survivor

OnWait = Callable[[int], Awaitable[None]]
"""Told once, before a request begins to wait, for how many milliseconds it may."""

RECHECK_MS = (10, 250)
"""While somebody waits the store is asked again at least and at most this often: shares, ramps and buckets move too."""


@dataclass(frozen=True, slots=True)
class Taken:
    """
    What came of a claim in the end.

    Attributes:
        reply: the answer.
        claim: as it was asked then.
        waited_us: how long it waited for that.
        is_alone: it was decided without the store.
    """

    reply: Reply
    claim: Claim
    waited_us: int = 0
    is_alone: bool = False


class Reservations:
    """
    Takes claims to the store, and keeps the waiting rooms.

    A lease that comes back for a caller who is gone, whether it was cancelled or waited too long, costs nothing.
    """

    def __init__(
        self, *, store: Store, house: Housekeeper, alone: Alone, clock: Clock, observer: Observer
    ) -> None:
        self._store = store
        self._house = house
        self._alone = alone
        self._clock = clock
        self._observer = observer
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(
        self, live: LivePool, claim: Claim, max_wait_ms: int, on_wait: OnWait | None
    ) -> Taken:
        """
        A lease for `claim`, or the refusal that it got in the end.

        Raises:
            RequestError: 404, its entitlement was removed while it waited.
            StoreError: the store cannot be asked, and nobody else may decide.
        """
        try:
            reply = await self._ask(live, claim)
        except StoreError as error:
            return self._decide_alone(live, claim, error)
        outcome = reply.outcome
        if isinstance(outcome, Lease) or not max_wait_ms or outcome.retry_after_ms >= NEVER_MS:
            return Taken(reply, claim)
        loop = asyncio.get_running_loop()
        began_us = self._clock.now_us()
        waiter = Waiter(claim, reply, self._clock.now_ms(), loop.create_future())
        if not live.waiting.enter(waiter, live.pool.max_waiting):
            return Taken(reply, claim)
        deadline = loop.call_later(max_wait_ms / 1_000, waiter.give_up)
        self._watch(live)
        end = WaitEnd.SHED
        try:
            if on_wait is not None:
                await on_wait(max_wait_ms)
            reply = await waiter.answer
            if isinstance(reply.outcome, Lease):
                end = WaitEnd.ADMITTED
            return Taken(reply, waiter.claim, self._clock.now_us() - began_us)
        except StoreError as error:
            taken = self._decide_alone(live, waiter.claim, error)
            if isinstance(taken.reply.outcome, Lease):
                end = WaitEnd.ADMITTED
            return replace(taken, waited_us=self._clock.now_us() - began_us)
        except asyncio.CancelledError:
            end = WaitEnd.GONE
            self._disown(live, waiter)
            raise
        finally:
            deadline.cancel()
            live.waiting.leave(waiter)
            self._tell_wait(live, waiter, end)

    async def serve(self, live: LivePool) -> None:
        """Capacity may have come free: offer it to those who wait, in their order."""
        room = live.waiting
        room.has_news = True
        if room.is_served or not room.total:
            return
        room.is_served = True
        try:
            while room.has_news:
                room.has_news = False
                await self._offer(live)
        finally:
            room.is_served = False
        self._watch(live)

    async def close(self) -> None:
        """Send away whoever waits, and finish what is being undone."""
        for live in self._house.pools():
            for waiter in live.waiting.in_order({}):
                waiter.give_up()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------

    async def _ask(self, live: LivePool, claim: Claim) -> Reply:
        """Reserve; a claim whose caller is cancelled meanwhile is undone, whether it was taken or not."""
        pool = live.pool.name
        try:
            reply = await self._store.reserve(pool, claim)
        except asyncio.CancelledError:
            self._spawn(self._undo(pool, claim.lease_id))
            raise
        self._alone.end(pool)
        if isinstance(reply.outcome, Lease):
            self._house.hold(live, reply.outcome)
        for lease_id in reply.evicted:
            self._house.evict(pool, lease_id)
        return reply

    def _decide_alone(self, live: LivePool, claim: Claim, error: StoreError) -> Taken:
        """
        What this replica decides by itself, as the pool's `on_store_error` says.

        Raises:
            StoreError: `error`, if that is to refuse.
        """
        tell_store_failure(self._observer, "reserve", error)
        pool, reply = live.pool.name, self._alone.decide(live, claim)
        lease = reply.outcome if reply is not None and isinstance(reply.outcome, Lease) else None
        if lease is not None:
            self._house.hold(live, lease)
            self._spawn(self._report(pool, lease, claim.ttl_ms))
        elif error.uncertain:
            self._spawn(self._undo(pool, claim.lease_id))
        if reply is None:
            raise error
        return Taken(reply, claim, is_alone=True)

    async def _offer(self, live: LivePool) -> None:
        """One round through the room: nobody passes another of its entitlement, nor anybody once the pool is full."""
        refused: set[str] = set()
        for waiter in live.waiting.in_order(live.tick.terms):
            if waiter.entitlement in refused or waiter.answer.done():
                continue
            refusal = await self._offer_to(live, waiter)
            if refusal is None:
                continue
            if refusal.reason is Reason.POOL_CONTENDED:
                return
            refused.add(waiter.entitlement)

    async def _offer_to(self, live: LivePool, waiter: Waiter) -> Refusal | None:
        """Ask again for one; None if it has its answer now."""
        usable = live.ramp.usable(self._clock.now_ms())
        try:
            terms = live.terms(waiter.entitlement)
            waiter.claim = replace(waiter.claim, terms=terms, usable=usable)
            reply = await self._ask(live, waiter.claim)
        except (RequestError, StoreError) as error:
            waiter.fail(error)
            return None
        if isinstance(reply.outcome, Refusal):
            waiter.reply = reply
            return reply.outcome
        if waiter.answer.done():
            self._spawn(self._give_back(live.pool.name, waiter.claim.lease_id))
        waiter.conclude(reply)
        return None

    def _disown(self, live: LivePool, waiter: Waiter) -> None:
        """Its caller is gone: a lease that it has just got goes back, and one that is on its way will."""
        answer = waiter.answer
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            if isinstance(answer.result().outcome, Lease):
                self._spawn(self._give_back(live.pool.name, waiter.claim.lease_id))
        else:
            answer.cancel()

    async def _give_back(self, pool: str, lease_id: str) -> None:
        self._house.release(pool, lease_id)
        await self._undo(pool, lease_id)

    async def _undo(self, pool: str, lease_id: str) -> None:
        try:
            await self._store.settle(pool, lease_id, 0)
        except StoreError as error:
            tell_store_failure(self._observer, "settle", error)

    async def _report(self, pool: str, lease: Lease, ttl_ms: int) -> None:
        """Tell the store of a lease that was granted without it; it is kept for when it is back."""
        with contextlib.suppress(StoreError):
            await self._store.restore(pool, [Survivor(lease, 0)], ttl_ms)

    def _tell_wait(self, live: LivePool, waiter: Waiter, end: WaitEnd) -> None:
        entitlement = live.pool.entitlements.get(waiter.entitlement)
        if entitlement is not None:  # else a reload has removed it
            waited_ms = max(0, self._clock.now_ms() - waiter.since_ms)
            event = Waited(live.pool.name, entitlement.service_class, end, waited_ms)
            self._observer.waited(event)

    def _watch(self, live: LivePool) -> None:
        """Come back to those who wait, though nothing may happen here: shares, ramps and buckets move by themselves."""
        room = live.waiting
        if room.timer is not None or not room.total or room.is_served:
            return
        low, high = RECHECK_MS
        delay_ms = min(max(low, room.first_retry_ms(high)), high)
        loop = asyncio.get_running_loop()
        room.timer = loop.call_later(delay_ms / 1_000, self._look_again, live)

    def _look_again(self, live: LivePool) -> None:
        live.waiting.timer = None
        self._spawn(self.serve(live))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
