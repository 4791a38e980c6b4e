"""
The filter of a real-time run: one replica or several, all in this process, behind one real Envoy.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from envoy_tokenpools.config import Config
from envoy_tokenpools.envoyconf.child import EnvoyChild
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from envoy_tokenpools.errors import StoreError
from envoy_tokenpools.gate.gate import STORE_AWAY
from envoy_tokenpools.lab.record import Decisions
from envoy_tokenpools.metrics import REQUESTS, PrometheusObserver
from envoy_tokenpools.observer import Outcome, PoolReport
from envoy_tokenpools.server import FilterServer, Listen


@dataclass(frozen=True, slots=True)
class Replicas:
    """
    What runs.

    Attributes:
        servers: the replicas; each decides on its own requests, on the books that all share.
        url: of the Envoy that asks them.
    """

    servers: Sequence[FilterServer]
    url: str

    async def reload(self, config: Config) -> None:
        """Put a new configuration in force in all of them."""
        await asyncio.gather(*(server.reload(config) for server in self.servers))

    async def reports(self, first: int) -> Sequence[PoolReport]:
        """The one pool as each of them sees it, beginning with the replica `first`, which has just read the books."""
        count = len(self.servers)
        order = [self.servers[(first + each) % count].gate for each in range(count)]
        await order[0].refresh()
        return [gate.report()[0] for gate in order]

    def decisions(self) -> list[Decisions]:
        """What each of them has decided so far."""
        return [_decisions(server) for server in self.servers]


@contextlib.asynccontextmanager
async def replicas(config: Config, count: int, backend_url: str) -> AsyncIterator[Replicas]:
    """
    So many replicas and an Envoy on loopback, in front of a backend; gone afterwards, whatever happens.

    Raises:
        EnvoyError: there is no Envoy.
        StoreError: the books cannot be reached.
    """
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenpools-lab-"))
        options = EnvoyOptions(
            backend_url=backend_url,
            listen_host="127.0.0.1",
            listen_port=0,
            admin_port=0,
            ext_proc_unix_path=str(Path(folder, "filter")),
            workers=count,
        ).following(config)
        # What takes long is done before the replicas begin: it would make them late, and look dead to each other.
        servers = [
            FilterServer(config, Listen(address, admin_port=None))
            for address in options.ext_proc_addresses
        ]
        for server in servers:
            stack.push_async_callback(server.stop)
        envoy = EnvoyChild(options, log_level="error")
        await envoy.start()
        # It drains first, so that no request meets an absent filter.
        stack.push_async_callback(envoy.stop, drain_ms=config.server.drain_ms)
        for server in servers:
            await server.start()
        if not all(server.gate.store_answers for server in servers):
            raise StoreError("the server that keeps the books does not answer", transient=True)
        for server in servers:
            stack.push_async_callback(server.drain)
        yield Replicas(servers, f"http://127.0.0.1:{envoy.listen_port}")


def _decisions(server: FilterServer) -> Decisions:
    """By the replica's own metrics."""
    observer = server.gate.observer
    if not isinstance(observer, PrometheusObserver):
        raise AssertionError("a server's observer is its metrics")  # noqa: TRY004
    text = observer.render()[0].decode()
    counted = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == REQUESTS.name
        # which was admitted before, and is counted as that
        and sample.labels["outcome"] != Outcome.EVICTED.value
    ]
    alone = [sample for sample in counted if sample.labels["reason"] == STORE_AWAY]
    return Decisions(
        made=sum(round(sample.value) for sample in counted),
        alone=sum(round(sample.value) for sample in alone),
    )
