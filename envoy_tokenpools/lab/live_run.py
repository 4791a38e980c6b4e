"""
One run of a scenario in real time: a real Envoy, the filter's replicas, a backend and clients, in one process.
"""

import asyncio
from collections.abc import Callable, Iterable

from envoy_tokenpools.clock import SystemClock
from envoy_tokenpools.lab.arrivals import Arrival, arrivals
from envoy_tokenpools.lab.clients import Clients
from envoy_tokenpools.lab.http_line import http_line
from envoy_tokenpools.lab.live_backend import LiveBackend, existing, simulated
from envoy_tokenpools.lab.record import Attempt, RunRecord, Sample
from envoy_tokenpools.lab.replicas import Replicas, replicas
from envoy_tokenpools.lab.sampling import SAMPLE_MS, record_of, sample_of
from envoy_tokenpools.lab.scenario import Scenario
from envoy_tokenpools.lab.tasks import cancel_all

MIN_SAMPLE_MS = 40

Progress = Callable[[float], None]
"""Told now and then how many milliseconds of the run are over."""


async def run_live(
    scenario: Scenario,
    *,
    backend_url: str | None = None,
    trace: Iterable[Arrival] | None = None,
    replica_count: int = 1,
    progress: Progress | None = None,
) -> RunRecord:
    """
    Run it on loopback, and record what its clients and the filter saw.

    Args:
        scenario: what to run, scaled already. Several replicas share what its configuration's `state` is shared by.
        backend_url: a server that exists; None starts the scenario's engine.
        trace: what open loops send, in order of time; drawn from the scenario if None.
        replica_count: of the filter.
        progress: told how far it is.

    Raises:
        EnvoyError: there is no Envoy.
        StoreError: the books cannot be reached.
    """
    backend_of = simulated(scenario) if backend_url is None else existing(backend_url)
    clock = SystemClock()
    async with (
        backend_of as backend,
        replicas(scenario.config, replica_count, backend.url) as filter_,
        http_line(scenario, filter_.url, clock) as line,
    ):
        attempts: list[Attempt] = []
        clients = Clients(scenario, line, clock, attempts)
        watcher = _Watcher(scenario, filter_, backend, clients, progress)
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
        decisions = filter_.decisions()
    return record_of(scenario, attempts, watcher.samples, decisions)


class _Watcher:
    """Samples the pool, and changes its capacity by the scenario's schedule."""

    def __init__(
        self,
        scenario: Scenario,
        filter_: Replicas,
        backend: LiveBackend,
        clients: Clients,
        progress: Progress | None,
    ) -> None:
        self.samples: list[Sample] = []
        self._scenario = scenario
        self._filter = filter_
        self._backend = backend
        self._clients = clients
        self._progress = progress

    async def watch(self) -> None:
        """Sample until cancelled."""
        every_ms = max(MIN_SAMPLE_MS, SAMPLE_MS * self._scenario.time_scale)
        number = 0
        while True:
            burden = await self._backend.burden()
            # Each time as another replica sees it: all of them must see the same.
            report, *others = await self._filter.reports(number)
            at_ms = round(self._clients.elapsed_ms)
            self.samples.append(
                sample_of(
                    report, at_ms, others=others, running=burden.running, queued=burden.queued
                )
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
            await self._filter.reload(self._scenario.config_for(change.slots))
