"""Pictures of runs."""

import importlib.util
import struct
from pathlib import Path

import pytest

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.lab.plot import (
    COLUMN_INCHES,
    DPI,
    HEAD_INCHES,
    ROW_INCHES,
    PlotError,
    draw,
)
from envoy_tokenpools.lab.record import Result, RunRecord, Standing
from tests.support.records import attempt, record, sample, shed


def small_run(*, elastic: bool = True, refusals: bool = True) -> RunRecord:
    """A run in which a weight moves only where tenants are elastic."""
    refused = [shed("batch", 500), attempt("batch", 0, 100, 900, result=Result.EVICTED)]
    samples = [sample(at_ms, queued=at_ms // 1_000, chat=0.1) for at_ms in range(0, 9_000, 500)]
    if elastic:
        samples[3].standings["chat"] = Standing(1, 1, 2, 4.0, 0.5)
    return record(
        attempt("chat", 0, 250, 900),
        *(refused if refusals else []),
        samples=samples,
        classes={
            "chat": ServiceClass.ELASTIC if elastic else ServiceClass.GUARANTEED,
            "batch": ServiceClass.SPOT,
        },
    )


def size_of(path: Path) -> tuple[int, int]:
    """Width and height in the header of a PNG file."""
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


@pytest.mark.parametrize(
    ("run", "rows"),
    [
        (small_run(), 5),
        (small_run(refusals=False), 4),
        (small_run(elastic=False), 3),
        (small_run(elastic=False, refusals=False), 2),
        (record(classes={"chat": ServiceClass.GUARANTEED}), 2),
    ],
)
@pytest.mark.parametrize("columns", [1, 2])
def test_a_picture_has_a_column_per_run_and_no_empty_row(
    tmp_path: Path, run: RunRecord, rows: int, columns: int
) -> None:
    """Refusals, weights and debts have a row only where there is something to see."""
    path = tmp_path / "runs.png"
    draw(path, [run] * columns)
    width, height = size_of(path)
    assert width == round(COLUMN_INCHES * columns * DPI)
    assert height == pytest.approx((HEAD_INCHES + ROW_INCHES * rows) * DPI, abs=1)


def test_more_entitlements_than_colours_are_drawn_too(tmp_path: Path) -> None:
    """Then colours stand for classes."""
    classes = {f"tenant-{number}": ServiceClass.SPOT for number in range(20)}
    path = tmp_path / "many.png"
    draw(path, [record(attempt("tenant-19", 0, 9, 99), classes=classes)])
    assert size_of(path)[0] == round(COLUMN_INCHES * DPI)


def test_a_missing_matplotlib_is_told_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of the extra."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(PlotError, match=r"envoy-tokenpools\[demo\]"):
        draw(tmp_path / "runs.png", [small_run()])


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(PlotError, match="cannot be written"):
        draw(tmp_path / "absent" / "runs.png", [small_run()])
