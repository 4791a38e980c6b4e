"""Which runs an experiment makes, what it writes, and when it fails; the runs themselves are made by hand."""

import argparse
from collections.abc import Iterable
from pathlib import Path

import pytest

from envoy_tokenpools.cli import build_parser
from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.errors import ConfigError
from envoy_tokenpools.lab import experiment as module
from envoy_tokenpools.lab.arrivals import Arrival
from envoy_tokenpools.lab.experiment import (
    ExperimentFailedError,
    ExperimentOptions,
    experiment,
    side_by_side,
)
from envoy_tokenpools.lab.live_run import Progress
from envoy_tokenpools.lab.record import RunRecord, read_records
from envoy_tokenpools.lab.scenario import Scenario
from envoy_tokenpools.lab.scenario_file import shipped_scenarios
from tests.support.records import attempt, record
from tests.support.shared_redis import shared_server

CLASSES = {
    "chat": ServiceClass.GUARANTEED,
    "documents": ServiceClass.ELASTIC,
    "batch": ServiceClass.SPOT,
}


class Runs:
    """Stands for real runs: guaranteed first tokens take as long as is said for each."""

    def __init__(self, **first_token_ms: int) -> None:
        self.asked: list[Scenario] = []
        self.traces: list[list[Arrival] | None] = []
        self.backends: list[str | None] = []
        self.replica_counts: list[int] = []
        self._first_token_ms = first_token_ms

    async def __call__(
        self,
        scenario: Scenario,
        *,
        backend_url: str | None = None,
        trace: Iterable[Arrival] | None = None,
        replica_count: int = 1,
        progress: Progress | None = None,
    ) -> RunRecord:
        """Note what was asked for."""
        self.asked.append(scenario)
        self.backends.append(backend_url)
        self.replica_counts.append(replica_count)
        self.traces.append(None if trace is None else list(trace))
        if progress is not None:
            progress(1.0)
        waited_ms = self._first_token_ms[scenario.run]
        return record(attempt("chat", 0, waited_ms, 9_000), run=scenario.run, classes=CLASSES)


def stand_in(monkeypatch: pytest.MonkeyPatch, **first_token_ms: int) -> Runs:
    """Puts made-up runs in the place of real ones."""
    runs = Runs(**first_token_ms)
    monkeypatch.setattr(module, "run_live", runs)
    return runs


async def test_all_runs_are_made_and_their_files_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, shortened, with a line for each run and each file."""
    runs = stand_in(monkeypatch, **{"with": 100, "without": 9_000})
    said: list[str] = []
    options = ExperimentOptions("mixed", time_scale=0.5, out=tmp_path / "a" / "b")
    await experiment(options, say=said.append)
    assert [scenario.run for scenario in runs.asked] == ["with", "without"]
    assert {scenario.time_scale for scenario in runs.asked} == {0.5}
    assert runs.traces == [None, None]
    assert set(read_records(tmp_path / "a" / "b" / "mixed.json")) == {"with", "without"}
    assert (tmp_path / "a" / "b" / "mixed.png").exists()
    assert said[0].startswith("1 of 2: mixed, with (60 s). ")
    assert len(said) == 4


@pytest.mark.parametrize(
    ("with_ms", "without_ms", "named"),
    [(600, 9_000, "with"), (100, 100, "without"), (600, 100, "with, without")],
)
async def test_a_broken_promise_and_a_control_that_holds_are_failures(
    monkeypatch: pytest.MonkeyPatch, with_ms: int, without_ms: int, named: str
) -> None:
    """The error names the runs."""
    stand_in(monkeypatch, **{"with": with_ms, "without": without_ms})
    with pytest.raises(ExperimentFailedError, match=f"not as it must be: {named}$"):
        await experiment(ExperimentOptions("mixed"), say=lambda _: None)


async def test_another_backend_with_its_model_speed_and_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients ask for its model, the pool has its rate, open loops send what was recorded."""
    runs = stand_in(monkeypatch, **{"with": 100})
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"time": 2, "entitlement": "chat", "prompt_tokens": 5, "output_tokens": 6}\n', "utf-8"
    )
    options = ExperimentOptions(
        "mixed",
        runs=("with",),
        time_scale=0.5,
        backend_url="http://127.0.0.1:1",
        model="tiny",
        tokens_per_second=9_600,
        trace=trace,
    )
    await experiment(options, say=lambda _: None)
    (asked,) = runs.asked
    written = shipped_scenarios("mixed")[0]
    assert asked.model == "tiny"
    assert asked.pool.capacity.tokens_per_second == 20 * written.pool.capacity.tokens_per_second
    assert runs.backends == ["http://127.0.0.1:1"]
    assert [[one.at_ms for one in arrivals or []] for arrivals in runs.traces] == [[1_000]]


async def test_an_experiment_keeps_the_books_of_each_run_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the server that was named, for so many replicas; no run finds the debts of another."""
    runs = stand_in(monkeypatch, **{"with": 100, "without": 9_000})
    said: list[str] = []
    options = ExperimentOptions("mixed", replicas=3, state=shared_server())
    await experiment(options, say=said.append)
    assert runs.replica_counts == [3, 3]
    states = [scenario.config.state for scenario in runs.asked]
    assert all(state.startswith(shared_server()) for state in states)
    assert len(set(states)) == 2
    assert said[0].startswith("1 of 2: mixed, with (120 s, 3 replicas). ")


async def test_a_scenario_may_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything that is no name of a shipped one; a missing file is a fault."""
    runs = stand_in(monkeypatch, own=100)
    own = tmp_path / "own.yaml"
    own.write_text(
        """
name: mine
duration: 1s
engine: {slots: 4, tokens_per_second: 100, prefill_tokens_per_second: 1000}
pool:
  name: tiny
  models: [tiny]
  capacity: {tokens_per_second: 1k, kv_cache: 1GiB, concurrency: 4}
  kv_bytes_per_token: 1KiB
  entitlements: [{name: chat, class: spot}]
loads: [{entitlement: chat, clients: 1, prompt: 1, output: 1}]
runs: [{name: own}]
""",
        "utf-8",
    )
    await experiment(ExperimentOptions(str(own)), say=lambda _: None)
    assert [scenario.name for scenario in runs.asked] == ["mine"]
    with pytest.raises(ConfigError, match="cannot be read"):
        await experiment(ExperimentOptions("nothing"), say=lambda _: None)


def test_a_picture_shows_the_main_run_beside_the_one_without_admission() -> None:
    """Of those that were made; one alone where there is no other."""
    scenarios = shipped_scenarios("protection")

    def shown(*runs: str) -> list[str]:
        records = {run: record(run=run) for run in runs}
        return [one.run for one in side_by_side(scenarios, records)]

    assert shown("crowd", "without", "throttle", "evict", "alone") == ["evict", "without"]
    assert shown("headroom", "crowd") == ["headroom", "crowd"]
    assert shown("without") == ["without"]
    assert shown("alone") == ["alone"]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--time-scale", "0"],
        ["--time-scale", "fast"],
        ["--tokens-per-second", "-1"],
        ["--tokens-per-second", "1.5"],
    ],
)
def test_numbers_on_the_command_line_are_checked(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the option's name in the message."""
    with pytest.raises(SystemExit):
        build_parser().parse_args(["experiment", "mixed", *wrong])
    assert f"argument {wrong[0]}" in capsys.readouterr().err


def test_the_command_line_becomes_options() -> None:
    """Runs may be named several times."""
    arguments = build_parser().parse_args(
        ["experiment", "mixed", "--run", "a", "--run", "b", "--time-scale", "0.2"]
    )
    assert isinstance(arguments, argparse.Namespace)
    assert (arguments.scenario, arguments.run_named, arguments.time_scale) == (
        "mixed",
        ["a", "b"],
        0.2,
    )
