"""
The embedded store: the ledgers of one process, exact by construction, forgotten at its end.
"""

from collections.abc import Sequence
from dataclasses import replace

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.core.admission import Claim, Lease, Settlement
from envoy_tokenpools.core.ledger import Ledger, LedgerView
from envoy_tokenpools.core.tick import Tick
from envoy_tokenpools.store.base import (
    Listener,
    Opening,
    Renewal,
    Reply,
    Sight,
    Survivor,
    TickReading,
)


class MemoryStore:
    """
    Keeps each pool's `Ledger`. No call awaits anything, so each is atomic on its event loop; not for use by threads.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ledgers: dict[str, Ledger] = {}

    async def reserve(self, pool: str, claim: Claim) -> Reply:
        """See `Store.reserve`."""
        ledger = self._ledger(pool)
        now_ms = self._clock.now_ms()
        is_sent_again = ledger.holds(claim.lease_id)
        outcome = ledger.reserve(claim, now_ms)
        balance = ledger.balance(claim.terms.entitlement, now_ms)
        evicted: tuple[str, ...] = ()
        if isinstance(outcome, Lease) and claim.enforce and not is_sent_again:
            evicted = tuple(lease.lease_id for lease in ledger.reclaim(outcome))
        return Reply(outcome, balance, evicted)

    async def settle(self, pool: str, lease_id: str, tokens: int) -> Settlement | None:
        """See `Store.settle`."""
        return self._ledger(pool).settle(lease_id, tokens, self._clock.now_ms())

    async def renew(self, pool: str, lease_ids: Sequence[str], ttl_ms: int) -> Renewal:
        """See `Store.renew`."""
        ledger = self._ledger(pool)
        missing = ledger.renew(lease_ids, self._clock.now_ms() + ttl_ms)
        return Renewal(missing, tuple(each for each in lease_ids if ledger.is_freeing(each)))

    async def restore(self, pool: str, survivors: Sequence[Survivor], ttl_ms: int) -> None:
        """See `Store.restore`."""
        now_ms = self._clock.now_ms()
        for survivor in survivors:
            lease = replace(
                survivor.lease,
                admitted_at_ms=now_ms - survivor.held_ms,
                expires_at_ms=now_ms + ttl_ms,
            )
            self._ledger(pool).restore(lease, now_ms)

    async def sweep(self, pool: str) -> tuple[Lease, ...]:
        """See `Store.sweep`."""
        return self._ledger(pool).sweep(self._clock.now_ms())

    async def open(self, pool: str, fingerprint: str) -> Opening:  # noqa: ARG002
        """See `Store.open`; the only process always leads."""
        return Opening(None, leads=True)

    async def look(self, pool: str, known: Tick) -> Sight:  # noqa: ARG002
        """See `Store.look`; whoever is alone knows all."""
        return Sight()

    async def close_tick(self, pool: str, after_ms: int = 0) -> TickReading | None:
        """See `Store.close_tick`; the only process always gets the reading."""
        ledger, now_ms = self._ledger(pool), self._clock.now_ms()
        if ledger.tick_ms(now_ms) < after_ms:
            return None
        return TickReading(*ledger.close_tick(now_ms))

    async def publish(self, pool: str, tick: Tick, window_ms: int) -> bool:
        """See `Store.publish`."""
        self._ledger(pool).publish(tick.terms, tick.usable, window_ms, self._clock.now_ms())
        return True

    async def snapshot(self, pool: str) -> LedgerView:
        """See `Store.snapshot`."""
        return self._ledger(pool).view()

    def listen(self, listener: Listener) -> None:
        """See `Store.listen`; whoever is alone is told in answers."""

    async def close(self) -> None:
        """Nothing to give back."""

    def _ledger(self, pool: str) -> Ledger:
        ledger = self._ledgers.get(pool)
        if ledger is None:
            ledger = self._ledgers[pool] = Ledger.opened_at(self._clock.now_ms())
        return ledger
