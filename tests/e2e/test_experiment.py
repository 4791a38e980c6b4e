"""The protection experiment on a real Envoy, heavily shortened, with its negative control."""

from pathlib import Path

import pytest

from envoy_tokenpools.cli import main
from envoy_tokenpools.lab.checks import judge
from envoy_tokenpools.lab.live_run import run_live
from envoy_tokenpools.lab.record import Result, read_records
from envoy_tokenpools.lab.scenario_file import runs_named, shipped_scenarios

TIME_SCALE = 0.08


async def test_protection_holds_with_admission_and_fails_without() -> None:
    """Guaranteed first tokens keep their limit while spot is ended; without admission they wait in a queue."""
    scenarios = runs_named(shipped_scenarios("protection"), ["evict", "without"])
    records = {scenario.run: await run_live(scenario.scaled(TIME_SCALE)) for scenario in scenarios}
    shown, control = judge(scenarios, records)
    # One core fewer, and a request's way through Envoy is a second of the time as written.
    latency = [check for check in shown.checks if check.unit == "ms"]
    assert len(latency) == 3
    assert [check.name for check in latency if not check.passed] == []
    assert control.as_expected
    protected, flooded = records["evict"], records["without"]
    assert not any(one.result is Result.SHED for one in protected.of("guaranteed-c"))
    assert any(one.result is Result.EVICTED for one in protected.of("spot-b"))
    assert not any(one.result is Result.FAILED for one in protected.attempts)
    assert max(one.queued or 0 for one in flooded.samples) == 6
    assert all(one.result in (Result.COMPLETED, Result.CUT) for one in flooded.attempts)


def test_the_command_writes_its_files_and_tells_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A table, a record and a picture; the exit status says whether everything was as it must be."""
    arguments = ["experiment", "fair-share", "--run", "without", "--time-scale", "0.01"]
    assert main([*arguments, "--out", str(tmp_path / "new")]) == 0
    printed = capfd.readouterr().out
    assert "Who got what" in printed
    assert "as it must" in printed
    assert read_records(tmp_path / "new" / "fair-share.json")["without"].time_scale == 0.01
    assert (tmp_path / "new" / "fair-share.png").stat().st_size > 10_000
    assert main(["experiment", "fair-share", "--run", "nobody"]) == 1
    assert "none named 'nobody'" in capfd.readouterr().err
