"""
The only reader of the system clock. Everything else is handed a `Clock`, or the time itself.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Milliseconds since an arbitrary but fixed start; never goes backwards."""

    def now_ms(self) -> int:
        """Pool time in whole milliseconds."""
        ...

    def now_us(self) -> int:
        """The same time in microseconds, for measuring durations."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_ms(self) -> int:
        """Monotonic milliseconds."""
        return time.monotonic_ns() // 1_000_000

    def now_us(self) -> int:
        """Monotonic microseconds."""
        return time.monotonic_ns() // 1_000


class ManualClock:
    """A clock that moves only when told, for tests and simulation."""

    def __init__(self, now_ms: int = 0) -> None:
        self._now_us = now_ms * 1_000

    def now_ms(self) -> int:
        """The time that was set."""
        return self._now_us // 1_000

    def now_us(self) -> int:
        """The time that was set, in microseconds."""
        return self._now_us

    def advance(self, ms: int) -> None:
        """Move forward by `ms` milliseconds."""
        if ms < 0:
            raise ValueError(f"a clock never goes backwards: {ms} ms")
        self._now_us += ms * 1_000
