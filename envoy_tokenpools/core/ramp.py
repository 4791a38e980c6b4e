"""
Capacity that comes back is given out slowly, so that waiting clients do not arrive as one herd.
"""

from dataclasses import dataclass

from envoy_tokenpools.core.resources import Resources


@dataclass(frozen=True, slots=True)
class Ramp:
    """
    The usable capacity as a function of time.

    A loss counts at once; of what was restored, `per_second` (default a quarter) becomes usable each second.

    Attributes:
        start: what was usable at `since_ms`.
        target: the capacity that is there.
        since_ms: when the target was set.
        per_second: share of the restored part that becomes usable per second, above 0.
    """

    start: Resources
    target: Resources
    since_ms: int
    per_second: float

    @classmethod
    def steady(cls, capacity: Resources, *, per_second: float) -> "Ramp":
        """All of `capacity`, from the start."""
        return cls(capacity, capacity, 0, per_second)

    def toward(self, target: Resources, *, now_ms: int, per_second: float) -> "Ramp":
        """
        The ramp from what is usable at `now_ms` to a new capacity; to be told the same one again starts nothing over.
        """
        if target == self.target:
            return self
        return Ramp(self.usable(now_ms), target, now_ms, per_second)

    def usable(self, now_ms: int) -> Resources:
        """What may be used at `now_ms`."""
        if self.start == self.target:
            return self.target
        done = min(1.0, max(0, now_ms - self.since_ms) / 1_000 * self.per_second)
        if done >= 1.0:
            return self.target
        return Resources(
            _between(self.start.tokens_per_second, self.target.tokens_per_second, done),
            _between(self.start.kv_bytes, self.target.kv_bytes, done),
            _between(self.start.concurrency, self.target.concurrency, done),
        )


def _between(start: int, target: int, done: float) -> int:
    return target if target <= start else start + int((target - start) * done)
