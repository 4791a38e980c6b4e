"""
Serves the admin application on a TCP port or a socket file of its own.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from envoy_tokenpools.admin.app import Drain, Rendering, admin_app
from envoy_tokenpools.observer import Reporter

_STOP_SECONDS = 1.0
"""How long `stop` lets an answer finish; no answer takes longer than a scrape."""


class AppServer:
    """One listener with an application of the admin; start it once."""

    def __init__(self, app: web.Application, drain: Drain) -> None:
        self._drain = drain
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=_STOP_SECONDS,
        )

    async def start(self, host: str, port: int) -> int:
        """
        Listen, and return the port; 0 picks a free one.

        Raises:
            OSError: the address cannot be bound.
        """
        await self._listen(lambda: web.TCPSite(self._runner, host, port).start())
        bound: int = self._runner.addresses[0][1]
        return bound

    async def start_on_socket(self, path: Path) -> None:
        """
        Listen on a socket file; one that a dead process has left is replaced.

        Raises:
            OSError: it cannot be made.
        """
        await self._listen(lambda: web.UnixSite(self._runner, path).start())

    async def _listen(self, start: Callable[[], Awaitable[None]]) -> None:
        await self._runner.setup()
        try:
            await start()
        except OSError:
            await self._runner.cleanup()
            raise

    def drain(self) -> None:
        """Answer `/readyz` with 503 from now on, so that no new traffic is sent here; all else goes on."""
        self._drain.started = True

    async def stop(self) -> None:
        """Close the listener and all connections; does nothing if it was not started."""
        await self._runner.cleanup()


class AdminServer(AppServer):
    """The listener of one process."""

    def __init__(self, reporter: Reporter, metrics: Rendering) -> None:
        drain = Drain()
        super().__init__(admin_app(reporter, metrics, drain), drain)
