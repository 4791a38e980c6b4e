"""
The Prometheus metrics of several processes that are scraped as one.

Each worker keeps its counts in files of a folder that all of them share, and the process that watches the workers
renders the sums. No file is for gauges: these are made of the pools' reports, so that none outlives its worker.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, values
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from envoy_tokenpools.metrics import (
    CONFIG_RELOADS,
    RELOADED,
    Family,
    new_counter,
    rendered,
    tell_build,
)
from envoy_tokenpools.observer import PoolReport

WORKER_RESTARTS = Family(
    "tokenpools_worker_restarts_total",
    ("worker",),
    "Times that a worker died and was started again. Look at once when it rises: its requests in flight got 503; the"
    " log says with which status it ended.",
)


def count_in_files(folder: Path, worker: int) -> None:
    """
    Let this process count in files of `folder`, as the worker of this number; before the first metric is made.

    The files go by the number and not by the process: a worker that is started again goes on counting where the last
    one ended, so that no count ever goes down, and there are no more files than workers.
    """
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values.ValueClass = values.MultiProcessValue(lambda: worker)  # type: ignore[no-untyped-call]


class WorkersMetrics:
    """
    The counts of all workers together, and what is known of each process that lives.

    Reloads are counted here: each of them is one, however many workers take it over. `render` may run in another
    thread.
    """

    def __init__(self, folder: Path, workers: int, pids: Callable[[], Mapping[int, int]]) -> None:
        """
        Nothing is counted yet.

        Args:
            folder: where the workers count (`count_in_files`).
            workers: their number.
            pids: process ids of those that live.
        """
        self._folder = folder
        self._pids = pids
        self._registry = CollectorRegistry()
        reloads = new_counter(self._registry, CONFIG_RELOADS)
        self._reloads = {succeeded: reloads.labels(word) for succeeded, word in RELOADED.items()}
        restarts = new_counter(self._registry, WORKER_RESTARTS)
        self._restarts = [restarts.labels(str(worker)) for worker in range(workers)]
        tell_build(self._registry)
        PlatformCollector(registry=self._registry)

    def config_reloaded(self, *, succeeded: bool) -> None:
        """Count a reload."""
        self._reloads[succeeded].inc()

    def restarted(self, worker: int) -> None:
        """Count a worker that was started again."""
        self._restarts[worker].inc()

    def render(self, reports: Sequence[PoolReport] = (), accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type."""
        return rendered(self, reports, accept)

    def collect(self) -> Iterator[Metric]:
        """The sums over all files, what is counted here, and what is known of each process."""
        # A file is empty for a moment when it is new.
        files = [str(file) for file in self._folder.glob("*.db") if file.stat().st_size]
        for metric in _sums(files):
            if f"{metric.name}_total" != CONFIG_RELOADS.name:
                yield metric
        yield from self._registry.collect()
        yield from self._processes()

    def _processes(self) -> Iterable[Metric]:
        """The usual metrics of a process, each with a series for each worker."""
        families: dict[str, Metric] = {}
        for worker, pid in sorted(self._pids().items()):
            for metric in ProcessCollector(pid=partial(int, pid), registry=None).collect():
                labels = {"worker": str(worker)}
                samples = [sample._replace(labels=labels) for sample in metric.samples]
                metric.samples = []
                families.setdefault(metric.name, metric).samples.extend(samples)
        return families.values()


def _sums(files: list[str]) -> Iterable[Metric]:
    merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
    return merged
