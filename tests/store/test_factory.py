"""From a URL to a store."""

import pytest

from envoy_tokenpools.clock import ManualClock
from envoy_tokenpools.errors import ConfigError
from envoy_tokenpools.store.factory import open_store
from envoy_tokenpools.store.memory import MemoryStore


def test_memory_is_the_embedded_store() -> None:
    """The default of the configuration."""
    assert isinstance(open_store("memory://", ManualClock()), MemoryStore)


@pytest.mark.parametrize(
    "url",
    [
        "memory://",
        "redis://host",
        "rediss://user:secret@host:6380/1",
        "redis+sentinel://one,two:26380/master/2",
        "redis+cluster://one,two",
        "unix:///run/redis.sock",
    ],
)
async def test_every_url_that_the_configuration_knows_opens_a_store(url: str) -> None:
    """What `check` lets pass, `serve` can open."""
    await open_store(url, ManualClock()).close()


@pytest.mark.parametrize("url", ["etcd://host", "memory:", "memory://x", "", "MEMORY://"])
def test_an_unknown_url_is_a_fault_of_the_configuration(url: str) -> None:
    """It names the field, and what would be known."""
    with pytest.raises(ConfigError, match=r"state: .*known: memory://, redis://"):
        open_store(url, ManualClock())


@pytest.mark.parametrize("url", ["etcd://user:hunter2@host/0", "hunter2"])
def test_a_password_in_the_url_is_not_repeated(url: str) -> None:
    """Wherever it stands."""
    with pytest.raises(ConfigError) as raised:
        open_store(url, ManualClock())
    assert "hunter2" not in str(raised.value)
