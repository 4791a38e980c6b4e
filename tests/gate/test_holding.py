"""A lease in this replica's hands."""

from envoy_tokenpools.core.admission import Lease
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.gate.holding import Holding, Holdings
from envoy_tokenpools.store.base import Survivor

LEASE = Lease(
    lease_id="lease-1",
    entitlement="a",
    cost=Cost(1, 1, 0, 1),
    within_share=False,
    within_guarantee=False,
    tokens_guaranteed=False,
    pool_ppm=1_000_000,
    admitted_at_ms=7,
    expires_at_ms=60_007,
)


def test_an_eviction_is_told_once() -> None:
    """However often the store asks for the lease."""
    told: list[str] = []
    holding = Holding(LEASE, 0)
    holding.on_evict(lambda: told.append(holding.lease.lease_id))
    assert not holding.is_evicted
    holding.evict()
    holding.evict()
    assert told == ["lease-1"]
    assert holding.is_evicted


def test_whoever_listens_late_is_told_at_once() -> None:
    """The lease may be wanted back before anybody had time to listen."""
    told: list[str] = []
    holding = Holding(LEASE, 0)
    holding.evict()
    holding.on_evict(lambda: told.append("now"))
    assert told == ["now"]


def test_after_its_end_nobody_is_told() -> None:
    """A request that has ended gives its capacity back by itself."""
    told: list[str] = []
    holding = Holding(LEASE, 0)
    holding.on_evict(lambda: told.append("now"))
    holding.release()
    holding.evict()
    assert told == []


def test_what_is_held_survives_its_store() -> None:
    """With the time since it was taken, by our clock; what was released does not."""
    held = Holdings()
    held.hold(LEASE, 100)
    assert held.hold(LEASE, 900).since_ms == 100, "held once"
    assert held.survivors(350) == [Survivor(LEASE, 250)]
    assert held.survivors(350, ["lease-1", "unknown"]) == [Survivor(LEASE, 250)]
    assert held.lease_ids() == ["lease-1"]
    held.release("lease-1")
    held.release("lease-1")
    assert (held.survivors(350), len(held)) == ([], 0)
