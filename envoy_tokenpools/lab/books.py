"""
Where the replicas of a run keep their shared books: on a server, apart from all others, and thrown away afterwards.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode

from redis.exceptions import RedisError

from envoy_tokenpools.config import EMBEDDED, parse_address
from envoy_tokenpools.errors import ConfigError, Fault
from envoy_tokenpools.store.redis.script import pool_keys
from envoy_tokenpools.store.redis.server import CALL_TIMEOUT_S, RedisServer

log = logging.getLogger(__name__)

MAX_REPLICAS = 16
"""In one process; each takes 100 MB and half a second to start, most of it for its vocabularies."""


def check_books(state: str, replicas: int) -> None:
    """
    Whether so many replicas can keep their books there.

    Raises:
        ConfigError: they cannot; says why.
    """
    faults = []
    if replicas > MAX_REPLICAS:
        faults.append(Fault("--replicas", f"{replicas} is more than {MAX_REPLICAS}"))
    if state == EMBEDDED:
        if replicas > 1:
            faults.append(
                Fault(
                    "--state",
                    f"{replicas} replicas need a server that keeps the books for all of them, such"
                    f" as redis://127.0.0.1:6379; {EMBEDDED} is one process's own",
                )
            )
    else:
        try:
            parse_address(_apart(state))
        except ValueError as error:
            faults.append(Fault("--state", str(error)))
    if faults:
        raise ConfigError(faults)


@contextlib.asynccontextmanager
async def own_books(state: str, pool: str) -> AsyncIterator[str]:
    """
    The URL of books for one run, which finds them empty, and leaves nothing behind.

    Args:
        state: the server, or `memory://`.
        pool: whose books they are.
    """
    if state == EMBEDDED:
        yield state
        return
    url = _apart(state)
    try:
        yield url
    finally:
        await _throw_away(url, pool)


def _apart(state: str) -> str:
    """The same server with keys that nobody else has: debts of another run would be taken over."""
    base, _, query = state.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    options["prefix"] = f"{options.get('prefix', 'tokenpools')}-{secrets.token_hex(4)}"
    return f"{base}?{urlencode(options)}"


async def _throw_away(url: str, pool: str) -> None:
    address = parse_address(url)
    server = _Server(address)
    try:
        await server.forget(pool_keys(address.prefix, pool))
    except (RedisError, OSError, TimeoutError) as error:
        log.warning("the books of a run stay on the server", extra={"prefix": address.prefix})
        log.debug("%r", error)
    finally:
        await server.close()


class _Server(RedisServer):
    """Also forgets."""

    async def forget(self, keys: Sequence[str]) -> None:
        """Remove the keys of one pool."""
        client: Any = self._client
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await client.unlink(*keys)
