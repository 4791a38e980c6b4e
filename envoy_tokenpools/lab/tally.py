"""
What the clients of one entitlement have seen: written while traffic runs, read at any time.
"""

import math
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from envoy_tokenpools.clock import Clock

SAMPLES_MAX = 100_000
"""First-token samples that a tally keeps, the newest: a run of days must not fill the memory."""

RECENT_SECONDS = 3
"""How far back a live rate looks."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One stream's first text: when it came, and how long after its request was sent."""

    at_ms: int
    waited_ms: float


@dataclass(slots=True)
class Tally:
    """
    Counts of one entitlement's clients. Times are milliseconds since `started_ms`.

    Attributes:
        clock: the time that live rates are measured by.
        started_ms: when the traffic began.
        ended_ms: when it ended; None while it runs.
        sent: HTTP requests, retries included.
        retried: those of them that repeated a shed request.
        admitted: answered with 200.
        completed: whose answer came to its end.
        cancelled: cut because the run was over.
        in_flight: admitted and not ended, now.
        shed: answered with 429, by the reason that the answer states.
        errors: everything else, by status, or `unreachable` or `broken_off` where there was none.
        tokens: generated tokens received.
        tokens_by_second: the same, by the second in which they came.
        first_tokens: a sample per stream.
    """

    clock: Clock
    started_ms: int = 0
    ended_ms: int | None = None
    sent: int = 0
    retried: int = 0
    admitted: int = 0
    completed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    shed: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    tokens_by_second: Counter[int] = field(default_factory=Counter)
    first_tokens: deque[FirstToken] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))

    @property
    def elapsed_ms(self) -> int:
        """How long the traffic has run, or ran."""
        now_ms = self.clock.now_ms() if self.ended_ms is None else self.ended_ms
        return now_ms - self.started_ms

    @property
    def tokens_per_second(self) -> float:
        """Tokens received per second: of the whole run when it has ended, else lately."""
        elapsed_ms = self.elapsed_ms
        if elapsed_ms <= 0:
            return 0.0
        this_second = elapsed_ms // 1_000
        if self.ended_ms is not None or this_second == 0:
            return self.tokens * 1_000 / elapsed_ms
        seconds = range(max(0, this_second - RECENT_SECONDS), this_second)
        return sum(self.tokens_by_second[second] for second in seconds) / len(seconds)

    def first_token_ms(self, share: float, *, since_ms: int = 0) -> float | None:
        """
        How long a share of the streams waited at most for their first text.

        Args:
            share: 0.5 for the median, 0.99 for the slowest but one in a hundred.
            since_ms: leave out what came earlier in the run.

        Returns:
            Milliseconds, or None without a sample.
        """
        samples = [sample.waited_ms for sample in self.first_tokens if sample.at_ms >= since_ms]
        return percentile(samples, share)

    def received(self, tokens: int) -> None:
        """Count tokens that came now; negative corrects what was counted too many."""
        self.tokens += tokens
        self.tokens_by_second[self.elapsed_ms // 1_000] += tokens

    def saw_first_token(self, waited_ms: float) -> None:
        """Take a sample."""
        self.first_tokens.append(FirstToken(self.elapsed_ms, waited_ms))


def percentile(samples: Collection[float], share: float) -> float | None:
    """
    The nearest-rank percentile: the smallest sample that at least `share` of all do not exceed.

    It is always one of the samples, never a value between two. None without samples.

    Raises:
        ValueError: share is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        message = f"a share is above 0 and at most 1: {share}"
        raise ValueError(message)
    if not samples:
        return None
    return sorted(samples)[math.ceil(share * len(samples)) - 1]
