"""
`envoy-tokenpools simulate`: a scenario, or a recorded traffic log, in virtual time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from envoy_tokenpools.lab.checks import judge
from envoy_tokenpools.lab.experiment import (
    chosen_scenarios,
    plain_or_terminal,
    raise_unless_as_expected,
    side_by_side,
)
from envoy_tokenpools.lab.experiment_table import report
from envoy_tokenpools.lab.plot import draw
from envoy_tokenpools.lab.record import RunRecord, write_records
from envoy_tokenpools.lab.simulation import simulate
from envoy_tokenpools.lab.sizing import Sizing, sizing_table


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """
    What to simulate, and where the files go.

    Attributes:
        scenario: a shipped one, or a YAML file.
        runs: names of its runs; all of them if empty.
        json: file for the record; None writes none.
        plot: file for the picture; None draws none.
    """

    scenario: str
    runs: Sequence[str] = ()
    json: Path | None = None
    plot: Path | None = None


def simulate_scenario(options: SimulateOptions, *, say: Callable[[str], None]) -> None:
    """
    Run it, print what it shows, and write the files.

    Raises:
        ExperimentFailedError: a run that is shown failed a check, or one without admission passed all.
        ConfigError: there is no such run.
    """
    scenarios = chosen_scenarios(options.scenario, options.runs)
    records: dict[str, RunRecord] = {}
    for scenario in scenarios:
        began = time.process_time()
        record = records[scenario.run] = simulate(scenario)
        say(
            f"{scenario.name}, {scenario.run}: {scenario.duration_ms / 1_000:g} s and "
            f"{len(record.attempts)} attempts in {time.process_time() - began:.1f} s of CPU"
        )
    judgements = judge(scenarios, records)
    plain_or_terminal().print(report(records, judgements))
    if options.json is not None:
        write_records(options.json, records, [asdict(judgement) for judgement in judgements])
    if options.plot is not None:
        draw(options.plot, side_by_side(scenarios, records))
    raise_unless_as_expected(judgements)


def show_sizing(sizing: Sizing) -> None:
    """Print who would have got what."""
    plain_or_terminal().print(sizing_table(sizing))
