"""
What Redis and a second replica do to requests through a real Envoy.

The first replica has a core for itself, and a second one the next. Redis, Envoy and the load have all but the first: on
two cores the second replica competes with them, and requests per second say little of it; processor time for a request
says the same everywhere.
"""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.bench.aligned import aligned
from tests.bench.children import child, free_port
from tests.bench.load import Generator
from tests.bench.machine import cpu_seconds
from tests.bench.measure import LATENCY_S, SATURATING_CONNECTIONS, WARM_UP_S
from tests.bench.processors import Kind
from tests.bench.topology import Envoy, envoy
from tests.bench.traffic import CONFIG
from tests.bench.watched_redis import WatchedRedis, watched_redis

MEMORY = "memory"
CONTENDERS: Mapping[str, int] = {MEMORY: 1, "redis": 1, "redis-2": 2}
"""How many replicas each has."""

MOST_REPLICAS = max(CONTENDERS.values())

_PATIENCE = """
    on_store_error: deny
server: {store_deadline: 5s}
"""
"""The end of the configuration: nothing is decided without the store, however long that takes here."""


@dataclass(frozen=True, slots=True)
class Sample:
    """
    One contender in one round; `us` are microseconds of processor time for a request.

    Attributes:
        per_second: requests.
        filter_us: of the filter, all replicas together.
        redis_us: of the server.
        operations: of a call to the server, on average; 0 if there was none.
        p50_us: median time of a request when it is alone.
        p99_us: 99th percentile of that.
    """

    per_second: float
    filter_us: float
    redis_us: float
    operations: float
    p50_us: float
    p99_us: float


Samples = Mapping[str, Sequence[Sample]]


@dataclass(frozen=True, slots=True)
class _Stage:
    envoy: Envoy
    servers: Mapping[str, Sequence[int]]
    redis: WatchedRedis


async def replicas(
    load: Generator,
    *,
    rounds: int,
    seconds: float,
    cores: Sequence[int],
    say: Callable[[str], None],
) -> Samples:
    """The samples of each contender, each round in another order; replicas take `cores` in turn."""
    samples: dict[str, list[Sample]] = {name: [] for name in CONTENDERS}
    names = tuple(CONTENDERS)
    async with _stage(cores) as running:
        for name in names:
            port = running.envoy.ports[name]
            await load.run(port, connections=8, seconds=WARM_UP_S, stream=False)
        for number in range(rounds):
            say(f"Envoy: round {number + 1} of {rounds}")
            first = number % len(names)
            for name in names[first:] + names[:first]:
                samples[name].append(await _sample(running, load, name, seconds))
    return samples


@contextlib.asynccontextmanager
async def _stage(cores: Sequence[int]) -> AsyncIterator[_Stage]:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenpools-bench-")))
        redis = await stack.enter_async_context(watched_redis())
        servers = {}
        for name, count in CONTENDERS.items():
            config = folder / f"{name}.yaml"
            state = "memory://" if name == MEMORY else f"{redis.url}?prefix={name}"
            config.write_text(f"state: {state}\n{CONFIG}{_PATIENCE}", "utf-8")
            servers[name] = [
                await stack.enter_async_context(
                    child("tests.bench.processors", Kind.OURS.value, str(core), str(config))
                )
                for core in cores[:count]
            ]
        first = {name: one.port for name, (one, *_) in servers.items()}
        more = {name: [each.port for each in others] for name, (_, *others) in servers.items()}
        nobody = free_port()  # no streams are asked for
        running = await stack.enter_async_context(envoy(first, nobody, replicas=more))
        pids = {name: [each.pid for each in some] for name, some in servers.items()}
        yield _Stage(running, pids, redis)


async def _sample(running: _Stage, load: Generator, name: str, seconds: float) -> Sample:
    port, pids = running.envoy.ports[name], running.servers[name]
    before, cpu_s = await running.redis.work(), sum(map(cpu_seconds, pids))
    seen = await load.run(port, connections=SATURATING_CONNECTIONS, seconds=seconds, stream=False)
    cpu_s = sum(map(cpu_seconds, pids)) - cpu_s
    work = (await running.redis.work()).since(before)
    alone = await load.run(port, connections=1, seconds=LATENCY_S, stream=False)
    return Sample(
        per_second=seen.requests / seen.seconds,
        filter_us=cpu_s / seen.requests * 1e6,
        redis_us=work.cpu_s / seen.requests * 1e6,
        operations=2 * seen.requests / work.calls if name != MEMORY else 0.0,
        p50_us=alone.p50_us,
        p99_us=alone.p99_us,
    )


# ---------------------------------------------------------------------- what is shown

_HEAD = (
    *("", "replicas", "requests/s", "of memory", "filter CPU/request", "redis CPU/request"),
    *("operations/call", "added p50", "added p99"),
)


def table(samples: Samples) -> str:
    """One line for each contender; what is added is added to the embedded store's."""
    return aligned([_HEAD, *(_row(name, samples) for name in samples)])


def _row(name: str, samples: Samples) -> tuple[str, ...]:
    taken = samples[name]
    pairs = list(zip(taken, samples[MEMORY], strict=True))
    start = (
        name,
        f"{CONTENDERS[name]}",
        f"{median(each.per_second for each in taken):.0f}",
        f"{median(one.per_second / memory.per_second for one, memory in pairs):.2f}",
        f"{median(each.filter_us for each in taken):.0f} us",
    )
    if name == MEMORY:
        p50 = median(each.p50_us for each in taken) / 1e3
        p99 = median(each.p99_us for each in taken) / 1e3
        return (*start, "-", "-", f"({p50:.2f} ms)", f"({p99:.2f} ms)")
    return (
        *start,
        f"{median(each.redis_us for each in taken):.0f} us",
        f"{median(each.operations for each in taken):.1f}",
        f"{median(one.p50_us - memory.p50_us for one, memory in pairs) / 1e3:.2f} ms",
        f"{median(one.p99_us - memory.p99_us for one, memory in pairs) / 1e3:.2f} ms",
    )
