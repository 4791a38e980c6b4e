"""
The server: Redis or Valkey, alone, behind sentinels or as a cluster.

redis-py speaks to it: of the clients that are kept up it costs least (a call of the script takes 60 us of CPU; coredis
205, valkey-glide 161, bare asyncio 31). Its retries are off, for by default it sends a call up to eleven times: a call
is repeated by `calls.py`, which knows when that is safe. Its timeouts are off too: each read and write has its own.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, cast

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ResponseError
from redis.maint_notifications import MaintNotificationsConfig

from envoy_tokenpools.config import Address, Topology
from envoy_tokenpools.errors import StoreError
from envoy_tokenpools.store.redis.script import script

CALL_TIMEOUT_S = 1.0
"""After this a call, or an attempt to connect, has failed; decisions do not wait for it."""

MAX_CONNECTIONS = 1_000
"""One per pool that has a call on its way."""

_SCRIPT_FAULTS = ("user_script", "Error running script", "Error compiling script", "WRONGTYPE")
"""How a server begins when the script itself has failed: the same call would fail again."""

_STATES = re.compile(
    r"\b(READONLY|OOM|NOREPLICAS|MISCONF|LOADING|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOPERM|BUSY)\b"
)
"""But not where it names a state that it is in: the script was not to blame, and the call may succeed later."""


class Server(Protocol):
    """What keeps the books."""

    async def call(self, keys: Sequence[str], arguments: Sequence[str | bytes]) -> object:
        """
        The script's reply.

        Raises:
            StoreError: it failed; not transient if the script did.
        """
        ...

    def messages(self, channels: Sequence[str]) -> AsyncIterator[tuple[str, bytes]]:
        """
        What is published on `channels`, until the connection fails.

        Raises:
            StoreError: it failed.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class RedisServer:
    """A server of any topology; nothing is sent before the first call."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._client = _client(address)
        self._text = script()
        self._digest = hashlib.sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    async def call(self, keys: Sequence[str], arguments: Sequence[str | bytes]) -> object:
        """See `Server.call`."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await self._call(keys, arguments)
        except Exception as error:  # whatever the client makes of what is no Redis
            if isinstance(error, ResponseError) and _is_of_script(str(error)):
                raise StoreError(f"the script failed: {error}", transient=False) from error
            await self._disconnect()
            raise _failure(error) from error

    async def _call(self, keys: Sequence[str], arguments: Sequence[str | bytes]) -> object:
        client: Any = self._client
        try:
            return await client.evalsha(self._digest, len(keys), *keys, *arguments)
        except NoScriptError:  # a server that was started or flushed since
            return await client.eval(self._text, len(keys), *keys, *arguments)

    async def messages(self, channels: Sequence[str]) -> AsyncIterator[tuple[str, bytes]]:
        """See `Server.messages`."""
        try:
            client = await self._subscriber()
            try:
                async with client.pubsub() as subscription:
                    await subscription.subscribe(*channels)
                    async for message in subscription.listen():
                        if message["type"] == "message":
                            yield message["channel"].decode(), message["data"]
            finally:
                await _close(client)
        except Exception as error:  # whatever the client makes of what is no Redis
            raise _failure(error) from error

    async def close(self) -> None:
        """See `Server.close`."""
        await _close(self._client)

    async def _subscriber(self) -> Redis:
        """A client of its own: of a cluster any node will do, for all of them repeat what is published."""
        if self._address.topology is not Topology.CLUSTER:
            return cast("Redis", _client(self._address))
        cluster: Any = self._client
        await cluster.initialize()
        node = cluster.get_random_node()
        return Redis(host=node.host, port=node.port, **_options(self._address))

    async def _disconnect(self) -> None:
        """A connection may lead to a server that was replaced: the next call looks for it anew."""
        if isinstance(self._client, Redis):
            await self._client.connection_pool.disconnect(inuse_connections=False)


async def _close(client: "Redis | RedisCluster") -> None:
    await client.aclose()
    if isinstance(client, Redis) and isinstance(client.connection_pool, SentinelConnectionPool):
        for sentinel in client.connection_pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def _is_of_script(message: str) -> bool:
    return message.startswith(_SCRIPT_FAULTS) and _STATES.search(message) is None


def _failure(error: Exception) -> StoreError:
    return StoreError(f"{type(error).__name__}: {error}", transient=True)


def _client(address: Address) -> "Redis | RedisCluster":
    options = _options(address)
    if address.path is not None:
        return Redis(unix_socket_path=address.path, db=address.database, **options)
    if address.topology is Topology.CLUSTER:
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        return RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options)
    if address.topology is Topology.SENTINEL:
        login = {"username": address.sentinel_username, "password": address.sentinel_password}
        timeout = {"socket_timeout": CALL_TIMEOUT_S / 2}
        sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
            list(address.hosts), sentinel_kwargs=options | login | timeout
        )
        client: Redis = sentinel.master_for(address.master, db=address.database, **options)
        return client
    host, port = address.hosts[0]
    return Redis(host=host, port=port, db=address.database, **options)


def _options(address: Address) -> dict[str, Any]:
    options: dict[str, Any] = {
        "username": address.username,
        "password": address.password,
        "socket_timeout": None,
        "socket_connect_timeout": CALL_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": MAX_CONNECTIONS,
        # They are for one vendor's service, and keep the client from noticing connections that the server has closed.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }
    if address.tls:
        names = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
        options |= {"ssl": True} | {names[name]: path for name, path in address.files.items()}
    return options
