"""
What a record takes from a scenario and from a pool's report. Pure, for whoever runs it.
"""

from envoy_tokenpools.lab.record import Attempt, Party, RunRecord, Sample, Standing
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


def record_of(scenario: Scenario, attempts: list[Attempt], samples: list[Sample]) -> RunRecord:
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
    )


def sample_of(
    report: PoolReport, at_ms: int, *, running: int | None = None, queued: int | None = None
) -> Sample:
    """A pool's report as a record has it, with what the backend tells."""
    return Sample(
        at_ms=at_ms,
        usable=report.usable.concurrency,
        standings={
            one.name: Standing(
                in_flight=one.in_flight,
                waiting=one.waiting,
                allocation=one.allocation.concurrency,
                weight=one.weight,
                debt=one.debt,
            )
            for one in report.entitlements
        },
        running=running,
        queued=queued,
    )
