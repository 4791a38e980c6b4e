"""
Decisions of this replica alone, while the shared store is away.

It keeps books of its own then, of what runs here, with its part of what every entitlement may use: the pool divided by
the replicas that shared it when it was last seen. What it admits is told to the store when that is back; nobody is
evicted on the word of books that know only a part.
"""

from dataclasses import replace

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.core.admission import Claim, Terms
from envoy_tokenpools.core.ledger import Ledger
from envoy_tokenpools.core.pool import Limits, OnStoreError
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.gate.live import LivePool
from envoy_tokenpools.store.base import Reply


class Alone:
    """The books of the pools whose store is away; none for all others."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ledgers: dict[str, Ledger] = {}

    def decide(self, live: LivePool, claim: Claim) -> Reply | None:
        """The decision on a claim that the store did not answer; None if its class is not to be admitted so."""
        pool, name = live.pool, claim.terms.entitlement
        entitlement = pool.entitlements.get(name)
        if (
            entitlement is None
            or pool.on_store_error[entitlement.service_class] is OnStoreError.DENY
        ):
            return None
        now_ms = self._clock.now_ms()
        ledger = self._ledgers.get(pool.name)
        if ledger is None:
            ledger = self._ledgers[pool.name] = self._open(live, now_ms)
        part = replace(claim, terms=_part_of(claim.terms, live.replicas))
        outcome = ledger.reserve(part, now_ms)
        return Reply(outcome, ledger.balance(name, now_ms))

    def settle(self, pool: str, lease_id: str, tokens: int) -> None:
        """A request has ended."""
        ledger = self._ledgers.get(pool)
        if ledger is not None:
            ledger.settle(lease_id, tokens, self._clock.now_ms())

    def end(self, pool: str) -> None:
        """The store is back."""
        self._ledgers.pop(pool, None)

    def _open(self, live: LivePool, now_ms: int) -> Ledger:
        """Books of what is held here already, with this replica's part of the pool."""
        ledger = Ledger.opened_at(now_ms)
        terms = {name: _part_of(each, live.replicas) for name, each in live.tick.terms.items()}
        usable = live.tick.usable
        part = Resources(*(each // live.replicas for each in _amounts(usable)))
        ledger.publish(terms, part, live.pool.window_ms, now_ms)
        for survivor in live.held.survivors(now_ms):
            ledger.restore(survivor.lease, now_ms)
        return ledger


def _part_of(terms: Terms, replicas: int) -> Terms:
    """Rounded up: what everybody may use, at most one of it too much per replica."""
    limits = (
        None if each is None else -(-each // replicas)
        for each in (
            terms.limits.tokens_per_second,
            terms.limits.kv_bytes,
            terms.limits.concurrency,
        )
    )
    return replace(
        terms,
        guarantee=_rounded_up(terms.guarantee, replicas),
        share=_rounded_up(terms.share, replicas),
        limits=Limits(*limits),
    )


def _rounded_up(amount: Resources, replicas: int) -> Resources:
    return Resources(*(-(-each // replicas) for each in _amounts(amount)))


def _amounts(amount: Resources) -> tuple[int, int, int]:
    return amount.tokens_per_second, amount.kv_bytes, amount.concurrency
