"""
A token bucket as the amount used of it, so that its rate may change without inventing or losing tokens.

What was taken drains at `rate` tokens per second and the bucket holds `rate * window` tokens. Levels are
thousandths of a token: tokens per second times milliseconds, exactly.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """
    One bucket, by three rules.

    1. A cost fits when it and what is used hold at most the depth.
    2. An untouched bucket admits a cost deeper than itself, else a small pool would refuse its first
       request for ever; one without any depth admits nothing.
    3. `take` may exceed the depth (settlement of an under-estimate): then the bucket is short until it drains.

    Attributes:
        rate: tokens per second.
        window_ms: depth as time at `rate`.
        used_milli: thousandths of tokens taken and not yet drained, at least 0.
        drained_at_ms: when `used_milli` was last brought up to date.
    """

    rate: int
    window_ms: int
    used_milli: int = 0
    drained_at_ms: int = 0

    @property
    def depth_milli(self) -> int:
        """What the bucket holds, in thousandths of tokens."""
        return self.rate * self.window_ms

    def drain(self, now_ms: int) -> None:
        """Let the time since the last call flow off; a clock stepping back changes nothing."""
        elapsed_ms = now_ms - self.drained_at_ms
        if elapsed_ms > 0:
            self.drained_at_ms = now_ms
            if self.used_milli:
                self.used_milli = max(0, self.used_milli - self.rate * elapsed_ms)

    def set_rate(self, rate: int, window_ms: int, now_ms: int) -> None:
        """Change the rate from `now_ms` on; what is used stays used."""
        self.drain(now_ms)
        self.rate = rate
        self.window_ms = window_ms

    def fits(self, tokens: int) -> bool:
        """Whether a cost of `tokens` may be taken now (rules 1 and 2); drain first."""
        depth_milli = self.rate * self.window_ms
        if self.used_milli + tokens * 1_000 <= depth_milli:
            return True
        return self.used_milli == 0 and depth_milli > 0

    def take(self, tokens: int) -> None:
        """Take `tokens`, or give back when negative; never more than was taken."""
        self.used_milli = max(0, self.used_milli + tokens * 1_000)

    @property
    def remaining(self) -> int:
        """Whole tokens that are left, at least 0."""
        return max(0, self.depth_milli - self.used_milli) // 1_000

    def wait_ms(self, tokens: int) -> int | None:
        """Milliseconds until a cost of `tokens` fits, rounded up; None if it never will."""
        if self.rate == 0:
            return None
        excess_milli = self.used_milli - max(0, self.depth_milli - tokens * 1_000)
        return max(0, -(-excess_milli // self.rate))
