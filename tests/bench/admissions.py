"""
What an admission and its settlement cost at the store's port: embedded, and on a server with and without batching.

This process has one core, the server another.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from envoy_tokenpools.clock import SystemClock
from envoy_tokenpools.store.memory import MemoryStore
from envoy_tokenpools.store.redis import calls
from tests.bench.aligned import aligned
from tests.bench.books import Books, books, patient_store
from tests.bench.watched_redis import WatchedRedis, Work, watched_redis

ENTITLEMENTS = 10
HELD = 100
"""Leases that are held all the time."""

CALLERS = (1, 8, 64)
WARM_UP_S = 0.2


@dataclass(frozen=True, slots=True)
class Contender:
    """
    A way to the books.

    Attributes:
        callers: at the same time.
        batch: operations that may go to the server in one call; None is the embedded store.
    """

    callers: int
    batch: int | None

    def __str__(self) -> str:
        if self.batch is None:
            return "memory"
        batching = "redis" if self.batch > 1 else "redis, no batching"
        return f"{batching}, {self.callers} callers"


EMBEDDED = Contender(1, None)
CONTENDERS = (
    EMBEDDED,
    *(Contender(callers, calls.MAX_OPERATIONS) for callers in CALLERS),
    *(Contender(callers, 1) for callers in CALLERS),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """
    One contender in one round; `us` are microseconds for an admission and its settlement together.

    Attributes:
        per_second: requests admitted and settled.
        p50_us: median time of an admission.
        p99_us: 99th percentile of that.
        client_us: processor time of the client.
        server_us: processor time of the server.
        operations: of a call to the server, on average.
    """

    per_second: float
    p50_us: float
    p99_us: float
    client_us: float
    server_us: float
    operations: float


Samples = Mapping[Contender, Sequence[Sample]]


async def admissions(
    *, rounds: int, seconds: float, server_core: int, say: Callable[[str], None]
) -> Samples:
    """The samples of each contender, each round in another order."""
    samples: dict[Contender, list[Sample]] = {each: [] for each in CONTENDERS}
    async with _stage(server_core) as (embedded, shared, server):
        for number in range(-1, rounds):
            say(f"store: round {number + 1} of {rounds}")
            first = number % len(CONTENDERS)
            for contender in CONTENDERS[first:] + CONTENDERS[:first]:
                opened = embedded if contender.batch is None else shared
                for_s = WARM_UP_S if number < 0 else seconds
                sample = await _sample(contender, opened, server, for_s)
                if number >= 0:
                    samples[contender].append(sample)
    return samples


@contextlib.asynccontextmanager
async def _stage(server_core: int) -> AsyncIterator[tuple[Books, Books, WatchedRedis]]:
    """The embedded books, those on the server, and the server."""
    async with watched_redis() as server, patient_store(server.url) as store:
        os.sched_setaffinity(server.pid, {server_core})
        embedded = books(MemoryStore(SystemClock()), "bench", entitlements=ENTITLEMENTS)
        shared = books(store, "bench", entitlements=ENTITLEMENTS)
        for each in (embedded, shared):
            await each.publish()
            await each.hold(HELD)
        yield embedded, shared, server


async def _sample(
    contender: Contender, opened: Books, server: WatchedRedis, seconds: float
) -> Sample:
    with _batches_of(contender.batch):
        before = await server.work()
        busy = await opened.busy(contender.callers, seconds)
        work = (await server.work()).since(before)
    each_us = 1e6 / busy.requests
    is_shared = contender.batch is not None
    return Sample(
        per_second=busy.requests / busy.seconds,
        p50_us=busy.percentile_us(50),
        p99_us=busy.percentile_us(99),
        client_us=busy.cpu_s * each_us,
        server_us=work.cpu_s * each_us if is_shared else 0.0,
        operations=_operations(busy.requests, work),
    )


def _operations(requests: int, work: Work) -> float:
    return 2 * requests / work.calls if work.calls else 0.0


@contextlib.contextmanager
def _batches_of(operations: int | None) -> Iterator[None]:
    """At most so many operations in a call."""
    before = calls.MAX_OPERATIONS
    calls.MAX_OPERATIONS = operations or before
    try:
        yield
    finally:
        calls.MAX_OPERATIONS = before


# ---------------------------------------------------------------------- what is shown

_HEAD = (
    *("", "requests/s", "admission p50", "p99"),
    *("client CPU", "server CPU", "operations/call"),
)


def table(samples: Samples) -> str:
    """One line for each contender."""
    return aligned([_HEAD, *(_row(contender, taken) for contender, taken in samples.items())])


def _row(contender: Contender, taken: Sequence[Sample]) -> tuple[str, ...]:
    def us(read: Callable[[Sample], float]) -> str:
        return f"{median(map(read, taken)):.0f} us"

    embedded = contender.batch is None
    return (
        str(contender),
        f"{median(each.per_second for each in taken):.0f}",
        us(lambda each: each.p50_us),
        us(lambda each: each.p99_us),
        us(lambda each: each.client_us),
        "-" if embedded else us(lambda each: each.server_us),
        "-" if embedded else f"{median(each.operations for each in taken):.1f}",
    )


def gains(samples: Samples) -> str:
    """What batching gains: medians of the ratios within each round."""
    rows = [("batching", "requests/s", "client CPU", "server CPU", "admission p50")]
    for callers in CALLERS:
        batched = samples[Contender(callers, calls.MAX_OPERATIONS)]
        single = samples[Contender(callers, 1)]
        pairs = list(zip(batched, single, strict=True))
        ratios = (
            median(one.per_second / other.per_second for one, other in pairs),
            median(other.client_us / one.client_us for one, other in pairs),
            median(other.server_us / one.server_us for one, other in pairs),
            median(other.p50_us / one.p50_us for one, other in pairs),
        )
        more, client, server, sooner = (f"{ratio:.1f}" for ratio in ratios)
        row = (f"{callers} callers", f"x {more}", f": {client}", f": {server}", f": {sooner}")
        rows.append(row)
    return aligned(rows)
