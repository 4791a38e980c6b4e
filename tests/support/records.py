"""Small recorded runs, made by hand."""

from collections.abc import Mapping, Sequence

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.lab.record import Attempt, Party, Result, RunRecord, Sample, Standing

NOBODY: Mapping[str, ServiceClass] = {}


def attempt(
    entitlement: str,
    sent_ms: int,
    first_token_ms: int | None,
    ended_ms: int,
    *,
    result: Result = Result.COMPLETED,
    reason: str = "",
    wanted_ms: int | None = None,
    tokens: int = 10,
) -> Attempt:
    """An attempt of ten prompt tokens."""
    return Attempt(
        entitlement=entitlement,
        wanted_ms=sent_ms if wanted_ms is None else wanted_ms,
        sent_ms=sent_ms,
        ended_ms=ended_ms,
        prompt_tokens=10,
        asked_tokens=10,
        result=result,
        reason=reason,
        decided_ms=sent_ms + 1,
        first_token_ms=first_token_ms,
        output_tokens=0 if first_token_ms is None else tokens,
    )


def shed(entitlement: str, at_ms: int, reason: str = "pool_contended") -> Attempt:
    """An attempt that was refused at once."""
    return attempt(entitlement, at_ms, None, at_ms + 1, result=Result.SHED, reason=reason)


def sample(
    at_ms: int, *, usable: int = 4, running: int | None = 4, queued: int | None = 0, **debts: float
) -> Sample:
    """A sample in which every entitlement has two sequences, weight 1 and the given debt."""
    standings = {name: Standing(2, 0, 2, 1.0, debt) for name, debt in debts.items()}
    return Sample(at_ms, usable, standings, running, queued)


def record(
    *attempts: Attempt,
    samples: Sequence[Sample] = (),
    run: str = "run",
    duration_ms: int = 10_000,
    time_scale: float = 1.0,
    slots: int = 4,
    classes: Mapping[str, ServiceClass] = NOBODY,
) -> RunRecord:
    """A run of the entitlements whose classes are given."""
    parties = {name: Party(one, 500, 2) for name, one in classes.items()}
    return RunRecord(
        scenario="small",
        run=run,
        about="A small run.",
        enforced=True,
        time_scale=time_scale,
        duration_ms=duration_ms,
        slots=slots,
        parties=parties,
        attempts=list(attempts),
        samples=list(samples),
    )
