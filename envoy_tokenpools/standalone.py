"""
One machine: the filter and a real Envoy in front of a backend, started, watched and stopped together.
"""

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import replace

from envoy_tokenpools.clock import Clock, SystemClock
from envoy_tokenpools.config import Config
from envoy_tokenpools.envoyconf.child import EnvoyChild
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from envoy_tokenpools.errors import EnvoyError
from envoy_tokenpools.server import FilterServer, Listen

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
RESTART_WINDOW_MS = 60_000
"""An Envoy that dies more than `MAX_RESTARTS` times within this will not get better by being started again."""


class Standalone:
    """The filter in this process and Envoy as its child."""

    def __init__(
        self,
        config: Config,
        options: EnvoyOptions,
        listen: Listen,
        *,
        clock: Clock | None = None,
        envoy_log_level: str = "warning",
    ) -> None:
        """
        Build the filter; nothing listens yet.

        Args:
            config: what to serve.
            options: the Envoy; where it finds the filter, and what `config` decides of it, is filled in here.
            listen: where the filter listens.
            clock: pool time; the system's if None.
            envoy_log_level: of the child.

        Raises:
            VocabularyError, ConfigError: as `FilterServer`.
        """
        self._clock = clock or SystemClock()
        self._options = options.following(config)
        self._envoy_log_level = envoy_log_level
        self._envoy: EnvoyChild | None = None
        self._restarts: deque[int] = deque(maxlen=MAX_RESTARTS)
        self.filter = FilterServer(config, listen, clock)

    @property
    def envoy(self) -> EnvoyChild:
        """The running Envoy."""
        if self._envoy is None:
            raise EnvoyError("Envoy was not started")
        return self._envoy

    @property
    def url(self) -> str:
        """Where to send requests."""
        host = self._options.listen_host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.envoy.listen_port}"

    async def start(self) -> None:
        """
        Start the filter, then Envoy; on failure nothing stays behind.

        Raises:
            EnvoyError: there is no Envoy, or it does not start.
            OSError: an address cannot be bound.
        """
        await self.filter.start()
        try:
            await self._start_envoy()
        except BaseException:
            await self.filter.stop()
            raise

    async def watch(self) -> None:
        """
        Start Envoy again whenever it dies.

        Raises:
            EnvoyError: it died too often.
        """
        while True:
            status = await self.envoy.wait()
            now_ms = self._clock.now_ms()
            if (
                len(self._restarts) == MAX_RESTARTS
                and now_ms - self._restarts[0] < RESTART_WINDOW_MS
            ):
                raise EnvoyError(
                    f"Envoy died {MAX_RESTARTS + 1} times within a minute, last with status {status}"
                )
            self._restarts.append(now_ms)
            log.error("Envoy died, starting it again", extra={"status": status})
            await self.envoy.stop()
            # The port that clients know stays.
            self._options = replace(self._options, listen_port=self.envoy.listen_port)
            await self._start_envoy()

    async def stop(self) -> None:
        """Let Envoy drain first, so that no request meets an absent filter; then stop the filter."""
        await self.filter.drain()
        if self._envoy is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._envoy.stop(drain_ms=self.filter.gate.config.server.drain_ms)
        await self.filter.stop()

    async def _start_envoy(self) -> None:
        envoy = EnvoyChild(
            replace(self._options, ext_proc_port=self.filter.ext_proc_port),
            log_level=self._envoy_log_level,
        )
        await envoy.start()
        self._envoy = envoy
