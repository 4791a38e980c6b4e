"""
Figures of a recorded run. Pure.

A run shortened by a time scale is measured in the time as written: its milliseconds are divided by the
scale, so that one limit serves every scale. What a request costs in transit then weighs more.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from envoy_tokenpools.lab.record import Attempt, Result, RunRecord, Sample
from envoy_tokenpools.lab.scenario import Scenario
from envoy_tokenpools.lab.tally import percentile

OWN_LIMITS = frozenset({"concurrency_limit", "kv_cache_limit", "token_rate_limit"})
"""Reasons to shed that say: this was more than the entitlement's own limits."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a run, in milliseconds as written; the end is not part of it."""

    start_ms: float
    end_ms: float

    def __contains__(self, at_ms: float) -> bool:
        return self.start_ms <= at_ms < self.end_ms

    @property
    def label(self) -> str:
        """In seconds, for people."""
        return f"{self.start_ms / 1_000:g} to {self.end_ms / 1_000:g} s"


class Measured:
    """One run's figures, in time as written."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self._scale = record.time_scale

    @property
    def whole(self) -> Span:
        """The whole run."""
        return Span(0, self.record.duration_ms / self._scale)

    def written(self, at_ms: float) -> float:
        """A time or duration of the record as written."""
        return at_ms / self._scale

    def first_token_ms(
        self, entitlements: Iterable[str], share: float, *, within: Callable[[float], bool]
    ) -> float | None:
        """
        The time to first token that `share` of the attempts did not exceed; None without any.

        An attempt that was cut while it waited counts with the time that it had waited: without
        that, the longest waits of all would be left out.

        Args:
            entitlements: whose attempts.
            share: 0.99 for the slowest but one in a hundred.
            within: which attempts, by the time at which they were sent.
        """
        wanted = set(entitlements)
        waits = [
            self.written(wait_ms)
            for attempt in self.record.attempts
            if attempt.entitlement in wanted
            and within(self.written(attempt.sent_ms))
            and (wait_ms := _wait_ms(attempt)) is not None
        ]
        return percentile(waits, share)

    def served_after_ms(self, entitlement: str, share: float) -> float | None:
        """
        Time from the first attempt of a request to its first token, over all that were served.

        What a client feels that was shed, and came back as it was told.
        """
        waits = [
            self.written(attempt.first_token_ms - attempt.wanted_ms)
            for attempt in self.record.of(entitlement)
            if attempt.first_token_ms is not None
        ]
        return percentile(waits, share)

    def count(self, entitlement: str, *results: Result, within: Span | None = None) -> int:
        """Attempts of an entitlement that came to one of the results, by the time of their end."""
        span = within or Span(0, float("inf"))
        return sum(
            attempt.result in results and self.written(attempt.ended_ms) in span
            for attempt in self.record.of(entitlement)
        )

    def shed_inside(self, entitlement: str) -> int:
        """Attempts that were shed for another reason than the entitlement's own limits."""
        return sum(
            attempt.result is Result.SHED and attempt.reason not in OWN_LIMITS
            for attempt in self.record.of(entitlement)
        )

    def tokens(self, entitlement: str, *results: Result) -> int:
        """Prompt and output tokens of the attempts that came to one of the results."""
        return sum(
            attempt.prompt_tokens + attempt.output_tokens
            for attempt in self.record.of(entitlement)
            if attempt.result in results
        )

    def shares(self) -> dict[str, float]:
        """Each entitlement's part of the tokens, prompt and output, of all answers that began."""
        tokens = dict.fromkeys(self.record.parties, 0)
        for attempt in self.record.attempts:
            if attempt.first_token_ms is not None:
                tokens[attempt.entitlement] += attempt.prompt_tokens + attempt.output_tokens
        of = sum(tokens.values()) or 1
        return {name: count / of for name, count in tokens.items()}

    def running_ms(self, entitlement: str, span: Span) -> float:
        """Sequence-milliseconds in which an entitlement's answers were coming, within a span."""
        total = 0.0
        for attempt in self.record.of(entitlement):
            if attempt.first_token_ms is not None:
                start_ms = max(self.written(attempt.first_token_ms), span.start_ms)
                total += max(0.0, min(self.written(attempt.ended_ms), span.end_ms) - start_ms)
        return total

    def samples(self, *, within: Callable[[float], bool]) -> Sequence[Sample]:
        """Samples by their time."""
        return [one for one in self.record.samples if within(self.written(one.at_ms))]

    def most_queued(self, *, within: Callable[[float], bool]) -> int | None:
        """The longest queue inside the backend; None if it does not tell."""
        queued = [one.queued for one in self.samples(within=within) if one.queued is not None]
        return max(queued, default=None)

    def utilisation(self) -> float | None:
        """Mean share of the backend's slots in use; None if it does not tell."""
        running = [one.running for one in self.record.samples if one.running is not None]
        return sum(running) / len(running) / self.record.slots if running else None

    def largest_debt(self, *, within: Callable[[float], bool]) -> float | None:
        """The largest debt of any entitlement."""
        debts = [
            standing.debt
            for one in self.samples(within=within)
            for standing in one.standings.values()
        ]
        return max(debts, default=None)


def jain(values: Sequence[float]) -> float | None:
    """Jain's index: 1 when all are equal, 1/n when one has everything; None without any service."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def claimed_ms(scenario: Scenario) -> dict[str, float]:
    """
    Sequence-milliseconds that each entitlement could claim in an unscaled scenario.

    At every moment the backend's slots are shared in proportion to the baselines of those who have
    clients then; nobody can claim more than it has clients, and what one leaves the others share.
    """
    edges = {0, scenario.duration_ms}
    edges |= {change.at_ms for change in scenario.changes}
    edges |= {load.start_ms for load in scenario.loads} | {load.stop_ms for load in scenario.loads}
    times = sorted(edges)
    claims = dict.fromkeys(scenario.pool.entitlements, 0.0)
    for start_ms, end_ms in pairwise(times):
        wanted: dict[str, float] = {}
        for load in scenario.loads:
            if load.start_ms <= start_ms < load.stop_ms and load.clients:
                wanted[load.entitlement] = wanted.get(load.entitlement, 0.0) + load.clients
        baselines = {
            name: float(scenario.pool.entitlements[name].baseline.concurrency) for name in wanted
        }
        for name, share in _shared(scenario.slots_at(start_ms), wanted, baselines).items():
            claims[name] += share * (end_ms - start_ms)
    return claims


def _shared(
    slots: float, wanted: Mapping[str, float], baselines: Mapping[str, float]
) -> dict[str, float]:
    """Slots in proportion to baselines, to nobody more than wanted."""
    shares: dict[str, float] = {}
    left = dict(wanted)
    while left:
        per_baseline = slots / (sum(baselines[name] for name in left) or 1.0)
        content = {name for name in left if left[name] <= baselines[name] * per_baseline}
        if not content:
            return shares | {name: baselines[name] * per_baseline for name in left}
        for name in content:
            shares[name] = left.pop(name)
            slots -= shares[name]
    return shares


def _wait_ms(attempt: Attempt) -> int | None:
    if attempt.first_token_ms is None and attempt.result is Result.CUT:
        return attempt.ended_ms - attempt.sent_ms
    return attempt.first_token_wait_ms
