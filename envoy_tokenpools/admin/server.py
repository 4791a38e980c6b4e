"""
Serves the admin application on a TCP port of its own.
"""

from aiohttp import web

from envoy_tokenpools.admin.app import Drain, admin_app
from envoy_tokenpools.metrics import PrometheusObserver
from envoy_tokenpools.observer import Reporter

_STOP_SECONDS = 1.0
"""How long `stop` lets an answer finish; no answer takes longer than a scrape."""


class AdminServer:
    """One listener with the admin application; start it once."""

    def __init__(self, reporter: Reporter, metrics: PrometheusObserver) -> None:
        self._drain = Drain()
        self._runner = web.AppRunner(
            admin_app(reporter, metrics, self._drain),
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
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError:
            await self._runner.cleanup()
            raise
        bound: int = self._runner.addresses[0][1]
        return bound

    def drain(self) -> None:
        """Answer `/readyz` with 503 from now on, so that no new traffic is sent here; all else goes on."""
        self._drain.started = True

    async def stop(self) -> None:
        """Close the listener and all connections; does nothing if it was not started."""
        await self._runner.cleanup()
