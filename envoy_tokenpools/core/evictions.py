"""
Which leases are taken back when a guarantee is claimed in a full pool (paper 3.2: preemptible, then spot).
"""

from dataclasses import dataclass, field

from envoy_tokenpools.core.admission import Lease


@dataclass(slots=True)
class Evictions:
    """
    The leases that may be taken back, and those that are on their way.

    Lowest rank first, inside a rank the newest first: it has the least to lose. A lease that was told to end counts as
    free from then on, though it holds its capacity until it is settled or expires, so that nobody else is ended for the
    same shortage.

    Attributes:
        freeing_concurrency: sequences of leases that were told to end.
        freeing_kv_bytes: KV bytes of those.
    """

    freeing_concurrency: int = 0
    freeing_kv_bytes: int = 0
    _evictable: dict[int, dict[str, Lease]] = field(default_factory=dict)
    _freeing: dict[str, Lease] = field(default_factory=dict)

    def add(self, lease: Lease) -> None:
        """A lease was taken; in order of admission."""
        if lease.eviction_rank is not None:
            self._evictable.setdefault(lease.eviction_rank, {})[lease.lease_id] = lease

    def remove(self, lease: Lease) -> None:
        """A lease is held no more."""
        if lease.eviction_rank is None:
            return
        if self._freeing.pop(lease.lease_id, None) is not None:
            self.freeing_concurrency -= lease.cost.concurrency
            self.freeing_kv_bytes -= lease.cost.kv_bytes
        else:
            self._evictable[lease.eviction_rank].pop(lease.lease_id, None)

    def is_freeing(self, lease_id: str) -> bool:
        """Whether a lease was told to end, and has not."""
        return lease_id in self._freeing

    def take_back(self, *, sequences: int, kv_bytes: int) -> tuple[Lease, ...]:
        """
        The leases to end so that so much comes free; fewer where there are no more, none that would not help.

        What is being freed already counts.
        """
        sequences -= self.freeing_concurrency
        kv_bytes -= self.freeing_kv_bytes
        victims: list[Lease] = []
        for rank in sorted(self._evictable):
            for lease in reversed(self._evictable[rank].values()):
                if sequences <= 0 and kv_bytes <= 0:
                    break
                cost = lease.cost
                if (sequences > 0 and cost.concurrency) or (kv_bytes > 0 and cost.kv_bytes):
                    victims.append(lease)
                    sequences -= cost.concurrency
                    kv_bytes -= cost.kv_bytes
        for lease in victims:
            self._free(lease)
        return tuple(victims)

    def _free(self, lease: Lease) -> None:
        if lease.eviction_rank is not None:
            del self._evictable[lease.eviction_rank][lease.lease_id]
        self._freeing[lease.lease_id] = lease
        self.freeing_concurrency += lease.cost.concurrency
        self.freeing_kv_bytes += lease.cost.kv_bytes
