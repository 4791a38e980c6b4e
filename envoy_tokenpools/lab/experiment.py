"""
`envoy-tokenpools experiment`: the runs of one experiment on a real Envoy, what they show, and files of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from envoy_tokenpools.config import EMBEDDED
from envoy_tokenpools.errors import TokenpoolsError
from envoy_tokenpools.lab.arrivals import traced_arrivals
from envoy_tokenpools.lab.books import check_books, own_books
from envoy_tokenpools.lab.checks import Judgement, judge
from envoy_tokenpools.lab.experiment_table import report
from envoy_tokenpools.lab.live_run import run_live
from envoy_tokenpools.lab.plot import draw
from envoy_tokenpools.lab.record import RunRecord, write_records
from envoy_tokenpools.lab.scenario import Role, Scenario
from envoy_tokenpools.lab.scenario_file import read_scenarios, runs_named, shipped_scenarios

SHIPPED = ("protection", "fair-share", "mixed", "day")

PLAIN_WIDTH = 150
"""Columns where the output goes to a file or pipe, which has no width of its own."""


class ExperimentFailedError(TokenpoolsError):
    """A run did not show what it must."""


@dataclass(frozen=True, slots=True)
class ExperimentOptions:
    """
    What to run, and where the files go.

    Attributes:
        scenario: one of `SHIPPED`, or a YAML file.
        runs: names of its runs; all of them if empty.
        time_scale: how much shorter than written (see `Scenario.scaled`).
        backend_url: a server that exists; None is the simulated one.
        model: the model to ask it for; the scenario's if None.
        tokens_per_second: that the backend generates in all; the scenario's if None.
        trace: JSON lines that the open loops send (see `arrivals`); drawn from the scenario if None.
        out: directory of the JSON and PNG files; None writes none.
        replicas: of the filter; several share their books.
        state: URL of the server that keeps the books; each run has books of its own there.
    """

    scenario: str
    runs: Sequence[str] = ()
    time_scale: float = 1.0
    backend_url: str | None = None
    model: str | None = None
    tokens_per_second: int | None = None
    trace: Path | None = None
    out: Path | None = None
    replicas: int = 1
    state: str = EMBEDDED


async def experiment(options: ExperimentOptions, *, say: Callable[[str], None]) -> None:
    """
    Run it, print what it shows, and write the files.

    Args:
        options: what to run.
        say: prints a line.

    Raises:
        ExperimentFailedError: a run that is shown failed a check, or one without admission passed all.
        ConfigError: there is no such run, or so many replicas cannot keep their books there.
        EnvoyError: there is no Envoy.
        StoreError: the books cannot be reached.
    """
    check_books(options.state, options.replicas)
    scenarios = _scenarios(options)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    console = plain_or_terminal()
    records = await _run_all(scenarios, options, console, say)
    judgements = judge(scenarios, records)
    console.print(report(records, judgements))
    if options.out is not None:
        for path in _write(options.out, scenarios, records, judgements):
            say(f"written: {path}")
    raise_unless_as_expected(judgements)


def chosen_scenarios(name: str, runs: Sequence[str]) -> tuple[Scenario, ...]:
    """
    Runs of a scenario that is shipped, or in a file.

    Raises:
        ConfigError: there is none, or it has faults.
    """
    every = shipped_scenarios(name) if name in SHIPPED else read_scenarios(Path(name))
    return runs_named(every, runs)


def plain_or_terminal() -> Console:
    """A console that is wide enough where the output goes to a file or pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def raise_unless_as_expected(judgements: Sequence[Judgement]) -> None:
    """
    Pass on what was found.

    Raises:
        ExperimentFailedError: a run that is shown failed a check, or one without admission passed all.
    """
    wrong = [judgement.run for judgement in judgements if not judgement.as_expected]
    if wrong:
        raise ExperimentFailedError(f"not as it must be: {', '.join(wrong)}")


def _scenarios(options: ExperimentOptions) -> tuple[Scenario, ...]:
    chosen = chosen_scenarios(options.scenario, options.runs)
    if options.model is not None:
        chosen = tuple(scenario.asking_for(options.model) for scenario in chosen)
    if options.tokens_per_second is not None:
        chosen = tuple(scenario.at_speed(options.tokens_per_second) for scenario in chosen)
    return chosen


async def _run_all(
    scenarios: Sequence[Scenario],
    options: ExperimentOptions,
    console: Console,
    say: Callable[[str], None],
) -> dict[str, RunRecord]:
    records: dict[str, RunRecord] = {}
    lines = [] if options.trace is None else options.trace.read_text("utf-8").splitlines()
    for number, scenario in enumerate(scenarios, 1):
        shortened = scenario.scaled(options.time_scale)
        total_s = shortened.duration_ms / 1_000
        several = f", {options.replicas} replicas" if options.replicas > 1 else ""
        say(
            f"{number} of {len(scenarios)}: {scenario.name}, {scenario.run} ({total_s:g} s{several}). "
            f"{scenario.about}"
        )
        with console.status("") as status:

            def progress(at_ms: float, total_s: float = total_s) -> None:
                status.update(f"{at_ms / 1_000:.0f} of {total_s:g} s")

            async with own_books(options.state, scenario.pool.name) as state:
                records[scenario.run] = await run_live(
                    shortened.keeping_books_at(state),
                    backend_url=options.backend_url,
                    trace=None if options.trace is None else traced_arrivals(shortened, lines),
                    replica_count=options.replicas,
                    progress=progress,
                )
    return records


def _write(
    out: Path,
    scenarios: Sequence[Scenario],
    records: Mapping[str, RunRecord],
    judgements: Sequence[Judgement],
) -> list[Path]:
    name = scenarios[0].name
    as_json, picture = out / f"{name}.json", out / f"{name}.png"
    write_records(as_json, records, [asdict(judgement) for judgement in judgements])
    draw(picture, side_by_side(scenarios, records))
    return [as_json, picture]


def side_by_side(
    scenarios: Sequence[Scenario], records: Mapping[str, RunRecord]
) -> list[RunRecord]:
    """The runs for a picture: the first of what is shown beside the first without admission."""
    shown: list[RunRecord] = []
    for roles in ((Role.SHOWN, Role.REPORTED), (Role.CONTROL,)):
        of_role = [one.run for one in scenarios if one.role in roles and one.run in records]
        shown += [records[run] for run in of_role[:1]]
    return shown or list(records.values())[:1]
