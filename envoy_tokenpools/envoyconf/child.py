"""
A real Envoy as a child process: started, watched until it serves, drained and stopped.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

from envoy_tokenpools.envoyconf.admin_client import AdminClient, AdminUnavailableError
from envoy_tokenpools.envoyconf.bootstrap import build_bootstrap
from envoy_tokenpools.envoyconf.listener import LISTENER_NAME
from envoy_tokenpools.envoyconf.locate import find_envoy
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from envoy_tokenpools.envoyconf.render import render_yaml, to_plain
from envoy_tokenpools.errors import EnvoyError

_LOG = logging.getLogger(__name__)

_KEPT_LINES = 40
"""Lines of Envoy's log that an error message quotes."""

_LINE_LIMIT_BYTES = 1 << 20
"""Longest log line that is passed on; longer ones are dropped."""

_POLL_S = 0.02
_KILL_AFTER_S = 3.0
"""How long Envoy may take to end after SIGTERM, which makes it end at once."""

# Runs before Envoy in the same process: ends Envoy when its parent dies, however that dies. An
# orphan would go on listening, and answer every request of the next run that it catches with 503.
_LAUNCHER = """
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 15)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class EnvoyChild:
    """
    One Envoy process that serves `options`.

    `start` and `stop` are called once each, or use it as an async context manager.
    """

    def __init__(
        self,
        options: EnvoyOptions,
        *,
        binary: Path | None = None,
        log_level: str = "warning",
        concurrency: int | None = None,
        start_timeout_ms: int = 20_000,
    ) -> None:
        """
        Nothing is started yet.

        Args:
            options: what the generated bootstrap depends on.
            binary: the Envoy to run; None finds one.
            log_level: Envoy's own `--log-level`.
            concurrency: worker threads; None is one per hardware thread.
            start_timeout_ms: how long Envoy may take until it serves.
        """
        self._options = options
        self._binary = binary
        self._log_level = log_level
        self._concurrency = concurrency
        self._start_timeout_s = start_timeout_ms / 1_000
        self._process: asyncio.subprocess.Process | None = None
        self._relay: asyncio.Task[None] | None = None
        self._folder: Path | None = None
        self._admin_address_file: Path | None = None
        self._admin: AdminClient | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._listen_port = options.listen_port

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        """Process id; only after `start`."""
        return self._started().pid

    @property
    def listen_port(self) -> int:
        """The port that clients connect to, also where the system chose it."""
        return self._listen_port

    @property
    def admin_url(self) -> str | None:
        """Base URL of the admin interface, or None if there is none."""
        return self._admin.url if self._admin is not None else None

    def log_tail(self) -> str:
        """The last lines of Envoy's log."""
        return "\n".join(self._lines)

    async def start(self) -> None:
        """
        Start Envoy and return when it serves.

        Raises:
            EnvoyError: no binary, the port is taken, the process ended, or the time is over; the
                message quotes the end of Envoy's log.
        """
        binary = self._binary if self._binary is not None else find_envoy()
        _require_free_port(self._options.listen_host, self._options.listen_port)
        try:
            await self._spawn(binary)
            await self._wait_until_serving()
        except BaseException:
            await self.stop()
            raise

    async def wait(self) -> int:
        """Return the exit status when the process ends; -N where signal N ended it."""
        return await self._started().wait()

    async def stop(self, *, drain_ms: int = 0) -> None:
        """
        Stop Envoy and leave no process and no file; may be called again.

        With `drain_ms` no new connections are accepted and requests in flight have so long to
        finish (this needs the admin interface). Then SIGTERM, and SIGKILL if that is not obeyed.
        """
        try:
            if drain_ms > 0 and self._admin is not None:
                await _drain(self._admin, drain_ms / 1_000)
        finally:
            try:
                if self._process is not None:
                    await _terminate(self._process)
                if self._relay is not None:
                    await self._relay
            finally:
                if self._folder is not None:
                    shutil.rmtree(self._folder, ignore_errors=True)

    async def _spawn(self, binary: Path) -> None:
        """Write the bootstrap where only this user can read it and start the process."""
        self._folder = Path(tempfile.mkdtemp(prefix="envoy-tokenpools-"))
        bootstrap = self._folder / "bootstrap.yaml"
        bootstrap.write_text(render_yaml(to_plain(build_bootstrap(self._options))), "utf-8")
        arguments = ["-c", str(bootstrap), "--log-level", self._log_level]
        # Hot restart would need a base id of its own and leaves shared memory behind.
        arguments += ["--disable-hot-restart"]
        if self._concurrency is not None:
            arguments += ["--concurrency", str(self._concurrency)]
        if self._options.admin_host is not None:
            self._admin_address_file = self._folder / "admin_address"
            arguments += ["--admin-address-path", str(self._admin_address_file)]
        launch = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(binary)]
        self._process = await asyncio.create_subprocess_exec(
            *launch,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            # A Ctrl-C or a service manager that signals our group must not end it before it has drained.
            start_new_session=True,
            limit=_LINE_LIMIT_BYTES,
        )
        stderr = self._process.stderr
        if stderr is not None:
            self._relay = asyncio.create_task(self._relay_log(stderr, self._process.pid))

    async def _relay_log(self, stderr: asyncio.StreamReader, pid: int) -> None:
        """Pass Envoy's log lines on and keep the last ones, until it ends."""
        while True:
            try:
                line = await stderr.readline()
            except ValueError:
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self._lines.append(text)
            # Its own --log-level has chosen already: what it says is worth seeing.
            _LOG.warning("%s", text, extra={"envoy_pid": pid})

    async def _wait_until_serving(self) -> None:
        """Poll until Envoy is live and its port known; EnvoyError if it ends or is too slow."""
        process = self._started()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not await self._is_serving():
                    if process.returncode is not None:
                        raise await self._failure(f"ended with status {process.returncode}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise await self._failure(f"did not serve within {self._start_timeout_s:g} s") from None

    async def _is_serving(self) -> bool:
        """Whether Envoy accepts requests; fills in the addresses that the system chose."""
        if self._admin_address_file is None:
            return await _accepts(self._options.listen_host, self._options.listen_port)
        address = _read_text(self._admin_address_file)
        if not address:
            return False
        admin = AdminClient(f"http://{address}")
        try:
            await admin.require_ready()
            port = await admin.listen_port(LISTENER_NAME)
        except AdminUnavailableError:
            return False
        if port is None:
            return False
        self._admin, self._listen_port = admin, port
        return True

    async def _failure(self, what: str) -> EnvoyError:
        """What to raise, with the log: complete if the process has ended."""
        if self._started().returncode is not None and self._relay is not None:
            await self._relay
        return EnvoyError(f"Envoy {what}. The end of its log:\n{self.log_tail()}")

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("EnvoyChild.start was not called")
        return self._process


async def _drain(admin: AdminClient, deadline_s: float) -> None:
    """Close the listener and wait until no request is in flight, at most `deadline_s`."""
    with contextlib.suppress(AdminUnavailableError, TimeoutError):
        async with asyncio.timeout(deadline_s):
            await admin.close_listeners()
            while True:
                if await admin.requests_in_flight(LISTENER_NAME) == 0:
                    return
                await asyncio.sleep(_POLL_S)


async def _terminate(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, then SIGKILL; returns when the process is gone."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_KILL_AFTER_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    await process.wait()


def _require_free_port(host: str, port: int) -> None:
    """
    Refuse a port that somebody listens on.

    Envoy binds with SO_REUSEPORT, so a second Envoy would share the port in silence and get half
    of the connections.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EnvoyError(f"cannot listen on {host} port {port}: {error.strerror}") from error


async def _accepts(host: str, port: int) -> bool:
    """Whether a TCP connection to the listener is accepted."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        _, writer = await asyncio.open_connection(reachable, port)
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


def _read_text(path: Path) -> str:
    """The file's text, or nothing while it does not exist."""
    try:
        return path.read_text("utf-8").strip()
    except FileNotFoundError:
        return ""
