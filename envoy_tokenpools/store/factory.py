"""
From the `state` URL of the configuration to a store.
"""

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.config import EMBEDDED, parse_address
from envoy_tokenpools.errors import ConfigError, Fault
from envoy_tokenpools.store.base import Store
from envoy_tokenpools.store.memory import MemoryStore
from envoy_tokenpools.store.redis.server import RedisServer
from envoy_tokenpools.store.redis.store import RedisStore


def open_store(url: str, clock: Clock, *, owner: str = "0", deadline_ms: int = 50) -> Store:
    """
    The store behind `url`; nothing is sent to a server yet.

    Args:
        url: `memory://` keeps the books in this process; all else is a server's address.
        clock: pool time of the embedded store; a server has its own.
        owner: this replica, unlike any other that shares the server.
        deadline_ms: how long a decision waits for a server.

    Raises:
        ConfigError: no store knows the URL.
    """
    if url == EMBEDDED:
        return MemoryStore(clock)
    try:
        address = parse_address(url)
    except ValueError as error:
        raise ConfigError([Fault("state", str(error))]) from None
    server = RedisServer(address)
    return RedisStore(server, owner=owner, prefix=address.prefix, deadline_ms=deadline_ms)
