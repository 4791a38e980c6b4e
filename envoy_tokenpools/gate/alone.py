"""
Decisions of this replica alone, while the shared store is away.

It keeps books of its own then, of what runs here, with its part of what every entitlement may use: the pool divided by
the replicas that shared it when it was last seen. What it admits is told to the store when that is back; nobody is
evicted on the word of books that know only a part.
"""

from dataclasses import dataclass, replace

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.core.admission import Claim, Terms
from envoy_tokenpools.core.ledger import Ledger
from envoy_tokenpools.core.pool import Limits, OnStoreError
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Tick
from envoy_tokenpools.gate.live import LivePool
from envoy_tokenpools.store.base import Reply


@dataclass(frozen=True, slots=True)
class _Books:
    """A ledger, and what is in force there."""

    ledger: Ledger
    tick: Tick
    replicas: int

    def are_of(self, live: LivePool) -> bool:
        return self.tick is live.tick and self.replicas == live.replicas


class Alone:
    """The books of the pools whose store is away; none for all others."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._books: dict[str, _Books] = {}

    def decide(self, live: LivePool, claim: Claim) -> Reply | None:
        """
        The decision on a claim that the store did not answer; None if its class is not to be admitted so.

        What is not enforced is refused by nobody.
        """
        pool, name = live.pool, claim.terms.entitlement
        entitlement = pool.entitlements.get(name)
        if entitlement is None:
            return None
        is_allowed = pool.on_store_error[entitlement.service_class] is OnStoreError.ALLOW
        if claim.enforce and not (is_allowed and live.has_joined):
            return None
        now_ms = self._clock.now_ms()
        books = self._books.get(pool.name)
        if books is None:
            books = self._books[pool.name] = _open(live, now_ms)
        elif not books.are_of(live):
            books = self._books[pool.name] = _put_in_force(books.ledger, live, now_ms)
        part = replace(claim, terms=_part_of(claim.terms, live.replicas))
        outcome = books.ledger.reserve(part, now_ms)
        return Reply(outcome, books.ledger.balance(name, now_ms))

    def settle(self, pool: str, lease_id: str, tokens: int) -> None:
        """A request has ended."""
        books = self._books.get(pool)
        if books is not None:
            books.ledger.settle(lease_id, tokens, self._clock.now_ms())

    def end(self, pool: str) -> None:
        """The store is back."""
        self._books.pop(pool, None)


def _open(live: LivePool, now_ms: int) -> _Books:
    """Books of what is held here already, with this replica's part of the pool."""
    books = _put_in_force(Ledger.opened_at(now_ms), live, now_ms)
    for survivor in live.held.survivors(now_ms):
        # In our time, which need not be the store's.
        admitted_at_ms = now_ms - survivor.held_ms
        books.ledger.restore(replace(survivor.lease, admitted_at_ms=admitted_at_ms), now_ms)
    return books


def _put_in_force(ledger: Ledger, live: LivePool, now_ms: int) -> _Books:
    """Put our part of today's terms in force; what is held and used stays."""
    terms = {name: _part_of(each, live.replicas) for name, each in live.tick.terms.items()}
    usable = Resources(*(each // live.replicas for each in _amounts(live.tick.usable)))
    ledger.publish(terms, usable, live.pool.window_ms, now_ms)
    return _Books(ledger, live.tick, live.replicas)


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
