"""
How the cost of a call to the server grows with what its books hold: it should not.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tests.bench.admissions import ENTITLEMENTS, HELD
from tests.bench.aligned import aligned
from tests.bench.books import Books, books, patient_store
from tests.bench.watched_redis import WatchedRedis, watched_redis

SIZES = (10, 1_000, 10_000)
CALLERS = 1
"""Each call is one operation, so that a call's whole cost shows."""


@dataclass(frozen=True, slots=True)
class Size:
    """What the books of a pool hold."""

    entitlements: int
    leases: int


CASES = (
    *(Size(entitlements, HELD) for entitlements in SIZES),
    *(Size(ENTITLEMENTS, leases) for leases in SIZES),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """
    One size in one round.

    Attributes:
        server_us: processor time of the server for a call, admissions and settlements alike.
        p50_us: median time of an admission.
    """

    server_us: float
    p50_us: float


Samples = Mapping[Size, Sequence[Sample]]


async def growth(
    *, rounds: int, seconds: float, server_core: int, say: Callable[[str], None]
) -> Samples:
    """The samples of each size, each round in another order."""
    samples: dict[Size, list[Sample]] = {size: [] for size in CASES}
    async with watched_redis() as server, patient_store(server.url) as store:
        os.sched_setaffinity(server.pid, {server_core})
        opened = {}
        for size in CASES:
            say(f"growth: {size}")
            name = f"{size.entitlements}-{size.leases}"
            opened[size] = books(store, name, entitlements=size.entitlements)
            await opened[size].publish()
            await opened[size].hold(size.leases)
        for number in range(rounds):
            say(f"growth: round {number + 1} of {rounds}")
            first = number % len(CASES)
            for size in CASES[first:] + CASES[:first]:
                samples[size].append(await _sample(opened[size], server, seconds))
    return samples


async def _sample(opened: Books, server: WatchedRedis, seconds: float) -> Sample:
    before = await server.work()
    busy = await opened.busy(CALLERS, seconds)
    work = (await server.work()).since(before)
    return Sample(work.cpu_s * 1e6 / work.calls, busy.percentile_us(50))


def table(samples: Samples) -> str:
    """One line for each size; the ratios are to the smallest of its kind, within each round."""
    rows = [
        ("entitlements", "leases held", "server CPU/call", "of first", "admission p50", "of first")
    ]
    for number, (size, taken) in enumerate(samples.items()):
        smallest = samples[CASES[number - number % len(SIZES)]]
        pairs = list(zip(taken, smallest, strict=True))
        rows.append(
            (
                f"{size.entitlements}",
                f"{size.leases}",
                f"{median(each.server_us for each in taken):.0f} us",
                f"{median(one.server_us / other.server_us for one, other in pairs):.2f}",
                f"{median(each.p50_us for each in taken):.0f} us",
                f"{median(one.p50_us / other.p50_us for one, other in pairs):.2f}",
            )
        )
    return aligned(rows)
