"""
Child processes of the benchmark: each prints its port, and none outlives the process that started it.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_START_TIMEOUT_S = 30.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Child:
    """A child that serves."""

    pid: int
    port: int


@contextlib.asynccontextmanager
async def child(module: str, *arguments: str) -> AsyncIterator[Child]:
    """Run `python -m module arguments` until the end of the block; it serves on the port that it prints first."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            port = await _printed_port(process)
            await _accepting(port)
        yield Child(process.pid, port)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def die_with_parent() -> None:
    """Called by a child: however the benchmark ends, this process ends with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() == 1:
        sys.exit(1)


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _printed_port(process: asyncio.subprocess.Process) -> int:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.strip().isdigit():
        raise RuntimeError(f"a child ended with status {await process.wait()} before it served")
    return int(line)


async def _accepting(port: int) -> None:
    """Wait until somebody listens."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(_POLL_S)
        else:
            writer.close()
            return
