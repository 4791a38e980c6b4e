"""
The command line as a child process, started, read and ended by tests.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path


class Command:
    """A running `envoy-tokenpools`; its output is collected line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self._grown = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode().rstrip())
            self._grown.set()
        self._grown.set()

    async def line_with(self, text: str, within_s: float = 30.0) -> str:
        """The first line that contains `text`; fails with the whole output if it does not come."""

        async def wait() -> str:
            while True:
                for line in self.lines:
                    if text in line:
                        return line
                if self._reader.done():
                    raise AssertionError(f"no {text!r} in:\n" + "\n".join(self.lines))
                self._grown.clear()
                await self._grown.wait()

        return await asyncio.wait_for(wait(), within_s)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def ended(self, within_s: float = 30.0) -> int:
        """The exit status."""
        status = await asyncio.wait_for(self.process.wait(), within_s)
        await self._reader
        return status


@contextlib.asynccontextmanager
async def command(*arguments: str | Path) -> AsyncIterator[Command]:
    """Run `envoy-tokenpools` with `arguments`; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "envoy_tokenpools",
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    running = Command(process)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await running.ended()
