"""
The few things that are asked of a running Envoy's admin interface.
"""

import json

import aiohttp

_TIMEOUT = aiohttp.ClientTimeout(total=1.0)


class AdminUnavailableError(Exception):
    """The admin interface did not answer, or not with success."""


class AdminClient:
    """Talks to the admin interface at `url`; every call may raise `AdminUnavailableError`."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def require_ready(self) -> None:
        """Raise unless Envoy is live."""
        await self._call("GET", "/ready")

    async def listen_port(self, listener: str) -> int | None:
        """The port that `listener` is bound to, or None while there is no such listener."""
        listeners = json.loads(await self._call("GET", "/listeners?format=json"))
        for status in listeners.get("listener_statuses", ()):
            if status["name"] == listener:
                return int(status["local_address"]["socket_address"]["port_value"])
        return None

    async def close_listeners(self) -> None:
        """Accept no more connections; those that exist go on."""
        await self._call("POST", "/drain_listeners")

    async def requests_in_flight(self, stat_prefix: str) -> int:
        """Requests that the connection manager with this prefix is serving now."""
        stat = f"http.{stat_prefix}.downstream_rq_active"
        answer = json.loads(await self._call("GET", f"/stats?format=json&filter=^{stat}$"))
        return next((int(each["value"]) for each in answer["stats"] if each.get("name") == stat), 0)

    async def _call(self, method: str, path: str) -> str:
        """Body of a successful answer."""
        try:
            async with (
                aiohttp.ClientSession(timeout=_TIMEOUT, raise_for_status=True) as session,
                session.request(method, f"{self.url}{path}") as answer,
            ):
                return await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AdminUnavailableError(f"{method} {path}: {error!r}") from error
