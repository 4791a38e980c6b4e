"""Tables of an experiment."""

import io

from rich.console import Console

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.lab.checks import Bound, Check, Judgement
from envoy_tokenpools.lab.experiment_table import report
from envoy_tokenpools.lab.record import Result
from envoy_tokenpools.lab.scenario import Role
from tests.support.records import attempt, record, sample, shed

GOOD = Check("first token", 345.6, Bound.AT_MOST, 1_200, "ms")
BAD = Check("the queue", 7, Bound.AT_MOST, 1, "sequences")
UNKNOWN = Check("slots", None, Bound.AT_LEAST, 0.9, "times")


def shown(*judgements: Judgement) -> str:
    """The report of a small run, as printed."""
    run = record(
        attempt("chat", 0, 250, 900),
        attempt("chat", 500, 1_000, 1_900, wanted_ms=0),
        shed("chat", 0),
        attempt("chat", 0, 100, 900, result=Result.EVICTED),
        samples=[sample(0, running=3)],
        run="main",
        time_scale=0.5,
        classes={"chat": ServiceClass.GUARANTEED, "idle": ServiceClass.SPOT},
    )
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(report({"main": run}, judgements))
    return console.export_text()


def test_who_got_what_is_told_in_the_time_as_written() -> None:
    """Counts by result, first tokens with and without the retries before, and the use of slots."""
    text = shown()
    row = next(line for line in text.splitlines() if "guaranteed" in line)
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells == [
        *("main", "chat", "guaranteed", "2", "1", "1", "0"),
        *("500 / 1,000", "500 / 2,000", "40", "100.0%", "75.0%"),
    ]
    idle = next(line for line in text.splitlines() if "idle" in line)
    assert [cell.strip() for cell in idle.split("│")[4:8]] == ["0", "0", "0", "0"]
    assert "What was checked" not in text


def test_each_check_has_its_value_and_its_limit() -> None:
    """With a mark; what was not measured has none and fails."""
    text = shown(Judgement("main", Role.SHOWN, (GOOD, BAD, UNKNOWN)))
    good = next(line for line in text.splitlines() if "│ first token " in line)
    assert "346 ms" in good
    assert "at most 1,200 ms" in good
    assert "✓" in good
    unknown = next(line for line in text.splitlines() if "│ slots" in line)
    assert "-" in unknown
    assert "at least 0.9 times" in unknown
    assert "✗" in unknown
    assert "✗ main keeps 1 of 3 checks: not the queue; slots" in text


def test_each_run_has_a_verdict_that_fits_its_role() -> None:
    """A control has to fail; what is only reported neither passes nor fails."""
    assert "✓ main keeps 1 of 1 checks" in shown(Judgement("main", Role.SHOWN, (GOOD,)))
    assert "✓ main fails 1 of 2 checks, as it must" in shown(
        Judgement("main", Role.CONTROL, (GOOD, BAD))
    )
    assert "✗ main is there to fail, and did not as it should" in shown(
        Judgement("main", Role.CONTROL, (GOOD,))
    )
    assert "· main keeps 0 of 1 checks; it is reported, not required" in shown(
        Judgement("main", Role.REPORTED, (BAD,))
    )
