"""The table of README.md names every case, and tests that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ON_THE_WIRE = (
    "e2e/test_cases_on_the_wire.py",
    "e2e/test_endings_on_the_wire.py",
    "e2e/test_other_envoys.py",
)

UNNUMBERED = frozenset((5, 10, 14, 20, 23, 24, 29, 31, 33, 35, 38, 40, 43, 46, 49, 53, 56, 58))
CASES = frozenset(range(1, 60)) - UNNUMBERED

WAITING = {"39(c)", "48 (Redis part)", "50", "51", "52", "54"}
"""What only a shared store can have."""

WIRED = frozenset((9, 11, 12, 13, 26, 27, 28, 37, 41, 42, 44, 45, 47, 55, 57))
"""Cases that a real Envoy must have a part in."""


def rows() -> tuple[dict[int, tuple[set[str], set[str]]], set[str]]:
    """By case its tests with messages and on the wire; and what waits."""
    proved: dict[int, tuple[set[str], set[str]]] = {}
    waiting = set()
    for line in (TESTS / "cases" / "README.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].isdigit():
            messages, wire = (set(re.findall(r"`([^`]+)`", cell)) for cell in cells[2:])
            proved[int(cells[0])] = messages, wire
        elif len(cells) == 2 and cells[0][:1].isdigit():
            waiting.add(cells[0])
    return proved, waiting


def definitions(file: Path) -> Iterator[tuple[str, str]]:
    """Name and docstring of each top-level function and class."""
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, " ".join((ast.get_docstring(node) or "").split())


def test_every_case_is_proved_or_waits_for_the_shared_store() -> None:
    """Nothing is left out, and nothing else waits."""
    proved, waiting = rows()
    assert waiting == WAITING
    assert set(proved) | {int(case) for case in waiting if case.isdigit()} == CASES
    assert all(messages for messages, _ in proved.values())
    assert not [case for case in WIRED if not proved[case][1]]
    assert all(
        name.startswith(("e2e/", "envoyconf/")) for _, wire in proved.values() for name in wire
    )


def test_every_test_of_the_table_exists() -> None:
    """Under its name, in its file."""
    proved, _ = rows()
    named = set().union(*(messages | wire for messages, wire in proved.values()))
    missing = []
    for entry in sorted(named):
        file, _, name = entry.partition("::")
        path = TESTS / file
        if not path.is_file() or name not in dict(definitions(path)):
            missing.append(entry)
    assert missing == []


def test_every_test_of_a_case_says_which_and_is_in_the_table() -> None:
    """Its docstring begins with the number of the case."""
    proved, _ = rows()
    files = [*(TESTS / "cases").glob("test_*.py"), *(TESTS / name for name in ON_THE_WIRE)]
    lost = []
    for file in sorted(files):
        if file == Path(__file__):
            continue
        for name, docstring in definitions(file):
            if not name.startswith("test_"):
                continue
            number = re.match(r"Case (\d+): \S", docstring)
            entry = f"{file.relative_to(TESTS).as_posix()}::{name}"
            messages, wire = proved[int(number[1])] if number else (set(), set())
            if entry not in messages | wire:
                lost.append(entry)
    assert lost == []
