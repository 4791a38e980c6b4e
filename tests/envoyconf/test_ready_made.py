"""The files in `envoy/` are what the code builds, and Envoy accepts them."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from envoy_tokenpools.envoyconf.bootstrap import build_bootstrap
from envoy_tokenpools.envoyconf.locate import find_envoy
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from envoy_tokenpools.envoyconf.ready_made import ready_made, write_ready_made
from envoy_tokenpools.envoyconf.render import render_yaml, to_plain

FOLDER = Path(__file__).parents[2] / "envoy"


def _validate(configuration: Path) -> None:
    """Fail with Envoy's own words unless it accepts the bootstrap."""
    arguments = ["--mode", "validate", "-l", "error", "-c", str(configuration)]
    command = [str(find_envoy()), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def _embedded(document: Mapping[str, Any]) -> dict[str, Any]:
    """A bootstrap to which an EnvoyFilter was applied as Istio would."""
    whole: dict[str, Any] = to_plain(
        build_bootstrap(EnvoyOptions(backend_url="http://127.0.0.1:80"))
    )
    resources = whole["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    values = {each["applyTo"]: each["patch"]["value"] for each in document["spec"]["configPatches"]}
    resources["clusters"][1] = values["CLUSTER"]
    resources["listeners"][0].update(values["LISTENER"])
    manager["http_filters"][0] = values["HTTP_FILTER"]
    manager.update(values["NETWORK_FILTER"]["typed_config"])
    return whole


def test_the_folder_holds_what_the_code_builds() -> None:
    """After a change, `write_ready_made(Path("envoy"))` writes the files anew."""
    built = ready_made()
    assert {path.name for path in FOLDER.glob("*.yaml")} >= set(built)
    for name, text in built.items():
        assert (FOLDER / name).read_text("utf-8") == text, name


def test_writing_gives_every_file(tmp_path: Path) -> None:
    """The files are written under their names."""
    write_ready_made(tmp_path)
    assert {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()} == ready_made()


def test_no_package_hides_the_envoy_wheel() -> None:
    """The wheel's Python package is named `envoy`, as the folder is."""
    assert not (FOLDER / "__init__.py").exists()


def test_envoy_accepts_the_portable_bootstrap() -> None:
    """The file works as it is."""
    _validate(FOLDER / "portable.yaml")


@pytest.mark.parametrize(
    "options",
    [
        EnvoyOptions(backend_url="https://vllm.example.com", access_log=True, admin_host=None),
        EnvoyOptions(backend_url="https://10.0.0.7:8443", listen_host="::", max_body_bytes=1 << 30),
        EnvoyOptions(
            backend_url="http://localhost:8000",
            ext_proc_unix_path="/run/x.sock",
            keep_content_length=False,
            forwarded_headers=("x-team",),
            message_timeout_ms=250,
            drain_timeout_ms=0,
        ),
        EnvoyOptions(backend_url="http://localhost:8000", workers=128),
        EnvoyOptions(backend_url="http://10.0.0.7:80", workers=2, ext_proc_unix_path="/run/x.sock"),
    ],
    ids=["tls-name", "tls-address", "plain", "workers", "workers-on-sockets"],
)
def test_envoy_accepts_every_kind_of_bootstrap(options: EnvoyOptions, tmp_path: Path) -> None:
    """Whatever the options, the real Envoy takes the result."""
    path = tmp_path / "bootstrap.yaml"
    path.write_text(render_yaml(to_plain(build_bootstrap(options))), "utf-8")
    _validate(path)


def test_envoy_accepts_what_istio_would_apply(tmp_path: Path) -> None:
    """Filter, cluster and settings of the EnvoyFilter are valid in a bootstrap."""
    document = yaml.safe_load((FOLDER / "istio-envoyfilter.yaml").read_text("utf-8"))
    path = tmp_path / "bootstrap.yaml"
    path.write_text(render_yaml(_embedded(document)), "utf-8")
    _validate(path)
