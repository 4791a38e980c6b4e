"""
The house rules, checked by the tools that know them: import order, lint, format and types.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "command",
    [("lint-imports",), ("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)],
    ids=" ".join,
)
def test_the_house_rules_hold(command: tuple[str, ...]) -> None:
    """Each tool finds nothing."""
    result = subprocess.run(
        [BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
