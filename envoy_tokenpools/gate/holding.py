"""
A lease in this replica's hands: kept alive until its request ends, or given back when the store asks for it.
"""

from collections.abc import Callable


class Holding:
    """
    One lease that is held here.

    The store may mark it to be evicted at any time, also before anybody listens.
    """

    __slots__ = ("_callback", "is_evicted", "lease_id")

    def __init__(self, lease_id: str) -> None:
        self.lease_id = lease_id
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
