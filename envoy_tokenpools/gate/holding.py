"""
The leases in this replica's hands: kept alive until their requests end, or given back when the store asks for them.
"""

from collections.abc import Callable, Iterable

from envoy_tokenpools.core.admission import Lease
from envoy_tokenpools.store.base import Survivor


class Holding:
    """
    One lease that is held here.

    The store may mark it to be evicted at any time, also before anybody listens.
    """

    __slots__ = ("_callback", "is_evicted", "lease", "since_ms")

    def __init__(self, lease: Lease, since_ms: int) -> None:
        self.lease = lease
        self.since_ms = since_ms
        self.is_evicted = False
        self._callback: Callable[[], None] | None = None

    def on_evict(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the lease is evicted, at once if it is already; it must neither block nor raise."""
        if self.is_evicted:
            callback()
        else:
            self._callback = callback

    def evict(self) -> None:
        """The capacity is needed: whoever holds the lease has to end its request now."""
        if self.is_evicted:
            return
        self.is_evicted = True
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    def release(self) -> None:
        """The request has ended: nobody is to be told any more."""
        self._callback = None


class Holdings:
    """All of one pool."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[str, Holding] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, lease: Lease, now_ms: int) -> Holding:
        """Keep a lease alive until it is released."""
        holding = self._held.get(lease.lease_id)
        if holding is None:
            holding = self._held[lease.lease_id] = Holding(lease, now_ms)
        return holding

    def release(self, lease_id: str) -> None:
        """Stop keeping a lease alive."""
        holding = self._held.pop(lease_id, None)
        if holding is not None:
            holding.release()

    def evict(self, lease_id: str) -> None:
        """Tell whoever holds a lease to end it, if that is here."""
        holding = self._held.get(lease_id)
        if holding is not None:
            holding.evict()

    def lease_ids(self) -> list[str]:
        """All that is held."""
        return list(self._held)

    def survivors(self, now_ms: int, among: Iterable[str] | None = None) -> list[Survivor]:
        """All that is held, or what of `among` is, with how long it has been."""
        wanted = self._held if among is None else among
        holdings = (self._held.get(lease_id) for lease_id in wanted)
        return [
            Survivor(holding.lease, max(0, now_ms - holding.since_ms))
            for holding in holdings
            if holding is not None
        ]
