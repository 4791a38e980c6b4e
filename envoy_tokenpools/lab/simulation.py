"""
One run of a scenario in virtual time: the real gate, store and policy, the engine model, and clients.

What differs from a run on a real Envoy: the way between them takes no time, and prompts are counted exactly.
"""

import asyncio
import gc
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

from envoy_tokenpools.gate.gate import Gate
from envoy_tokenpools.lab.arrivals import Arrival, arrivals
from envoy_tokenpools.lab.clients import Clients, Sink
from envoy_tokenpools.lab.record import Attempt, RunRecord, Sample
from envoy_tokenpools.lab.sampling import SAMPLE_MS, record_of, sample_of
from envoy_tokenpools.lab.scenario import Scenario
from envoy_tokenpools.lab.simulated_line import SimulatedLine
from envoy_tokenpools.lab.tasks import cancel_all
from envoy_tokenpools.lab.virtual_engine import VirtualEngine
from envoy_tokenpools.lab.virtual_loop import VirtualClock, VirtualLoop
from envoy_tokenpools.observer import Decided, FirstToken, Settled
from envoy_tokenpools.store.memory import MemoryStore

MAX_SAMPLES = 1_500
"""A run that is longer than so many of `SAMPLE_MS` is looked at so often in all."""

LONG_RUN_MS = 3_600_000
LONG_RUN_SAMPLES = 288
LONG_ROUND_S = 5.0
"""A run of hours is looked at every few minutes, and its house looked after less often: ticks are 5 s apart or more."""

GC_THRESHOLD = 200_000
"""What a run makes is garbage by reference counts, or its record: to look for cycles among it all is in vain."""


def simulate(
    scenario: Scenario, *, trace: Iterable[Arrival] | None = None, sink: Sink | None = None
) -> RunRecord:
    """
    Run it, and record what its clients and the gate saw. The same scenario gives the same record.

    Args:
        scenario: what to run.
        trace: what open loops send, in order of time; drawn from the scenario if None.
        sink: takes the attempts in place of the record, which then has none.
    """
    attempts: list[Attempt] = []
    loop = VirtualLoop()
    thresholds = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD, *thresholds[1:])
    try:
        clock = VirtualClock(loop)
        samples = loop.run(_run(scenario, trace, clock, attempts if sink is None else sink))
    finally:
        gc.set_threshold(*thresholds)
        loop.close()
    return record_of(scenario, attempts, samples)


async def _run(
    scenario: Scenario, trace: Iterable[Arrival] | None, clock: VirtualClock, sink: Sink
) -> list[Sample]:
    gate = _gate(scenario, clock)
    await gate.house.start()
    engine = VirtualEngine(scenario.engine, clock)
    clients = Clients(scenario, SimulatedLine(scenario, gate, engine, clock), clock, sink)
    samples: list[Sample] = []
    beside = [
        asyncio.create_task(_look_after(gate, scenario)),
        asyncio.create_task(_sample(gate, engine, clock, scenario, samples)),
        asyncio.create_task(_change_capacity(gate, engine, clock, scenario)),
    ]
    try:
        await clients.run(arrivals(scenario) if trace is None else trace)
    finally:
        failures = await cancel_all(beside)
    await gate.close()
    for failure in failures:
        raise failure
    return samples


def _gate(scenario: Scenario, clock: VirtualClock) -> Gate:
    numbers = itertools.count()
    # Nobody will ask why: the record says what became of each request.
    server = replace(scenario.config.server, explain_last=0)
    return Gate(
        replace(scenario.config, server=server),
        store=MemoryStore(clock),
        counter=_NoText(),
        clock=clock,
        observer=_Nobody(),
        new_lease_id=lambda: f"{next(numbers):x}",
        jitter=random.Random(f"{scenario.seed} jitter").random,
    )


async def _look_after(gate: Gate, scenario: Scenario) -> None:
    if scenario.duration_ms < LONG_RUN_MS:
        await gate.house.run()
    while True:
        await gate.house.round()
        await asyncio.sleep(LONG_ROUND_S)


async def _sample(
    gate: Gate,
    engine: VirtualEngine,
    clock: VirtualClock,
    scenario: Scenario,
    samples: list[Sample],
) -> None:
    samples_max = MAX_SAMPLES if scenario.duration_ms < LONG_RUN_MS else LONG_RUN_SAMPLES
    every_ms = max(SAMPLE_MS * scenario.time_scale, scenario.duration_ms / samples_max)
    while True:
        await gate.refresh()
        (report,) = gate.report()
        samples.append(
            sample_of(report, clock.now_ms(), running=engine.running, queued=engine.waiting)
        )
        await asyncio.sleep(every_ms / 1_000)


async def _change_capacity(
    gate: Gate, engine: VirtualEngine, clock: VirtualClock, scenario: Scenario
) -> None:
    for change in scenario.changes:
        await asyncio.sleep(max(0, change.at_ms - clock.now_ms()) / 1_000)
        engine.resize(change.slots)
        await gate.reload(scenario.config_for(change.slots))


class _NoText:
    """Counts nothing: simulated prompts state their length."""

    def count_now(self, _: str, texts: Sequence[str]) -> int:
        return len(texts)

    async def count(self, _: str, texts: Sequence[str]) -> int:
        return len(texts)


class _Nobody:
    """Is told, and keeps nothing: the clients' record says it all."""

    def decided(self, event: Decided) -> None:
        pass

    def settled(self, event: Settled) -> None:
        pass

    def first_token(self, event: FirstToken) -> None:
        pass

    def waited(self, event: object) -> None:
        pass

    def store_failed(self, operation: str) -> None:
        pass

    def config_reloaded(self, *, succeeded: bool) -> None:
        pass
