"""
The measurement: every contender in every round, each round in another order.

The ext_proc servers have one core, everything else has the others. All processes run from beginning to end, idle while
it is not their turn, so that what disturbs the machine disturbs all contenders alike.
"""

import asyncio
import contextlib
import os
import resource
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.bench.children import child
from tests.bench.load import Generator, Load
from tests.bench.machine import cpu_seconds
from tests.bench.processors import Kind
from tests.bench.topology import BARE, Envoy, envoy
from tests.bench.traffic import CONFIG

SATURATING_CONNECTIONS = 64
STREAMING_CONNECTIONS = 16
"""With a chunk each 5 ms some 3,000 chunks per second: busy, but no server falls behind and lets chunks pile up."""

WARM_UP_S = 1.0
LATENCY_S = 1.0

CONTENDERS = (BARE, *(kind.value for kind in Kind))


@dataclass(frozen=True, slots=True)
class Sample:
    """
    One contender in one round.

    Attributes:
        requests_per_second: with the server's core saturated.
        cpu_us_per_request: processor time of the server; None without one.
        messages_per_request: that Envoy sent to the server.
        busy: share of its core that the server used; None without one.
        foreign: cores that other processes took meanwhile.
        p50_us: median time of a request when it is alone.
        p99_us: 99th percentile of that.
        cpu_us_per_chunk: processor time of the server for a message of a streamed answer; None without one.
    """

    requests_per_second: float
    cpu_us_per_request: float | None
    messages_per_request: float
    busy: float | None
    foreign: float
    p50_us: float
    p99_us: float
    cpu_us_per_chunk: float | None


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything that runs: the Envoy and the servers' processes by contender."""

    envoy: Envoy
    servers: Mapping[str, int]
    backend: int

    def own_cpu_seconds(self) -> float:
        """Processor time of all that belongs to the benchmark, ended generators included."""
        running = (self.envoy.pid, self.backend, *self.servers.values(), os.getpid())
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return sum(map(cpu_seconds, running)) + ended.ru_utime + ended.ru_stime


@contextlib.asynccontextmanager
async def stage(server_core: int) -> AsyncIterator[Stage]:
    """
    Start all contenders; this process, and what it starts, leaves `server_core` to the servers.
    """
    load_cores = os.sched_getaffinity(0) - {server_core}
    if not load_cores:
        raise RuntimeError("two cores are needed: one for the server, one for Envoy and the load")
    os.sched_setaffinity(0, load_cores)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenpools-bench-")))
        config = folder / "config.yaml"
        config.write_text(CONFIG, "utf-8")
        backend = await stack.enter_async_context(
            child("tests.bench.backend", str(min(load_cores)))
        )
        servers = {
            kind.value: await stack.enter_async_context(
                child("tests.bench.processors", kind.value, str(server_core), str(config))
            )
            for kind in Kind
        }
        ports = {name: server.port for name, server in servers.items()}
        running = await stack.enter_async_context(envoy(ports, backend.port))
        pids = {name: server.pid for name, server in servers.items()}
        yield Stage(running, pids, backend.pid)


async def rounds(
    running: Stage, load: Generator, *, count: int, seconds: float, say: Callable[[str], None]
) -> dict[str, list[Sample]]:
    """The samples of each contender, after a warm-up."""
    samples: dict[str, list[Sample]] = {name: [] for name in CONTENDERS}
    for name in CONTENDERS:
        for stream in (False, True):
            port = running.envoy.ports[name]
            await load.run(port, connections=8, seconds=WARM_UP_S, stream=stream)
    for number in range(count):
        say(f"round {number + 1} of {count}")
        first = number % len(CONTENDERS)
        for name in CONTENDERS[first:] + CONTENDERS[:first]:
            samples[name].append(await _sample(running, load, name, seconds))
    return samples


async def _sample(running: Stage, load: Generator, name: str, seconds: float) -> Sample:
    plain = await _measured(running, load, name, SATURATING_CONNECTIONS, seconds, stream=False)
    alone = await load.run(
        running.envoy.ports[name], connections=1, seconds=LATENCY_S, stream=False
    )
    cpu_us_per_chunk = None
    if name != BARE:
        streams = await _measured(running, load, name, STREAMING_CONNECTIONS, seconds, stream=True)
        cpu_us_per_chunk = streams.cpu_s / max(1, streams.messages) * 1e6
    requests = plain.load.requests
    return Sample(
        requests_per_second=requests / plain.load.seconds,
        cpu_us_per_request=None if name == BARE else plain.cpu_s / requests * 1e6,
        messages_per_request=plain.messages / requests,
        busy=None if name == BARE else plain.cpu_s / plain.seconds,
        foreign=plain.foreign,
        p50_us=alone.p50_us,
        p99_us=alone.p99_us,
        cpu_us_per_chunk=cpu_us_per_chunk,
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    load: Load
    seconds: float
    cpu_s: float
    messages: int
    foreign: float


async def _measured(
    running: Stage, load: Generator, name: str, connections: int, seconds: float, *, stream: bool
) -> _Measured:
    """One load, with what the server and the rest of the machine did during it."""
    server = running.servers.get(name)
    loop = asyncio.get_running_loop()
    messages = await running.envoy.messages_sent(name)
    began, busy, own = loop.time(), _busy_seconds(), running.own_cpu_seconds()
    cpu_s = cpu_seconds(server) if server is not None else 0.0
    seen = await load.run(
        running.envoy.ports[name], connections=connections, seconds=seconds, stream=stream
    )
    cpu_s = cpu_seconds(server) - cpu_s if server is not None else 0.0
    elapsed = loop.time() - began
    foreign = (_busy_seconds() - busy) - (running.own_cpu_seconds() - own)
    return _Measured(
        load=seen,
        seconds=elapsed,
        cpu_s=cpu_s,
        messages=await running.envoy.messages_sent(name) - messages,
        foreign=max(0.0, foreign / elapsed),
    )


def _busy_seconds() -> float:
    """Processor time of the whole machine that was not idle, what the hypervisor took included."""
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - times.iowait)
