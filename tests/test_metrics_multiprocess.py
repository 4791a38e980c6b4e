"""What Prometheus sees of several processes that are scraped as one."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import prometheus_client.values
import pytest

from envoy_tokenpools.metrics import FAMILIES, PrometheusObserver
from envoy_tokenpools.observer import PoolReport
from envoy_tokenpools.workers_metrics import WorkersMetrics
from tests.support.reports import QWEN
from tests.support.scrapes import Samples, parse_openmetrics, parse_text, value

PROGRAM = """
import os, signal, sys
from pathlib import Path
from envoy_tokenpools.workers_metrics import count_in_files
count_in_files(Path(sys.argv[1]), int(sys.argv[2]))
from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.metrics import PrometheusObserver
from envoy_tokenpools.observer import Decided, FirstToken, Outcome
metrics = PrometheusObserver()
for _ in range(int(sys.argv[3])):
    metrics.decided(Decided(Outcome.ADMITTED, "", "qwen", "search", ServiceClass.SPOT, 100, 180, 400))
    metrics.first_token(FirstToken("qwen", ServiceClass.SPOT, 120))
metrics.config_reloaded(succeeded=True)
metrics.store_failed("reserve")
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A worker that counts, and is killed without a chance to put anything in order."""


def counted(folder: Path, worker: int, requests: int) -> None:
    """Let a worker of this number count so many requests in `folder`, and die."""
    command = (sys.executable, "-c", PROGRAM, str(folder), str(worker), str(requests))
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr


def watching(
    folder: Path, workers: int = 2, pids: Callable[[], dict[int, int]] = dict
) -> WorkersMetrics:
    """The metrics of so many workers, none of which lives unless `pids` says so."""
    return WorkersMetrics(folder, workers, pids)


def scraped(metrics: WorkersMetrics, *reports: PoolReport) -> Samples:
    """All samples of a scrape, by name and labels that are not empty; each is there once."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in parse_text(metrics.render(reports)[0].decode()):
        for sample in family.samples:
            labels = frozenset((key, text) for key, text in sample.labels.items() if text)
            assert (sample.name, labels) not in found
            found[sample.name, labels] = sample.value
    return found


def types_of(metrics: PrometheusObserver | WorkersMetrics) -> dict[str, str]:
    """The families of an OpenMetrics scrape with their types."""
    body, content_type = metrics.render([QWEN], "application/openmetrics-text")
    assert content_type.startswith("application/openmetrics-text")
    return {family.name: family.type for family in parse_openmetrics(body.decode())}


WHO = {
    "pool": "qwen",
    "entitlement": "search",
    "service_class": "spot",
    "outcome": "admitted",
}


def test_counters_and_histograms_are_the_sums_of_all_workers(tmp_path: Path) -> None:
    """Each request is counted once, whichever worker it met; buckets, sum and count agree."""
    counted(tmp_path, 0, 3)
    counted(tmp_path, 1, 5)
    found = scraped(watching(tmp_path))
    assert value(found, "tokenpools_requests_total", **WHO) == 8
    series = {"pool": "qwen", "service_class": "spot"}
    name = "tokenpools_time_to_first_token_seconds"
    assert value(found, f"{name}_count", **series) == 8
    assert value(found, f"{name}_bucket", **series, le="+Inf") == 8
    assert value(found, f"{name}_bucket", **series, le="0.1") == 0
    assert value(found, f"{name}_sum", **series) == pytest.approx(8 * 0.12)
    assert value(found, "tokenpools_store_errors_total", kind="reserve") == 2


def test_a_worker_that_is_killed_and_started_again_counts_on(tmp_path: Path) -> None:
    """Nothing ever goes down, though nothing was closed; and no file is added for a new process."""
    metrics = watching(tmp_path)
    counted(tmp_path, 0, 3)
    counted(tmp_path, 1, 5)
    before, files = scraped(metrics), sorted(tmp_path.iterdir())
    for _ in range(2):
        counted(tmp_path, 0, 1)
    after = scraped(metrics)
    assert value(after, "tokenpools_requests_total", **WHO) == 10
    counts = ("_total", "_bucket", "_count", "_sum")
    assert [key for key in before if key[0].endswith(counts) and after[key] < before[key]] == []
    assert sorted(tmp_path.iterdir()) == files
    assert len(files) == 2 * 2


def test_gauges_are_of_the_report_alone(tmp_path: Path) -> None:
    """However many workers there are, a shared pool is there once; without a report it is not there."""
    counted(tmp_path, 0, 1)
    counted(tmp_path, 1, 1)
    metrics = watching(tmp_path)
    found = scraped(metrics, replace(QWEN, degraded=False))
    who = {"pool": "qwen", "entitlement": "search"}
    assert value(found, "tokenpools_in_flight", **who) == 2
    assert value(found, "tokenpools_capacity", pool="qwen", resource="concurrency") == 16
    names = {name for name, _ in scraped(metrics)}
    assert names.isdisjoint({"tokenpools_in_flight", "tokenpools_capacity", "tokenpools_degraded"})


def test_a_reload_is_one_reload(tmp_path: Path) -> None:
    """Whoever watches the workers counts it, and both results are there from the start."""
    counted(tmp_path, 0, 1)
    counted(tmp_path, 1, 1)
    metrics = watching(tmp_path)
    name = "tokenpools_config_reloads_total"
    assert value(scraped(metrics), name, result="success") == 0
    assert value(scraped(metrics), name, result="failure") == 0
    metrics.config_reloaded(succeeded=True)
    metrics.config_reloaded(succeeded=False)
    assert value(scraped(metrics), name, result="success") == 1
    assert value(scraped(metrics), name, result="failure") == 1


def test_restarts_are_counted_for_each_worker_from_the_start(tmp_path: Path) -> None:
    """The first one is an increase."""
    metrics = watching(tmp_path)
    name = "tokenpools_worker_restarts_total"
    assert value(scraped(metrics), name, worker="0") == 0
    metrics.restarted(1)
    found = scraped(metrics)
    assert (value(found, name, worker="0"), value(found, name, worker="1")) == (0, 1)


def test_what_is_known_of_a_process_has_its_worker_and_goes_with_it(tmp_path: Path) -> None:
    """Nothing is told of a process that is gone."""
    pids = {0: os.getpid(), 1: os.getppid()}
    metrics = watching(tmp_path, pids=lambda: pids)
    found = scraped(metrics)
    for worker in ("0", "1"):
        assert value(found, "process_cpu_seconds_total", worker=worker) is not None
        assert value(found, "process_resident_memory_bytes", worker=worker)
    pids[1] = 2**22 + 1  # above the highest there can be
    found = scraped(metrics)
    assert value(found, "process_cpu_seconds_total", worker="0") is not None
    assert value(found, "process_cpu_seconds_total", worker="1") is None
    pids.clear()
    assert [name for name, _ in scraped(metrics) if name.startswith("process_")] == []


def test_both_formats_can_be_parsed_and_have_the_names_of_one_process(tmp_path: Path) -> None:
    """What an operator has for one process, dashboards and alerts, fits several too."""
    counted(tmp_path, 0, 2)
    several = types_of(watching(tmp_path))
    one = types_of(PrometheusObserver())
    untold = {
        "tokenpools_completions",
        "tokenpools_wait_seconds",
        "tokenpools_estimate_error_ratio",
    }
    ours = {name: kind for name, kind in one.items() if name.startswith("tokenpools_")}
    assert len(ours) == len(FAMILIES) + 1
    assert several == {name: kind for name, kind in ours.items() if name not in untold} | {
        "tokenpools_worker_restarts": "counter",
        "python_info": "gauge",
    }


def test_a_file_that_is_only_just_being_made_is_no_error(tmp_path: Path) -> None:
    """A worker that starts while a scrape runs."""
    (tmp_path / "counter_1.db").touch()
    counted(tmp_path, 0, 1)
    assert value(scraped(watching(tmp_path)), "tokenpools_requests_total", **WHO) == 1


def test_scrapes_while_workers_count_never_go_down_or_fail(tmp_path: Path) -> None:
    """Many readings during many writes: each is at least the one before."""
    metrics = watching(tmp_path)
    writing = threading.Thread(target=counted, args=(tmp_path, 0, 20_000))
    writing.start()
    seen = []
    while writing.is_alive():
        seen.append(value(scraped(metrics), "tokenpools_requests_total", **WHO) or 0)
    writing.join()
    seen.append(value(scraped(metrics), "tokenpools_requests_total", **WHO) or 0)
    assert seen == sorted(seen)
    assert seen[-1] == 20_000


def test_a_process_that_was_told_nothing_counts_in_memory() -> None:
    """One process needs no files and no locks between processes."""
    assert not prometheus_client.values.ValueClass._multiprocess
    metrics = PrometheusObserver()
    metrics.config_reloaded(succeeded=True)
    assert b'tokenpools_config_reloads_total{result="success"} 1.0' in metrics.render()[0]
