"""One real Redis for all tests of a run that do not harm it, started when the first of them asks."""

import atexit
import functools

from tests.support.redis_server import RedisProcess


@functools.cache
def shared_server() -> str:
    """Its URL; it ends with this process."""
    server = RedisProcess()
    atexit.register(server.close)
    return server.start().url
