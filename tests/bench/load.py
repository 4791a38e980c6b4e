"""
Load generators: wrk where it is installed, else one in Python. Both keep a number of connections busy for a while.
"""

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.bench.traffic import API_KEY, PATH, STREAM_PATH, request_body

_GRACE_S = 20.0
"""How long a generator may take beyond the seconds that it was given."""

_WRK_SCRIPT = """
wrk.method = "POST"
wrk.body = [==[{body}]==]
wrk.headers["content-type"] = "application/json"
wrk.headers["authorization"] = "Bearer {key}"
done = function(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '\\nJSON {{"requests": %d, "seconds": %f, "failures": %d, "p50_us": %f, "p99_us": %f}}\\n',
    summary.requests, summary.duration / 1e6,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout,
    latency:percentile(50), latency:percentile(99)))
end
"""


@dataclass(frozen=True, slots=True)
class Load:
    """
    What a generator saw.

    Attributes:
        requests: answered.
        seconds: that it ran.
        failures: errors and answers other than 2xx; any of them makes the figures worthless.
        p50_us: median time of a request, microseconds.
        p99_us: 99th percentile.
    """

    requests: int
    seconds: float
    failures: int
    p50_us: float
    p99_us: float


class Generator(Protocol):
    """Runs one load to its end."""

    name: str

    async def run(self, port: int, *, connections: int, seconds: float, stream: bool) -> Load:
        """
        Send requests on `connections` connections, one after the other on each.

        Raises:
            RuntimeError: the generator failed, or a request did.
        """
        ...


class Wrk:
    """wrk with one thread; `script_folder` must outlive it."""

    name = "wrk"

    def __init__(self, program: str, script_folder: Path) -> None:
        self._program = program
        self._scripts = {}
        for stream in (False, True):
            script = script_folder / f"request_{stream}.lua"
            body = request_body(stream=stream).decode()
            script.write_text(_WRK_SCRIPT.format(body=body, key=API_KEY), "utf-8")
            self._scripts[stream] = script

    async def run(self, port: int, *, connections: int, seconds: float, stream: bool) -> Load:
        """See `Generator.run`; wrk takes whole seconds."""
        url = f"http://127.0.0.1:{port}{STREAM_PATH if stream else PATH}"
        return await _run(
            *(self._program, "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s"),
            *("-s", str(self._scripts[stream]), url),
            seconds=seconds,
        )


class PythonGenerator:
    """Ours, for machines without wrk: always there, but it takes more of the core that Envoy needs."""

    name = "the Python generator"

    async def run(self, port: int, *, connections: int, seconds: float, stream: bool) -> Load:
        """See `Generator.run`."""
        return await _run(
            *(sys.executable, "-m", "tests.bench.python_load"),
            *(str(port), STREAM_PATH if stream else PATH, str(connections), str(seconds)),
            seconds=seconds,
        )


@contextlib.contextmanager
def generator(*, prefer_python: bool) -> Iterator[Generator]:
    """The best generator there is."""
    program = None if prefer_python else shutil.which("wrk")
    if program is None:
        if not prefer_python:
            print("wrk is not installed (apt-get install wrk): a slower generator takes its place")
        yield PythonGenerator()
        return
    with tempfile.TemporaryDirectory(prefix="tokenpools-bench-") as folder:
        yield Wrk(program, Path(folder))


async def _run(*command: str, seconds: float) -> Load:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(seconds + _GRACE_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    for line in output.decode().splitlines():
        if line.startswith("JSON "):
            load = Load(**json.loads(line.removeprefix("JSON ")))
            if load.failures or not load.requests:
                raise RuntimeError(f"{load.failures} failed requests: {load}")
            return load
    raise RuntimeError(f"{command[0]} ended with status {process.returncode}:\n{output.decode()}")
