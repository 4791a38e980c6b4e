"""
The table, made of medians; a ratio is the median of the ratios within each round.
"""

from collections.abc import Callable, Sequence
from statistics import median

from tests.bench.measure import CONTENDERS, Sample
from tests.bench.processors import Kind
from tests.bench.topology import BARE

Samples = dict[str, list[Sample]]

_HEAD = (
    *("", "requests/s", "of no-op", "CPU/request", "messages", "core busy"),
    *("added p50", "added p99", "CPU/chunk"),
)


def table(samples: Samples) -> str:
    """One line for each contender."""
    rows = [_HEAD, *(_row(name, samples) for name in CONTENDERS)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def ratio(samples: Samples, name: str, to: str) -> float:
    """Requests per second of one contender by another's."""
    pairs = zip(samples[name], samples[to], strict=True)
    return median(one.requests_per_second / other.requests_per_second for one, other in pairs)


def foreign_cores(samples: Samples) -> float:
    """Cores that other processes took while requests per second were measured."""
    return median(sample.foreign for taken in samples.values() for sample in taken)


def _row(name: str, samples: Samples) -> tuple[str, ...]:
    taken = samples[name]
    throughput = f"{median(sample.requests_per_second for sample in taken):.0f}"
    of_no_op = f"{ratio(samples, name, Kind.NO_OP.value):.2f}"
    if name == BARE:
        p50 = median(sample.p50_us for sample in taken)
        p99 = median(sample.p99_us for sample in taken)
        alone = f"({p50 / 1e3:.2f} ms)", f"({p99 / 1e3:.2f} ms)"
        return (name, throughput, of_no_op, "-", "-", "-", *alone, "-")
    return (
        name,
        throughput,
        of_no_op,
        f"{_median(taken, lambda sample: sample.cpu_us_per_request):.0f} us",
        f"{median(sample.messages_per_request for sample in taken):.1f}",
        f"{_median(taken, lambda sample: sample.busy):.0%}",
        f"{_added(samples, name, lambda sample: sample.p50_us):.2f} ms",
        f"{_added(samples, name, lambda sample: sample.p99_us):.2f} ms",
        f"{_median(taken, lambda sample: sample.cpu_us_per_chunk):.0f} us",
    )


def _median(taken: Sequence[Sample], read: Callable[[Sample], float | None]) -> float:
    return median(value for sample in taken if (value := read(sample)) is not None)


def _added(samples: Samples, name: str, read: Callable[[Sample], float]) -> float:
    """Milliseconds beyond bare Envoy."""
    pairs = zip(samples[name], samples[BARE], strict=True)
    return median(read(one) - read(bare) for one, bare in pairs) / 1e3
