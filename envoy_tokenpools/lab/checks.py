"""
What an experiment must show: named checks with a measured value and a limit. Pure.

Times are milliseconds of the scenario as written, whatever time scale it ran at.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.lab.measures import Measured, Span, claimed_ms, jain
from envoy_tokenpools.lab.record import RunRecord
from envoy_tokenpools.lab.scenario import Role, Scenario

ARRIVAL_MS = 1_000
"""How long after an arrival a wait or a queue is not held against the filter, where a check says so."""

FIRST_TOKEN_LIMIT_MS = 1_200
FLOOD_LIMIT_MS = 3_000
LOSS_MS = 5_000
DEBT_GONE_MS = 50_000
RECOVERY_MS = 10_000


class Bound(enum.Enum):
    """On which side of its limit a value has to be."""

    AT_MOST = "at most"
    AT_LEAST = "at least"


@dataclass(frozen=True, slots=True)
class Check:
    """
    One thing that a run must show.

    Attributes:
        name: what is measured.
        measured: its value; None if there was nothing to measure.
        bound: at most or at least the limit.
        limit: the limit.
        unit: of both.
    """

    name: str
    measured: float | None
    bound: Bound
    limit: float
    unit: str = ""

    @property
    def passed(self) -> bool:
        """Whether the value keeps to its limit; what could not be measured does not."""
        if self.measured is None:
            return False
        if self.bound is Bound.AT_MOST:
            return self.measured <= self.limit
        return self.measured >= self.limit


@dataclass(frozen=True, slots=True)
class Judgement:
    """
    One run held against its checks.

    Attributes:
        run: name of the run.
        role: what it is there for.
        checks: that a run which is shown must pass, and a control must not.
        proofs: that a control must pass: that what it lacks is really needed.
    """

    run: str
    role: Role
    checks: tuple[Check, ...]
    proofs: tuple[Check, ...] = ()

    @property
    def as_expected(self) -> bool:
        """Whether a shown run passed, or a control failed; others are as they are."""
        if self.role is Role.SHOWN:
            return all(check.passed for check in self.checks)
        if self.role is Role.CONTROL:
            failed = any(not check.passed for check in self.checks)
            return failed and all(proof.passed for proof in self.proofs)
        return True


@dataclass(frozen=True, slots=True)
class _Case:
    """One run, and those that it is compared with, where they were run."""

    scenario: Scenario
    measured: Measured
    control: Measured | None
    alone: Measured | None


def judge(scenarios: Sequence[Scenario], records: Mapping[str, RunRecord]) -> tuple[Judgement, ...]:
    """
    Hold the runs of an experiment against its checks.

    Args:
        scenarios: as written, not scaled; those without a record are left out.
        records: by name of the run. A check that compares with a run that is missing is left out.
    """
    done = [scenario for scenario in scenarios if scenario.run in records]
    first = {
        role: next((Measured(records[one.run]) for one in done if one.role is role), None)
        for role in (Role.CONTROL, Role.REFERENCE)
    }
    judged = []
    for scenario in done:
        case = _Case(
            scenario,
            Measured(records[scenario.run]),
            first[Role.CONTROL],
            first[Role.REFERENCE],
        )
        checks = _CHECKS.get(scenario.checks, _none)(case)
        is_control = scenario.role is Role.CONTROL
        proofs = _PROOFS.get(scenario.checks, _none)(case) if is_control else []
        if scenario.role is Role.REFERENCE:
            checks = []
        judged.append(Judgement(scenario.run, scenario.role, tuple(checks), tuple(proofs)))
    return tuple(judged)


def _none(_: _Case) -> list[Check]:
    return []


# ---------------------------------------------------------------------- protection


def _protection(case: _Case) -> list[Check]:
    """A reserved baseline keeps its latency in every phase, and costs nobody much."""
    scenario, measured = case.scenario, case.measured
    reserved = _of_class(scenario, ServiceClass.GUARANTEED, ServiceClass.DEDICATED)
    arrivals = [load.start_ms for load in scenario.loads if load.entitlement in reserved]
    checks = [
        Check(
            f"first token of guaranteed, P99, {phase.label}",
            measured.first_token_ms(reserved, 0.99, within=phase.__contains__),
            Bound.AT_MOST,
            FIRST_TOKEN_LIMIT_MS,
            "ms",
        )
        for phase in _phases(scenario)
    ]
    settled = _outside(arrivals, ARRIVAL_MS)
    if case.alone is not None:
        now_ms = measured.first_token_ms(reserved, 0.99, within=settled)
        alone_ms = case.alone.first_token_ms(reserved, 0.99, within=settled)
        checks.append(
            Check(
                "the same outside 1 s after an arrival, against alone",
                _ratio(now_ms, alone_ms),
                Bound.AT_MOST,
                1.2,
                "times",
            )
        )
    shed = sum(measured.shed_inside(name) for name in reserved)
    checks.append(Check("guaranteed requests shed", shed, Bound.AT_MOST, 0))
    checks.append(_queue(measured, settled, "the backend's queue outside 1 s after an arrival"))
    if case.control is not None and scenario.role is not Role.CONTROL:
        spot_waits = any(
            one.max_wait_ms
            for one in scenario.pool.entitlements.values()
            if not one.baseline.concurrency
        )
        checks.append(_utilisation(case, 0.95 if spot_waits else 0.90))
    return checks


def _protection_proofs(case: _Case) -> list[Check]:
    """How bad it is without: the backend's queue makes the wait, so its expected length is the limit."""
    scenario, measured = case.scenario, case.measured
    reserved = _of_class(scenario, ServiceClass.GUARANTEED, ServiceClass.DEDICATED)
    flood = max(_phases(scenario), key=lambda phase: _clients(scenario, phase))
    wait_ms = measured.first_token_ms(reserved, 0.99, within=flood.__contains__)
    queue = _clients(scenario, flood) - scenario.engine.slots
    # A queue of as many as there are slots waits for a whole request; the paper's 34 for 2.1 of them.
    expected_ms = 0.9 * queue / scenario.engine.slots * _request_ms(scenario)
    limit_ms = max(FLOOD_LIMIT_MS, round(expected_ms, -2))
    name = (
        f"first token of guaranteed, P99, {flood.label}, with {_clients(scenario, flood)} clients"
    )
    return [Check(name, wait_ms, Bound.AT_LEAST, limit_ms, "ms")]


# ---------------------------------------------------------------------- fair share


def _fair_share(case: _Case) -> list[Check]:
    """Urgent tenants keep their target, nobody starves, and what was lost is made good."""
    scenario, measured = case.scenario, case.measured
    entitlements = scenario.pool.entitlements
    by_target = sorted(entitlements.values(), key=lambda one: one.slo_target_ms or 0)
    strict, loose = by_target[0], by_target[-1]
    lost_ms, back_ms = (change.at_ms for change in scenario.changes[:2])
    outage = Span(lost_ms, back_ms)
    checks = [
        Check(
            f"first token of {strict.name}, P99, outside 5 s after the loss",
            measured.first_token_ms([strict.name], 0.99, within=_outside([lost_ms], LOSS_MS)),
            Bound.AT_MOST,
            strict.slo_target_ms or 0,
            "ms",
        ),
        Check(
            f"service of {loose.name} in the outage, of its baseline",
            measured.running_ms(loose.name, outage)
            / (loose.baseline.concurrency * (back_ms - lost_ms)),
            Bound.AT_LEAST,
            0.25,
        ),
    ]
    claims = claimed_ms(scenario)
    served = [
        measured.running_ms(name, measured.whole) / claim for name, claim in claims.items() if claim
    ]
    checks.append(Check("Jain's index of service by claim", jain(served), Bound.AT_LEAST, 0.97))
    later = [load.start_ms for load in scenario.loads if load.start_ms > back_ms]
    quiet = Span(back_ms + DEBT_GONE_MS, min(later, default=scenario.duration_ms))
    checks.append(
        Check(
            f"largest debt, {quiet.label}",
            measured.largest_debt(within=quiet.__contains__),
            Bound.AT_MOST,
            0.05,
        )
    )
    checks.append(
        _spike(measured, entitlements, lost_ms, Span(back_ms, back_ms + RECOVERY_MS), quiet)
    )
    return checks


def _spike(
    measured: Measured,
    entitlements: Mapping[str, object],
    lost_ms: float,
    recovery: Span,
    quiet: Span,
) -> Check:
    """The worst of the tenants in the seconds after the recovery, against itself in quiet times."""

    def steady(at_ms: float) -> bool:
        return at_ms < lost_ms or recovery.end_ms <= at_ms < quiet.end_ms

    ratios = [
        ratio
        for name in entitlements
        if (
            ratio := _ratio(
                measured.first_token_ms([name], 0.99, within=recovery.__contains__),
                measured.first_token_ms([name], 0.99, within=steady),
            )
        )
        is not None
    ]
    name = f"first token, P99, {recovery.label}, against steady"
    return Check(name, max(ratios, default=None), Bound.AT_MOST, 1.5, "times")


# ---------------------------------------------------------------------- mixed


def _mixed(case: _Case) -> list[Check]:
    """Short guaranteed requests do not feel the long ones beside them."""
    scenario, measured = case.scenario, case.measured
    checks = []
    for name in _of_class(scenario, ServiceClass.GUARANTEED, ServiceClass.DEDICATED):
        target_ms = scenario.pool.entitlements[name].slo_target_ms
        if target_ms is not None:
            wait_ms = measured.first_token_ms([name], 0.99, within=measured.whole.__contains__)
            checks.append(
                Check(f"first token of {name}, P99", wait_ms, Bound.AT_MOST, target_ms, "ms")
            )
        shed = measured.shed_inside(name)
        checks.append(Check(f"requests of {name} shed inside its baseline", shed, Bound.AT_MOST, 0))
    return checks


_CHECKS: Mapping[str, Callable[[_Case], list[Check]]] = {
    "protection": _protection,
    "fair-share": _fair_share,
    "mixed": _mixed,
}
_PROOFS: Mapping[str, Callable[[_Case], list[Check]]] = {"protection": _protection_proofs}


# ---------------------------------------------------------------------- parts


def _queue(measured: Measured, within: Callable[[float], bool], name: str) -> Check:
    return Check(name, measured.most_queued(within=within), Bound.AT_MOST, 1, "sequences")


def _utilisation(case: _Case, limit: float) -> Check:
    without = case.control.utilisation() if case.control is not None else None
    now = case.measured.utilisation()
    name = "slots in use, against without admission"
    return Check(name, _ratio(now, without), Bound.AT_LEAST, limit, "times")


def _ratio(value: float | None, of: float | None) -> float | None:
    return value / of if value is not None and of else None


def _of_class(scenario: Scenario, *classes: ServiceClass) -> list[str]:
    entitlements = scenario.pool.entitlements.values()
    return [one.name for one in entitlements if one.service_class in classes]


def _phases(scenario: Scenario) -> list[Span]:
    """Between any two moments at which somebody begins or stops."""
    edges = {0, scenario.duration_ms}
    edges |= {load.start_ms for load in scenario.loads} | {load.stop_ms for load in scenario.loads}
    times = sorted(edges)
    return [Span(start, end) for start, end in pairwise(times)]


def _clients(scenario: Scenario, phase: Span) -> int:
    return sum(
        load.clients
        for load in scenario.loads
        if load.start_ms <= phase.start_ms and load.stop_ms >= phase.end_ms
    )


def _request_ms(scenario: Scenario) -> float:
    """How long a request of mean length takes on the engine, less its prefill."""
    lengths = [load.output.mean for load in scenario.loads]
    return scenario.engine.generation_us(round(sum(lengths) / len(lengths))) / 1_000


def _outside(times_ms: Sequence[float], for_ms: float) -> Callable[[float], bool]:
    def outside(at_ms: float) -> bool:
        return not any(start <= at_ms < start + for_ms for start in times_ms)

    return outside
