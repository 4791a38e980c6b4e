"""
Runs as a picture: one column per run, one row per quantity, over the time as written.

The only file that needs matplotlib, which is an optional dependency: it is imported when a picture is drawn.
"""

import importlib.util
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.errors import TokenpoolsError
from envoy_tokenpools.lab.record import Result, RunRecord, Standing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 120
COLUMN_INCHES = 5.4
ROW_INCHES = 1.55
HEAD_INCHES = 0.95
TITLE_CHARACTERS = 68

WORTH_SEEING = 1.5
"""A weight that changes by less than this factor is not shown: it moves for nobody to see."""

# Okabe and Ito's, told apart by every kind of colour vision; yellow is too pale for lines.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_INK = "#24292f"
_FAINT = "#8c959f"
# A paper of its own, so that it reads the same on a light page and on a dark one.
_PAPER = "#ffffff"


class PlotError(TokenpoolsError):
    """A picture cannot be drawn."""


def draw(path: Path, records: Sequence[RunRecord]) -> None:
    """
    Draw runs side by side into a PNG file.

    Args:
        path: the file; overwritten.
        records: of one experiment, at least one.

    Raises:
        PlotError: matplotlib is not installed, or the file cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("pictures need matplotlib: pip install 'envoy-tokenpools[demo]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = _rows(records)
    height = HEAD_INCHES + ROW_INCHES * len(rows)
    figure = Figure(figsize=(COLUMN_INCHES * len(records), height), dpi=DPI, facecolor=_PAPER)
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), len(records), sharex=True, sharey="row", squeeze=False)
    for row, (title, paint) in enumerate(rows):
        for column, record in enumerate(records):
            axes = grid[row][column]
            _plain(axes)
            paint(axes, record)
            axes.set_xlim(0, record.duration_ms / record.time_scale / 1_000)
        grid[row][0].set_ylabel(title, color=_INK, fontsize=8)
        if paint in (_in_flight, _shed):
            grid[row][0].set_ylim(bottom=0)
    for column, record in enumerate(records):
        title = textwrap.fill(record.about, TITLE_CHARACTERS)
        grid[0][column].set_title(title, color=_INK, fontsize=9, loc="left")
        grid[-1][column].set_xlabel("seconds", color=_INK, fontsize=8)
    _legend(figure, records[0], height)
    figure.align_ylabels()
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.32 / height), h_pad=0.6)
    try:
        figure.savefig(path, facecolor=_PAPER)
    except OSError as error:
        raise PlotError(f"{path} cannot be written: {error.strerror}") from error


_Painter = Callable[["Axes", RunRecord], None]


def _rows(records: Sequence[RunRecord]) -> list[tuple[str, _Painter]]:
    """What there is to see: no row is empty in all columns."""
    rows: list[tuple[str, _Painter]] = [
        ("first token, s", _first_tokens),
        ("sequences", _in_flight),
    ]
    refused = (Result.SHED, Result.EVICTED)
    if any(attempt.result in refused for one in records for attempt in one.attempts):
        rows.append(("shed per s", _shed))
    if any(_moves(record, name) for record in records for name in record.parties):
        rows.append(("weight", _weights))
    classes = {party.service_class for one in records for party in one.parties.values()}
    if ServiceClass.ELASTIC in classes:
        rows.append(("debt", _debts))
    return rows


def _moves(record: RunRecord, name: str) -> bool:
    """Whether an entitlement's weight changes so much that it can be seen."""
    weights = _standings(record, name, lambda standing: standing.weight)
    return bool(weights) and max(weights) > WORTH_SEEING * min(weights)


def _first_tokens(axes: "Axes", record: RunRecord) -> None:
    """A dot per answer, at the time when it was asked for."""
    for colour, name in _coloured(record):
        seen = [
            (attempt.sent_ms, wait_ms)
            for attempt in record.of(name)
            if (wait_ms := attempt.first_token_wait_ms) is not None
        ]
        axes.scatter(
            [_seconds(record, sent_ms) for sent_ms, _ in seen],
            [_seconds(record, wait_ms) for _, wait_ms in seen],
            s=9,
            color=colour,
            alpha=0.7,
            linewidths=0,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")


def _in_flight(axes: "Axes", record: RunRecord) -> None:
    """Who holds how much of what is usable, and what waits inside the backend all the same."""
    times = _times(record)
    below = [0.0] * len(times)
    for colour, name in _coloured(record):
        held = _standings(record, name, lambda standing: standing.in_flight)
        above = [low + more for low, more in zip(below, held, strict=True)]
        axes.fill_between(times, below, above, step="post", color=colour, alpha=0.75, linewidth=0)
        below = above
    usable = [float(sample.usable) for sample in record.samples]
    axes.step(times, usable, where="post", color=_INK, linewidth=1.1)
    queued = [float(sample.queued or 0) for sample in record.samples]
    if any(queued):
        axes.step(times, queued, where="post", color=_INK, linewidth=0.9, linestyle=":")


def _shed(axes: "Axes", record: RunRecord) -> None:
    """Refusals in each second, evictions hatched on top."""
    seconds = range(int(_seconds(record, record.duration_ms)) + 1)
    below = [0.0] * len(seconds)
    for colour, name in _coloured(record):
        for result, hatch in ((Result.SHED, ""), (Result.EVICTED, "////")):
            counts = Counter(
                int(_seconds(record, attempt.ended_ms))
                for attempt in record.of(name)
                if attempt.result is result
            )
            heights = [float(counts[second]) for second in seconds]
            if not any(heights):
                continue
            axes.bar(
                seconds,
                heights,
                width=1.0,
                align="edge",
                bottom=below,
                color=_PAPER if hatch else colour,
                edgecolor=colour if hatch else "none",
                hatch=hatch,
                linewidth=0.5 if hatch else 0,
            )
            below = [low + more for low, more in zip(below, heights, strict=True)]


def _weights(axes: "Axes", record: RunRecord) -> None:
    values = _lines(axes, record, lambda standing: standing.weight)
    if values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")


def _debts(axes: "Axes", record: RunRecord) -> None:
    """Only elastic entitlements have one."""
    axes.axhline(0, color=_FAINT, linewidth=0.6)
    _lines(axes, record, lambda standing: standing.debt, {ServiceClass.ELASTIC})


def _lines(
    axes: "Axes",
    record: RunRecord,
    of: Callable[[Standing], float],
    classes: Collection[ServiceClass] = tuple(ServiceClass),
) -> list[float]:
    """A line per entitlement of the classes; all that it shows."""
    shown: list[float] = []
    for colour, name in _coloured(record):
        if record.parties[name].service_class not in classes:
            continue
        values = _standings(record, name, of)
        axes.step(_times(record), values, where="post", color=colour, linewidth=1.2)
        shown += values
    return shown


def _plain(axes: "Axes") -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=7, length=2.5)
    axes.tick_params(axis="y", labelleft=True)


def _legend(figure: "Figure", record: RunRecord, height: float) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    handles: list[Patch | Line2D] = [
        Patch(color=colour, label=label) for colour, label in _labels(record).items()
    ]
    handles += [
        Patch(facecolor=_PAPER, edgecolor=_INK, hatch="////", linewidth=0.5, label="evicted"),
        Line2D([], [], color=_INK, linewidth=1.1, label="usable"),
        Line2D([], [], color=_INK, linewidth=0.9, linestyle=":", label="queue in the backend"),
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.02, 1 - 0.05 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        labelcolor=_INK,
        handlelength=1.4,
        columnspacing=1.4,
    )


def _coloured(record: RunRecord) -> list[tuple[str, str]]:
    """Entitlements with a colour each, or where there are more than colours, with one per class."""
    if len(record.parties) <= len(_COLOURS):
        return list(zip(_COLOURS, record.parties, strict=False))
    classes = dict(zip(ServiceClass, _COLOURS, strict=False))
    return [(classes[party.service_class], name) for name, party in record.parties.items()]


def _labels(record: RunRecord) -> dict[str, str]:
    """What each colour stands for."""
    by_class = len(record.parties) > len(_COLOURS)
    labels: dict[str, str] = {}
    for colour, name in _coloured(record):
        service_class = record.parties[name].service_class.value
        labels[colour] = service_class if by_class else f"{name} ({service_class})"
    return labels


def _times(record: RunRecord) -> list[float]:
    return [_seconds(record, sample.at_ms) for sample in record.samples]


def _seconds(record: RunRecord, at_ms: float) -> float:
    return at_ms / record.time_scale / 1_000


def _standings(record: RunRecord, name: str, of: Callable[[Standing], float]) -> list[float]:
    nothing = Standing()
    return [float(of(sample.standings.get(name, nothing))) for sample in record.samples]
