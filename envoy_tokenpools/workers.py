"""
Several filters on one host: worker processes that share their pools, started, watched and stopped together.

A worker gets its configuration through its standard input, once at its start and again at each reload. All workers
have the same one, therefore, and one that is started again has the last good one, whatever is in the file by then. The
pipe stays open for as long as the supervisor lives: its end is, to a worker, as good as a SIGTERM.
"""

import asyncio
import contextlib
import logging
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envoy_tokenpools.admin.fanout import FanOut, fan_out_server
from envoy_tokenpools.clock import Clock, SystemClock
from envoy_tokenpools.config import EMBEDDED, Config
from envoy_tokenpools.errors import ConfigError, Fault, WorkerError
from envoy_tokenpools.workers_metrics import WorkersMetrics

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
RESTART_WINDOW_MS = 60_000
"""A worker that dies more than `MAX_RESTARTS` times within this will not get better by being started again."""

STOP_MARGIN_S = 10.0
"""How much longer than it drains a stopping worker may take, until it is killed."""

_POLL_S = 0.05
_LENGTH_BYTES = 8

WorkerCommand = Callable[[int, Path], Sequence[str]]
"""The command that starts a worker, from its number and the folder that all share."""


def require_shared(config: Config) -> None:
    """
    Refuse a state that workers cannot share.

    Raises:
        ConfigError: the books would be kept in each process.
    """
    if config.state == EMBEDDED:
        message = (
            "is kept in one process, and several workers need books that they share:"
            " name a redis:// server, or leave out --workers"
        )
        raise ConfigError([Fault("state", message)])


def admin_socket(folder: Path, worker: int) -> Path:
    """Where a worker's own admin listens."""
    return folder / f"admin.{worker}"


def counts_folder(folder: Path) -> Path:
    """Where all workers count."""
    return folder / "counts"


def abandon(folder: Path, worker: int) -> None:
    """Remove what a worker has there, and with the last of it the folder: the supervisor is gone and cannot."""
    counts = counts_folder(folder)
    for file in (admin_socket(folder, worker), *counts.glob(f"*_{worker}.db")):
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        counts.rmdir()
        folder.rmdir()


async def configurations(pipe: asyncio.StreamReader) -> AsyncIterator[str]:
    """The texts that the supervisor sends through a worker's standard input, until it is gone."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            length = int.from_bytes(await pipe.readexactly(_LENGTH_BYTES))
            yield (await pipe.readexactly(length)).decode()


def _message(text: str) -> bytes:
    body = text.encode()
    return len(body).to_bytes(_LENGTH_BYTES) + body


@dataclass(slots=True)
class _Worker:
    """
    One of the workers.

    Attributes:
        number: from 0.
        process: the one that runs, if any.
        is_up: whether that has answered.
        has_served: whether any has.
        restarts: when it was started again, the last times.
    """

    number: int
    process: asyncio.subprocess.Process | None = None
    is_up: bool = False
    has_served: bool = False
    restarts: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_RESTARTS))


class Workers:
    """The supervisor: `start` it, `watch`, and `stop` it, once each."""

    def __init__(
        self,
        text: str,
        config: Config,
        command: WorkerCommand,
        *,
        count: int,
        clock: Clock | None = None,
    ) -> None:
        """
        Nothing is started yet.

        Args:
            text: the configuration as it was written.
            config: the same, read.
            command: starts a worker.
            count: of the workers.
            clock: the system's if None.
        """
        self._text = text
        self._config = config
        self._command = command
        self._clock = clock or SystemClock()
        self._workers = [_Worker(number) for number in range(count)]
        self._folder = Path(tempfile.mkdtemp(prefix="envoy-tokenpools-"))
        counts = counts_folder(self._folder)
        counts.mkdir()
        self._metrics = WorkersMetrics(counts, count, self._pids)
        sockets = [admin_socket(self._folder, number) for number in range(count)]
        self._fan_out = FanOut(sockets, self._running)
        self._admin = fan_out_server(self._fan_out, self._metrics)

    async def start(self, host: str, port: int) -> int:
        """
        Listen for the admin, and return its port; on failure nothing stays behind.

        Raises:
            OSError: the address cannot be bound.
        """
        try:
            return await self._admin.start(host, port)
        except BaseException:
            self._clean_up()
            raise

    async def watch(self, when_up: Callable[[], None]) -> None:
        """
        Start the workers, call `when_up` when all of them have come up, and start again whichever dies.

        Raises:
            WorkerError: one did not come up, or died too often.
        """
        watching = [asyncio.create_task(self._keep(worker, when_up)) for worker in self._workers]
        try:
            await asyncio.gather(*watching)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    def reload(self, text: str, config: Config) -> None:
        """
        Put a new configuration in force in all workers.

        Raises:
            ConfigError: it names another store, which cannot be changed while leases are held.
        """
        if config.state != self._config.state:
            message = "cannot be changed while workers run: a restart is needed"
            raise ConfigError([Fault("state", message)])
        self._text, self._config = text, config
        for worker in self._workers:
            if worker.process is not None:
                _send(worker.process, text)
        self._metrics.config_reloaded(succeeded=True)

    def config_refused(self) -> None:
        """A reload failed: the last good configuration stays in force."""
        self._metrics.config_reloaded(succeeded=False)

    async def stop(self) -> int:
        """Let the workers drain, all at the same time, and leave nothing behind; the worst exit status."""
        self._admin.drain()
        try:
            processes = [worker.process for worker in self._workers if worker.process is not None]
            patience_s = self._config.server.drain_ms / 1_000 + STOP_MARGIN_S
            return max(
                await asyncio.gather(*(_stop(each, patience_s) for each in processes)), default=0
            )
        finally:
            await self._admin.stop()
            self._clean_up()

    def kill(self) -> None:
        """End the workers at once."""
        for worker in self._workers:
            if worker.process is not None:
                _signal(worker.process, signal.SIGKILL)
        self._clean_up()

    # ------------------------------------------------------------------

    async def _keep(self, worker: _Worker, when_up: Callable[[], None]) -> None:
        """Start a worker, and again whenever it dies."""
        while True:
            process = await self._spawn(worker)
            await self._until_up(worker, process)
            if worker.is_up and not worker.has_served:
                worker.has_served = True
                if all(each.has_served for each in self._workers):
                    when_up()
            status = await process.wait()
            worker.process, worker.is_up = None, False
            if not worker.has_served:
                raise WorkerError(
                    f"worker {worker.number} ended with status {status} before it served;"
                    " its own messages say why"
                )
            self._count_death(worker, status)

    async def _spawn(self, worker: _Worker) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self._command(worker.number, self._folder),
            stdin=asyncio.subprocess.PIPE,
            # What a terminal sends to our group must reach it once, from us.
            start_new_session=True,
        )
        worker.process = process
        _send(process, self._text)
        return process

    async def _until_up(self, worker: _Worker, process: asyncio.subprocess.Process) -> None:
        """Return when it answers, or has ended."""
        while process.returncode is None:
            if await self._fan_out.ask(worker.number, "/healthz") is not None:
                worker.is_up = True
                return
            await asyncio.sleep(_POLL_S)

    def _count_death(self, worker: _Worker, status: int) -> None:
        """Say that a worker died; WorkerError if it did so too often."""
        now_ms, restarts = self._clock.now_ms(), worker.restarts
        if len(restarts) == MAX_RESTARTS and now_ms - restarts[0] < RESTART_WINDOW_MS:
            raise WorkerError(
                f"worker {worker.number} died {MAX_RESTARTS + 1} times within a minute,"
                f" last with status {status}"
            )
        restarts.append(now_ms)
        self._metrics.restarted(worker.number)
        log.error(
            "a worker died, starting it again", extra={"worker": worker.number, "status": status}
        )

    def _running(self) -> list[int]:
        return [worker.number for worker in self._workers if worker.is_up]

    def _pids(self) -> dict[int, int]:
        return {
            worker.number: process.pid
            for worker in self._workers
            if (process := worker.process) is not None
        }

    def _clean_up(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _send(process: asyncio.subprocess.Process, text: str) -> None:
    """Hand a configuration to a worker, which may be about to die."""
    if process.stdin is not None and not process.stdin.is_closing():
        process.stdin.write(_message(text))


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


async def _stop(process: asyncio.subprocess.Process, patience_s: float) -> int:
    """SIGTERM, then SIGKILL; the exit status as a shell would show it."""
    _signal(process, signal.SIGTERM)
    try:
        async with asyncio.timeout(patience_s):
            status = await process.wait()
    except TimeoutError:
        log.error("a worker does not end, killing it", extra={"pid": process.pid})  # noqa: TRY400
        _signal(process, signal.SIGKILL)
        status = await process.wait()
    if status == -signal.SIGTERM:
        return 0  # it was told before it had come so far as to listen
    return status if status >= 0 else 128 - status
