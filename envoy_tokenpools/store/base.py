"""
The store port: what the gate needs of shared state, and what every store must keep.

The contract (one suite of tests runs on every store):

1. `reserve` decides and takes atomically, by the rules of `core.ledger`: whatever runs at the same time, nothing is
   handed out twice, and a refusal takes nothing.
2. A claim or settlement that is sent again with the same lease id counts once.
3. A lease not renewed for its time to live returns by itself at the next `sweep`; settling it later still charges.
4. The time is the store's own, never a caller's: replicas' clocks need not agree.
5. Exactly one caller gets the reading of a tick from `close_tick`; the others get None. It alone may publish what comes
   of it; whoever publishes after another has taken its place changes nothing. What was published is in force for
   everybody, also for claims that bring other terms; those count where nothing was published.
6. What cannot be done raises `errors.StoreError` and nothing else.
7. A claim that was taken inside a guarantee, in a pool that then holds more sequences or KV bytes than are usable,
   names in `Reply.evicted` the leases that have to be ended for it: of terms that were evictable when they were taken,
   lowest rank first, inside a rank the newest first, each once, and no more than are short beyond those that were named
   before and have not ended. A lease that was named is held until it is settled or expires, is renewed like any other,
   and is the answer to its claim sent again. Where none can be named the claim is taken all the same. What is not
   enforced evicts nobody and is not evicted.
   What a lending guarantee gives back stays free for it for a moment (`core.ledger`), so that its next request needs to
   end nobody.
8. Calls about the same lease id take effect in the order in which they were begun, whether or not the caller waited for
   the answer to the one before: a settlement begun after its claim, answered or cancelled, leaves nothing held.
9. A settlement charges no more than is believed of one lease (`Ledger.settle`), and says what it charged.
10. Books may be lost (`Sight.is_lost`). Whoever holds leases has them restored: held again whether they fit or not, and
    charged only if the books know nothing of them any more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from envoy_tokenpools.core.account import Meters
from envoy_tokenpools.core.admission import Balance, Claim, Lease, Refusal, Settlement
from envoy_tokenpools.core.ledger import LedgerView
from envoy_tokenpools.core.tick import Tick


@dataclass(frozen=True, slots=True)
class Reply:
    """
    The answer to a claim.

    Attributes:
        outcome: a lease or a refusal.
        balance: what the entitlement has left after it.
        evicted: leases that are to be ended to make room for this one; whoever holds them has to.
    """

    outcome: Lease | Refusal
    balance: Balance
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TickReading:
    """What happened in a pool since the last tick, `elapsed_ms` ago."""

    elapsed_ms: int
    meters: Mapping[str, Meters]


@dataclass(frozen=True, slots=True)
class Renewal:
    """
    What became of leases that were to be renewed.

    Attributes:
        missing: not held any more.
        evicted: held, but to be ended: the answer that named them may have been lost.
    """

    missing: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Opening:
    """
    What a replica finds when it has loaded the configuration of a pool.

    Attributes:
        tick: in force; None if there is none yet.
        leads: the replica has to publish terms of its own: there are none of the same configuration.
    """

    tick: Tick | None
    leads: bool


@dataclass(frozen=True, slots=True)
class Sight:
    """
    What a replica sees when it looks at a pool's books.

    Attributes:
        tick: in force, if that is another than it knows.
        evicted: leases of its own that are to be ended and have not.
        is_lost: the books were opened anew since it looked last: what it holds is not in them.
        replicas: how many share the pool now.
    """

    tick: Tick | None = None
    evicted: tuple[str, ...] = ()
    is_lost: bool = False
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Survivor:
    """A lease whose request runs on, and for how long it has been held."""

    lease: Lease
    held_ms: int


class Listener(Protocol):
    """Is told at once what a store learns by itself; must neither block nor raise."""

    def evict(self, pool: str, lease_id: str) -> None:
        """A lease, held here or elsewhere, is to be ended."""
        ...

    def lost(self, pool: str) -> None:
        """The books were opened anew: look."""
        ...


class Store(Protocol):
    """Shared state of all pools, addressed by pool name."""

    async def reserve(self, pool: str, claim: Claim) -> Reply:
        """Take the claim's cost or refuse."""
        ...

    async def settle(self, pool: str, lease_id: str, tokens: int) -> Settlement | None:
        """End a lease and charge `tokens`; None if it is not known (any more)."""
        ...

    async def renew(self, pool: str, lease_ids: Sequence[str], ttl_ms: int) -> Renewal:
        """Keep these leases alive for another `ttl_ms`."""
        ...

    async def restore(self, pool: str, survivors: Sequence[Survivor], ttl_ms: int) -> None:
        """Hold leases again that the books have lost (rule 10)."""
        ...

    async def sweep(self, pool: str) -> tuple[Lease, ...]:
        """Take back expired leases and return them."""
        ...

    async def open(self, pool: str, fingerprint: str) -> Opening:
        """The caller has loaded a configuration of `pool`; equal ones have equal fingerprints."""
        ...

    async def look(self, pool: str, known: Tick) -> Sight:
        """What is new to a replica whose latest tick is `known`."""
        ...

    async def close_tick(self, pool: str, after_ms: int = 0) -> TickReading | None:
        """The reading of the tick that ends now; None if another caller has it, or it is not `after_ms` old."""
        ...

    async def publish(self, pool: str, tick: Tick, window_ms: int) -> bool:
        """Put the outcome of a tick in force; False if another caller's is."""
        ...

    async def snapshot(self, pool: str) -> LedgerView:
        """The books right now, for gauges and pages."""
        ...

    def listen(self, listener: Listener) -> None:
        """Tell `listener` from now on."""
        ...

    async def close(self) -> None:
        """Give back connections; leases stay."""
        ...
