"""
From the `state` URL of the configuration to a store.
"""

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.errors import ConfigError, Fault
from envoy_tokenpools.store.base import Store
from envoy_tokenpools.store.memory import MemoryStore


def open_store(url: str, clock: Clock) -> Store:
    """
    The store behind `url`: `memory://` keeps the books in this process.

    Raises:
        ConfigError: no store knows the scheme.
    """
    if url == "memory://":
        return MemoryStore(clock)
    # Without one the text may be anything, a password too.
    scheme = url.partition("://")[0] if "://" in url else ""
    raise ConfigError([Fault("state", f"unknown scheme {scheme!r}; known: memory://")])
