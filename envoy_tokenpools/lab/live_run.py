"""
One run of a scenario in real time: a real Envoy, the filter, a backend and clients, in one process.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from envoy_tokenpools.clock import SystemClock
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from envoy_tokenpools.lab.arrivals import Arrival, arrivals
from envoy_tokenpools.lab.clients import Clients
from envoy_tokenpools.lab.http_line import http_line
from envoy_tokenpools.lab.live_backend import LiveBackend, existing, simulated
from envoy_tokenpools.lab.record import Attempt, RunRecord, Sample
from envoy_tokenpools.lab.sampling import SAMPLE_MS, record_of, sample_of
from envoy_tokenpools.lab.scenario import Scenario
from envoy_tokenpools.lab.tasks import cancel_all
from envoy_tokenpools.server import FilterServer, Listen
from envoy_tokenpools.standalone import Standalone

MIN_SAMPLE_MS = 40

Progress = Callable[[float], None]
"""Told now and then how many milliseconds of the run are over."""


async def run_live(
    scenario: Scenario,
    *,
    backend_url: str | None = None,
    trace: Iterable[Arrival] | None = None,
    progress: Progress | None = None,
) -> RunRecord:
    """
    Run it on loopback, and record what its clients and the filter saw.

    Args:
        scenario: what to run, scaled already.
        backend_url: a server that exists; None starts the scenario's engine.
        trace: what open loops send, in order of time; drawn from the scenario if None.
        progress: told how far it is.

    Raises:
        EnvoyError: there is no Envoy.
    """
    backend_of = simulated(scenario) if backend_url is None else existing(backend_url)
    clock = SystemClock()
    async with (
        backend_of as backend,
        _filtered(scenario, backend) as both,
        http_line(scenario, both.url, clock) as line,
    ):
        attempts: list[Attempt] = []
        clients = Clients(scenario, line, clock, attempts)
        watcher = _Watcher(scenario, both.filter, backend, clients, progress)
        beside = [
            asyncio.create_task(watcher.watch()),
            asyncio.create_task(watcher.change_capacity()),
        ]
        try:
            await clients.run(arrivals(scenario) if trace is None else trace)
        finally:
            failures = await cancel_all(beside)
        for failure in failures:
            raise failure
    return record_of(scenario, attempts, watcher.samples)


@contextlib.asynccontextmanager
async def _filtered(scenario: Scenario, backend: LiveBackend) -> AsyncIterator[Standalone]:
    """Filter and Envoy on free loopback ports in front of the backend; gone afterwards, whatever happens."""
    both = Standalone(
        scenario.config,
        EnvoyOptions(backend_url=backend.url, listen_host="127.0.0.1", listen_port=0, admin_port=0),
        Listen("127.0.0.1:0", "127.0.0.1", None),
        envoy_log_level="error",
    )
    await both.start()
    try:
        yield both
    finally:
        await both.stop()


class _Watcher:
    """Samples the pool, and changes its capacity by the scenario's schedule."""

    def __init__(
        self,
        scenario: Scenario,
        server: FilterServer,
        backend: LiveBackend,
        clients: Clients,
        progress: Progress | None,
    ) -> None:
        self.samples: list[Sample] = []
        self._scenario = scenario
        self._server = server
        self._backend = backend
        self._clients = clients
        self._progress = progress

    async def watch(self) -> None:
        """Sample until cancelled."""
        every_ms = max(MIN_SAMPLE_MS, SAMPLE_MS * self._scenario.time_scale)
        gate = self._server.gate
        number = 0
        while True:
            burden = await self._backend.burden()
            await gate.refresh()
            (report,) = gate.report()
            at_ms = round(self._clients.elapsed_ms)
            self.samples.append(
                sample_of(report, at_ms, running=burden.running, queued=burden.queued)
            )
            if self._progress is not None:
                self._progress(at_ms)
            number += 1
            due_ms = number * every_ms - self._clients.elapsed_ms
            await asyncio.sleep(max(0.0, due_ms) / 1_000)

    async def change_capacity(self) -> None:
        """Let slots go and come back when it is time: the backend's, and what the filter knows of them."""
        for change in self._scenario.changes:
            await asyncio.sleep(max(0.0, change.at_ms - self._clients.elapsed_ms) / 1_000)
            self._backend.resize(change.slots)
            await self._server.reload(self._scenario.config_for(change.slots))
