"""
A real redis-server on loopback, and what it has done so far by its own account.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from tests.support.redis_server import redis_process

_SCRIPTS = ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_fcall")
"""The commands that run a script."""


@dataclass(frozen=True, slots=True)
class Work:
    """
    What a server has done.

    Attributes:
        cpu_s: processor time of its process.
        calls: of scripts.
    """

    cpu_s: float
    calls: int

    def since(self, before: "Work") -> "Work":
        """What it has done since it had done `before`."""
        return Work(self.cpu_s - before.cpu_s, self.calls - before.calls)


@dataclass(frozen=True, slots=True)
class WatchedRedis:
    """A server that is asked how much it did; asking takes it a tenth of a millisecond."""

    url: str
    pid: int
    client: Redis

    async def work(self) -> Work:
        """Since it was started."""
        info: Any = await self.client.info("cpu", "commandstats")
        return Work(
            cpu_s=info["used_cpu_user"] + info["used_cpu_sys"],
            calls=sum(info[name]["calls"] for name in _SCRIPTS if name in info),
        )


@contextlib.asynccontextmanager
async def watched_redis() -> AsyncIterator[WatchedRedis]:
    """Run one, without persistence, on the cores of this process, until the end of the block."""
    with redis_process() as server:
        async with Redis.from_url(server.url) as client:
            info: Any = await client.info("server")
            yield WatchedRedis(server.url, info["process_id"], client)
