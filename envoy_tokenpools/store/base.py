"""
The store port: what the gate needs of shared state, and what every store must keep.

The contract (one suite of tests runs on every store):

1. `reserve` decides and takes atomically, by the rules of `core.ledger`: whatever runs at the same time, nothing is
   handed out twice, and a refusal takes nothing.
2. A claim or settlement that is sent again with the same lease id counts once.
3. A lease not renewed for its time to live returns by itself at the next `sweep`; settling it later still charges.
4. The time is the store's own, never a caller's: replicas' clocks need not agree.
5. Exactly one caller gets the reading of a tick from `close_tick`; the others get None.
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


class Store(Protocol):
    """Shared state of all pools, addressed by pool name."""

    async def reserve(self, pool: str, claim: Claim) -> Reply:
        """Take the claim's cost or refuse."""
        ...

    async def settle(self, pool: str, lease_id: str, tokens: int) -> Settlement | None:
        """End a lease and charge `tokens`; None if it is not known (any more)."""
        ...

    async def renew(self, pool: str, lease_ids: Sequence[str], ttl_ms: int) -> None:
        """Keep these leases alive for another `ttl_ms`."""
        ...

    async def sweep(self, pool: str) -> tuple[Lease, ...]:
        """Take back expired leases and return them."""
        ...

    async def close_tick(self, pool: str) -> TickReading | None:
        """The reading of the tick that ends now; None if another caller has it."""
        ...

    async def publish(self, pool: str, tick: Tick, window_ms: int) -> None:
        """Put the outcome of a tick in force."""
        ...

    async def snapshot(self, pool: str) -> LedgerView:
        """The books right now, for gauges and pages."""
        ...

    async def close(self) -> None:
        """Give back connections; leases stay."""
        ...
