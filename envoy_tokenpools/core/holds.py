"""
How long leases are held, and so when the next one is expected to end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from envoy_tokenpools.core.admission import Lease
from envoy_tokenpools.core.judging import release_wait_ms
from envoy_tokenpools.core.resources import Resources

DEFAULT_HOLD_MS = 1_000
"""How long a lease is assumed to be held, at least, before any was settled."""

MAX_GUESSED_HOLD_MS = 10_000
"""Reserved output is a maximum: what is guessed by it before any lease has ended is bounded."""

HOLD_PART = 10
"""One settlement moves the average holding time by this part of the difference."""


@dataclass(slots=True)
class HoldTime:
    """
    The average holding time of a pool's leases.

    Attributes:
        mean_us: in microseconds, so that integers are fine enough; moved by every lease that ended by itself. None
            before the first.
    """

    mean_us: int | None = None

    def learn(self, held_ms: int) -> None:
        """A lease has ended by itself."""
        held_us = held_ms * 1_000
        before_us = held_us if self.mean_us is None else self.mean_us
        self.mean_us = before_us + (held_us - before_us) // HOLD_PART

    def wait_ms(
        self, leases: Mapping[str, Lease], usable: Resources, ahead: int, now_ms: int
    ) -> int:
        """When one of `leases`, oldest first, is expected to end for whoever has `ahead` others before it."""
        oldest = next(iter(leases.values()), None)
        if oldest is None:
            return release_wait_ms(self.mean_us or DEFAULT_HOLD_MS * 1_000, 0, 0, ahead)
        oldest_ms = max(0, now_ms - oldest.admitted_at_ms)
        mean_us = self.mean_us
        if mean_us is None:
            mean_us = 1_000 * max(DEFAULT_HOLD_MS, oldest_ms, _guess_ms(oldest, usable))
        return release_wait_ms(mean_us, len(leases), oldest_ms, ahead)


def _guess_ms(lease: Lease, usable: Resources) -> int:
    """How long a lease may be held, before any has ended: by its share of the pool's rate."""
    rate = usable.tokens_per_second * lease.cost.concurrency
    guess_ms = lease.cost.output_tokens * 1_000 * usable.concurrency // max(1, rate)
    return min(MAX_GUESSED_HOLD_MS, guess_ms)
