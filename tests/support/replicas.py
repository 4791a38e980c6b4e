"""
Replicas of the filter: processes of their own that share their books, all behind one real Envoy.
"""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

from envoy_tokenpools.envoyconf.child import EnvoyChild
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from tests.support.ports import neighbouring_ports
from tests.support.processes import Command, command
from tests.support.separate import Separate

PATIENCE_MS = 60_000
"""How long Envoy waits for an answer: thousands of requests at once take a small machine many seconds."""

START_WITHIN_S = 90.0
"""Each takes seconds of a core to start, and they start together."""


class Replicas:
    """
    What runs.

    Attributes:
        running: the replicas, in the order of their ports.
    """

    def __init__(self, stack: contextlib.AsyncExitStack, file: Path, first_port: int) -> None:
        self.running: list[Separate] = []
        self._stack = stack
        self._file = file
        self._first_port = first_port
        self._envoy_port = 0

    @property
    def port(self) -> int:
        """Where Envoy listens."""
        return self._envoy_port

    async def start(self, count: int, backend_url: str) -> None:
        """All at once, then Envoy."""
        commands = [await self._command(number) for number in range(count)]
        options = EnvoyOptions(
            backend_url=backend_url,
            listen_host="127.0.0.1",
            listen_port=0,
            admin_port=0,
            ext_proc_port=self._first_port,
            workers=count,
            message_timeout_ms=PATIENCE_MS,
        )
        lines = [await _serving(each) for each in commands]
        envoy = await self._stack.enter_async_context(EnvoyChild(options, log_level="error"))
        self._envoy_port = envoy.listen_port
        self.running = [
            self._replica(each, line) for each, line in zip(commands, lines, strict=True)
        ]

    async def start_again(self, number: int) -> Separate:
        """Another process in place of one that has died."""
        again = await self._command(number)
        self.running[number] = self._replica(again, await _serving(again))
        return self.running[number]

    async def total(self, name: str, **labels: str) -> float:
        """The sum of all series of a metric that carry these labels, of all replicas."""
        return sum([await each.total(name, **labels) for each in self.running])

    async def _command(self, number: int) -> Command:
        address = ("--ext-proc", f"127.0.0.1:{self._first_port + number}")
        return await self._stack.enter_async_context(
            command("serve", "--config", self._file, *address, "--admin", "127.0.0.1:0")
        )

    def _replica(self, running: Command, line: dict[str, int]) -> Separate:
        return Separate(
            process=psutil.Process(running.process.pid),
            ext_proc_port=line["port"],
            admin_url=f"http://127.0.0.1:{line['admin_port']}",
            port=self._envoy_port,
        )


async def _serving(running: Command) -> dict[str, int]:
    """What it says when it serves."""
    line: dict[str, int] = json.loads(await running.line_with('"serving"', START_WITHIN_S))
    return line


@contextlib.asynccontextmanager
async def replicas(
    config: str, count: int, backend_url: str, folder: Path
) -> AsyncIterator[Replicas]:
    """So many of them in front of `backend_url`, ended at the end; the configuration is written into `folder`."""
    file = folder / "pools.yaml"
    file.write_text(config)
    async with contextlib.AsyncExitStack() as stack:
        them = Replicas(stack, file, neighbouring_ports(count))
        await them.start(count, backend_url)
        yield them
