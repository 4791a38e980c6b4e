"""
What a record takes from a scenario and from a pool's report. Pure, for whoever runs it.
"""

from collections import Counter
from collections.abc import Sequence

from envoy_tokenpools.lab.record import (
    Attempt,
    Decisions,
    Party,
    RunRecord,
    Sample,
    Standing,
)
from envoy_tokenpools.lab.scenario import Scenario
from envoy_tokenpools.observer import PoolReport

SAMPLE_MS = 200
"""How often the pool is looked at in a run that is as long as written."""


def parties_of(scenario: Scenario) -> dict[str, Party]:
    """The scenario's entitlements as a record has them."""
    return {
        name: Party(one.service_class, one.slo_target_ms, one.baseline.concurrency)
        for name, one in scenario.pool.entitlements.items()
    }


def record_of(
    scenario: Scenario,
    attempts: list[Attempt],
    samples: list[Sample],
    decisions: Sequence[Decisions] = (),
) -> RunRecord:
    """The record of a run that has ended."""
    return RunRecord(
        scenario=scenario.name,
        run=scenario.run,
        about=scenario.about,
        enforced=scenario.enforces,
        time_scale=scenario.time_scale,
        duration_ms=scenario.duration_ms,
        slots=scenario.engine.slots,
        parties=parties_of(scenario),
        attempts=attempts,
        samples=samples,
        decisions=list(decisions),
    )


def sample_of(
    report: PoolReport,
    at_ms: int,
    *,
    others: Sequence[PoolReport] = (),
    running: int | None = None,
    queued: int | None = None,
) -> Sample:
    """
    A pool's report as a record has it, with what the backend tells.

    Args:
        report: of one replica, for what all share.
        at_ms: when that was.
        others: of the other replicas, for what each has alone: who waits there.
        running: sequences in a slot of the backend.
        queued: sequences inside the backend that wait for one.
    """
    waiting: Counter[str] = Counter()
    for each in (report, *others):
        waiting.update({one.name: one.waiting for one in each.entitlements})
    return Sample(
        at_ms=at_ms,
        usable=report.usable.concurrency,
        standings={
            one.name: Standing(
                in_flight=one.in_flight,
                waiting=waiting[one.name],
                allocation=one.allocation.concurrency,
                weight=one.weight,
                debt=one.debt,
            )
            for one in report.entitlements
        },
        running=running,
        queued=queued,
    )
