"""What experiments must show, held against small recorded runs."""

import dataclasses

import pytest

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.lab.checks import Bound, Check, Judgement, judge
from envoy_tokenpools.lab.record import Attempt, Result, RunRecord, Sample
from envoy_tokenpools.lab.scenario import Role, Scenario
from envoy_tokenpools.lab.scenario_file import runs_named, shipped_scenarios
from tests.support.records import attempt, record, sample, shed

PROTECTION = runs_named(shipped_scenarios("protection"), ["evict", "without", "alone"])
FAIR_SHARE = runs_named(shipped_scenarios("fair-share"), ["with", "without"])
MIXED = shipped_scenarios("mixed")


def failed(judgement: Judgement) -> list[str]:
    """Names of the checks that a run did not pass."""
    return [check.name for check in judgement.checks if not check.passed]


def protected(
    *more: Attempt, wait_ms: int = 250, samples: list[Sample] | None = None, run: str = "evict"
) -> RunRecord:
    """A run in which guaranteed requests of all phases see their first token after `wait_ms`."""
    served = [
        attempt("guaranteed-a", at_ms, at_ms + wait_ms, at_ms + 8_000)
        for at_ms in range(0, 80_000, 9_000)
    ]
    return record(
        *served,
        *more,
        samples=samples or [sample(at_ms, running=16) for at_ms in range(0, 90_000, 1_000)],
        run=run,
        duration_ms=90_000,
        slots=16,
        classes={
            "guaranteed-a": ServiceClass.GUARANTEED,
            "guaranteed-c": ServiceClass.GUARANTEED,
            "spot-b": ServiceClass.SPOT,
        },
    )


def judged(*records: RunRecord, scenarios: tuple[Scenario, ...] = PROTECTION) -> list[Judgement]:
    """The judgements of some runs."""
    return list(judge(scenarios, {one.run: one for one in records}))


@pytest.mark.parametrize(
    ("measured", "bound", "passed"),
    [
        (1.2, Bound.AT_MOST, True),
        (1.3, Bound.AT_MOST, False),
        (1.2, Bound.AT_LEAST, True),
        (1.1, Bound.AT_LEAST, False),
        (None, Bound.AT_MOST, False),
        (None, Bound.AT_LEAST, False),
    ],
)
def test_a_limit_may_be_met_exactly_and_what_is_not_measured_fails(
    measured: float | None, bound: Bound, *, passed: bool
) -> None:
    """A check cannot pass for want of anything to measure."""
    assert Check("x", measured, bound, 1.2).passed == passed


def test_a_protected_run_passes_and_one_without_fails() -> None:
    """Every phase is looked at, and the run without admission proves that it was needed."""
    late = attempt("guaranteed-c", 35_000, 44_000, 52_000)
    main, control, alone = judged(
        protected(), protected(late, run="without"), protected(run="alone")
    )
    assert [judgement.as_expected for judgement in (main, control, alone)] == [True, True, True]
    assert len(main.checks) == 7
    assert failed(control) == [
        "first token of guaranteed, P99, 30 to 60 s",
        "the same outside 1 s after an arrival, against alone",
    ]
    (proof,) = control.proofs
    assert (proof.measured, proof.limit) == (9_000, 3_000)
    assert alone.checks == ()


def test_a_control_that_passes_everything_is_wrong() -> None:
    """Checks that nothing fails are no checks."""
    _, control = judged(protected(), protected(run="without"))
    assert failed(control) == []
    assert not control.as_expected


def test_a_control_must_fail_as_badly_as_its_clients_make_it() -> None:
    """Two seconds are above the limit, yet not what 22 clients on 16 slots come to."""
    late = attempt("guaranteed-c", 35_000, 37_000, 45_000)
    _, control = judged(protected(), protected(late, run="without"))
    assert failed(control)
    assert not control.as_expected


@pytest.mark.parametrize(
    ("record_", "name"),
    [
        (
            protected(attempt("guaranteed-c", 30_000, 31_300, 39_000)),
            "first token of guaranteed, P99, 30 to 60 s",
        ),
        (
            protected(attempt("guaranteed-c", 31_001, 31_400, 39_000)),
            "the same outside 1 s after an arrival, against alone",
        ),
        (protected(shed("guaranteed-a", 5)), "guaranteed requests shed"),
        (
            protected(samples=[sample(at, running=16, queued=2 * (at == 5_000)) for at in range(0, 9_000, 1_000)]),
            "the backend's queue outside 1 s after an arrival",
        ),
        (
            protected(samples=[sample(at, running=14) for at in range(0, 9_000, 1_000)]),
            "slots in use, against without admission",
        ),
    ],
)  # fmt: skip
def test_each_broken_promise_is_found(record_: RunRecord, name: str) -> None:
    """One at a time, by its own check and no other."""
    main = judged(record_, protected(run="without"), protected(run="alone"))[0]
    assert failed(main) == [name]
    assert not main.as_expected


def test_the_instant_of_an_arrival_is_excused_only_where_a_check_says_so() -> None:
    """A queue and a slower first token within a second of it; a second later no more."""
    queue = [sample(at, running=16, queued=5 * (at == 30_500)) for at in range(0, 90_000, 500)]
    slow = attempt("guaranteed-c", 30_500, 31_200, 39_000)
    main = judged(protected(slow, samples=queue), protected(run="alone"))[0]
    assert failed(main) == []


def test_own_limits_are_no_broken_promise() -> None:
    """Who asks for more than its baseline is shed for that."""
    main = judged(protected(shed("guaranteed-a", 5, "concurrency_limit")))[0]
    assert failed(main) == []


def test_where_spot_may_wait_more_has_to_be_used() -> None:
    """Ninety in a hundred without waiting, ninety-five with."""
    scenarios = runs_named(shipped_scenarios("protection"), ["evict", "wait", "without"])
    used = [sample(at, running=15) for at in range(0, 9_000, 1_000)]
    evict, wait, _ = judged(
        protected(samples=used),
        protected(samples=used, run="wait"),
        protected(run="without"),
        scenarios=scenarios,
    )
    assert failed(evict) == []
    assert failed(wait) == ["slots in use, against without admission"]


def shared(*more: Attempt, synth_ms: int = 300, debt: float = 0.0, run: str = "with") -> RunRecord:
    """A run in which everybody is served what it can claim."""
    counts = {"copilot": (7, 4, 7, 5), "synth": (9, 4, 9, 5), "reports": (0, 0, 0, 5)}
    phases = ((0, 30_000), (30_000, 120_000), (120_000, 210_000), (210_000, 300_000))
    served = [
        attempt(name, start_ms + 10 * number, start_ms + synth_ms, end_ms)
        for name, of_phase in counts.items()
        for count, (start_ms, end_ms) in zip(of_phase, phases, strict=True)
        for number in range(count)
    ]
    quiet = [
        attempt(name, at_ms, at_ms + 300, at_ms + 400)
        for name in counts
        for at_ms in (20_000, 125_000, 150_000)
    ]
    return record(
        *served,
        *quiet,
        *more,
        samples=[
            sample(at_ms, copilot=debt, synth=debt, reports=0.0)
            for at_ms in range(0, 300_000, 1_000)
        ],
        run=run,
        duration_ms=300_000,
        slots=16,
        classes=dict.fromkeys(counts, ServiceClass.ELASTIC),
    )


def test_a_fair_run_passes_every_check() -> None:
    """All five, without any other run to compare with."""
    (main,) = judged(shared(), scenarios=FAIR_SHARE)
    assert failed(main) == []
    assert len(main.checks) == 5


@pytest.mark.parametrize(
    ("record_", "name"),
    [
        (
            shared(attempt("copilot", 40_000, 40_501, 41_000)),
            "first token of copilot, P99, outside 5 s after the loss",
        ),
        (shared(debt=0.06), "largest debt, 170 to 210 s"),
        (
            shared(attempt("reports", 121_000, 122_000, 123_000)),
            "first token, P99, 120 to 130 s, against steady",
        ),
        (
            shared(*[attempt("synth", 125_000 + at, 125_300 + at, 300_000) for at in range(20)]),
            "Jain's index of service by claim",
        ),
    ],
)
def test_each_unfairness_is_found(record_: RunRecord, name: str) -> None:
    """One at a time."""
    (main,) = judged(record_, scenarios=FAIR_SHARE)
    assert failed(main) == [name]


def test_the_seconds_after_the_loss_are_excused() -> None:
    """What the backend ran then has to end first."""
    (main,) = judged(shared(attempt("copilot", 31_000, 34_000, 40_000)), scenarios=FAIR_SHARE)
    assert failed(main) == []


def test_a_tenant_that_starves_in_the_outage_is_found() -> None:
    """Less than a quarter of its baseline."""
    fair = shared()
    starved = [
        one
        for one in fair.attempts
        if not (one.entitlement == "synth" and 30_000 <= one.sent_ms < 120_000)
    ]
    record_ = RunRecord(
        **{field: getattr(fair, field) for field in fair.__struct_fields__} | {"attempts": starved}
    )
    (main,) = judged(record_, scenarios=FAIR_SHARE)
    assert "service of synth in the outage, of its baseline" in failed(main)


def test_short_guaranteed_requests_keep_their_target_beside_long_ones() -> None:
    """In the mixed experiment, and they are not shed inside their baseline."""
    classes = {"chat": ServiceClass.GUARANTEED, "documents": ServiceClass.ELASTIC}
    good = record(attempt("chat", 0, 400, 900), run="with", classes=classes)
    slow = record(attempt("chat", 0, 600, 900), shed("chat", 1), run="without", classes=classes)
    main, control = judged(good, slow, scenarios=MIXED)
    assert (failed(main), len(failed(control))) == ([], 2)
    assert main.as_expected
    assert control.as_expected


def test_only_runs_that_are_shown_have_to_pass() -> None:
    """What is reported is measured, and says nothing of success; other scenarios have no checks."""
    bad = protected(shed("guaranteed-a", 5))
    reported = dataclasses.replace(PROTECTION[0], role=Role.REPORTED)
    (judgement,) = judged(bad, scenarios=(reported,))
    assert failed(judgement)
    assert judgement.as_expected
    unchecked = dataclasses.replace(PROTECTION[0], checks="")
    (judgement,) = judged(bad, scenarios=(unchecked,))
    assert judgement.checks == ()


def test_a_request_ended_early_is_none_that_waited() -> None:
    """An eviction before the first token is no first token, and no endless one."""
    ended = attempt("spot-b", 30_000, None, 30_100, result=Result.EVICTED)
    assert failed(judged(protected(ended))[0]) == []
