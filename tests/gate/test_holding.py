"""A lease in this replica's hands."""

from envoy_tokenpools.gate.holding import Holding


def test_an_eviction_is_told_once() -> None:
    """However often the store asks for the lease."""
    told: list[str] = []
    holding = Holding("lease-1")
    holding.on_evict(lambda: told.append(holding.lease_id))
    assert not holding.is_evicted
    holding.evict()
    holding.evict()
    assert told == ["lease-1"]
    assert holding.is_evicted


def test_whoever_listens_late_is_told_at_once() -> None:
    """The lease may be wanted back before anybody had time to listen."""
    told: list[str] = []
    holding = Holding("lease-1")
    holding.evict()
    holding.on_evict(lambda: told.append("now"))
    assert told == ["now"]


def test_after_its_end_nobody_is_told() -> None:
    """A request that has ended gives its capacity back by itself."""
    told: list[str] = []
    holding = Holding("lease-1")
    holding.on_evict(lambda: told.append("now"))
    holding.release()
    holding.evict()
    assert told == []
