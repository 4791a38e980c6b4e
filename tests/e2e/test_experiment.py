"""The protection experiment on a real Envoy, heavily shortened, with its negative control."""

import asyncio
import statistics
from pathlib import Path

import pytest

from envoy_tokenpools.cli import main
from envoy_tokenpools.lab.checks import judge
from envoy_tokenpools.lab.live_run import run_live
from envoy_tokenpools.lab.record import Result, RunRecord, read_records
from envoy_tokenpools.lab.scenario_file import runs_named, shipped_scenarios
from envoy_tokenpools.lab.simulation import simulate

TIME_SCALE = 0.08
AGREEMENT_SCALE = 0.1
FLOOD = "first token of guaranteed, P99, 30 to 60 s"


async def test_protection_holds_with_admission_and_fails_without() -> None:
    """Spot is ended and guaranteed first tokens come; without admission they wait in the backend's queue."""
    scenarios = runs_named(shipped_scenarios("protection"), ["evict", "without"])
    records = {scenario.run: await run_live(scenario.scaled(TIME_SCALE)) for scenario in scenarios}
    shown, control = judge(scenarios, records)
    protected, flooded = records["evict"], records["without"]
    # The limits themselves are for a run as long as written: here the way through Envoy weighs twelvefold.
    waits_ms = [check.measured for check in (*shown.checks, *control.checks) if check.name == FLOOD]
    assert None not in waits_ms
    protected_ms, flooded_ms = (wait_ms or 0 for wait_ms in waits_ms)
    assert protected_ms < flooded_ms / 3
    assert control.as_expected
    assert not any(one.result is Result.SHED for one in protected.of("guaranteed-c"))
    assert any(one.result is Result.EVICTED for one in protected.of("spot-b"))
    assert not any(one.result is Result.FAILED for one in protected.attempts)
    assert max(one.queued or 0 for one in flooded.samples) == 6
    assert all(one.result in (Result.COMPLETED, Result.CUT) for one in flooded.attempts)


def shed_share(record: RunRecord) -> float:
    """Of all attempts."""
    return sum(one.result is Result.SHED for one in record.attempts) / len(record.attempts)


def median_wait_ms(record: RunRecord, entitlement: str) -> float:
    """
    To the first token of the attempts that were admitted, in the time as written.

    From the first attempt it would jump with the seed: between requests that were served at once and those that came
    back.
    """
    waits = [
        one.first_token_wait_ms / record.time_scale
        for one in record.of(entitlement)
        if one.first_token_wait_ms is not None
    ]
    return statistics.median(waits)


async def test_the_simulator_and_a_real_envoy_agree() -> None:
    """The same scenario: shed shares within a tenth, as much served within a tenth, waits of the same order."""
    (scenario,) = runs_named(shipped_scenarios("fair-share"), ["with"])
    shortened = scenario.scaled(AGREEMENT_SCALE)
    real = await run_live(shortened)
    simulated = await asyncio.to_thread(simulate, shortened)
    served = {}
    for record in (real, simulated):
        served[record is real] = sum(one.result is Result.COMPLETED for one in record.attempts)
    assert served[True] == pytest.approx(served[False], rel=0.1)
    assert shed_share(real) == pytest.approx(shed_share(simulated), abs=0.1)
    for entitlement in scenario.pool.entitlements:
        waits = [median_wait_ms(record, entitlement) for record in (real, simulated)]
        assert 1 / 3 < waits[0] / waits[1] < 3, entitlement


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
