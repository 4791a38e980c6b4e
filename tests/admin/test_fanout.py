"""The admin of several workers: each of them is asked, on a real socket file, and one answer is given."""

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession, ClientTimeout

from envoy_tokenpools.admin import fanout
from envoy_tokenpools.admin.fanout import FanOut, fan_out_server
from envoy_tokenpools.admin.server import AdminServer, AppServer
from envoy_tokenpools.admin.state import read_reports, state_document
from envoy_tokenpools.metrics import PrometheusObserver
from envoy_tokenpools.workers_metrics import WorkersMetrics
from tests.support.reports import QWEN, SEARCH, SHED, FakeReporter

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Stage:
    """
    Three workers and the listener in front of them.

    Attributes:
        reporters: what each worker knows.
        workers: their own listeners.
        running: the workers that are to be asked; changed by tests.
        front: the listener.
        port: of it.
    """

    reporters: list[FakeReporter]
    workers: list[AdminServer]
    running: set[int]
    front: AppServer
    port: int

    async def get(self, path: str) -> tuple[int, str]:
        """Status and text of a page."""
        async with (
            ClientSession() as session,
            session.get(f"http://{LOOPBACK}:{self.port}{path}") as answer,
        ):
            return answer.status, await answer.text()

    async def json(self, path: str) -> tuple[int, Any]:
        """Status and document of a page."""
        async with (
            ClientSession() as session,
            session.get(f"http://{LOOPBACK}:{self.port}{path}") as answer,
        ):
            return answer.status, await answer.json()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, as the name of a socket file has to be."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[Stage]:
    """All of them run."""
    async with contextlib.AsyncExitStack() as stack:
        paths = [folder / str(number) for number in range(3)]
        reporters = [FakeReporter() for _ in paths]
        workers = [AdminServer(reporter, PrometheusObserver()) for reporter in reporters]
        for worker, path in zip(workers, paths, strict=True):
            await worker.start_on_socket(path)
            stack.push_async_callback(worker.stop)
        running = {0, 1, 2}
        front = fan_out_server(
            FanOut(paths, lambda: running), WorkersMetrics(folder, len(paths), dict)
        )
        port = await front.start(LOOPBACK, 0)
        stack.push_async_callback(front.stop)
        yield Stage(reporters, workers, running, front, port)


@pytest.fixture
async def hangs(
    stage: Stage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Puts in the place of a worker one that takes questions and answers none; nobody waits long for it."""
    monkeypatch.setattr(fanout, "_TIMEOUT", ClientTimeout(total=0.3))
    over = asyncio.Event()

    async def silence(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    async with contextlib.AsyncExitStack() as stack:

        async def hang(worker: int) -> None:
            await stage.workers[worker].stop()
            await stack.enter_async_context(
                await asyncio.start_unix_server(silence, folder / str(worker))
            )

        yield hang
        over.set()


async def test_the_state_has_each_pool_once_and_everybody_who_waits(stage: Stage) -> None:
    """The books are shared; who waits does so in one worker."""
    stage.reporters[2].fresh = [replace(QWEN, waiting=5, oldest_wait_ms=9_000)]
    status, document = await stage.json("/state")
    assert status == 200
    (pool,) = document["pools"]
    assert pool["in_use"]["in_flight"] == 4
    assert (pool["waiting"], pool["oldest_wait_ms"]) == (1 + 1 + 5, 9_000)
    assert [reporter.refreshes for reporter in stage.reporters] == [1, 1, 1]


async def test_the_document_is_that_of_one_process(stage: Stage) -> None:
    """The page, and operators' scripts, cannot tell the difference."""
    stage.running.difference_update({1, 2})
    _, document = await stage.json("/state")
    one = state_document(document["version"], [QWEN])
    assert document == msgspec.json.decode(msgspec.json.encode(one))


async def test_a_scrape_has_the_gauges_of_shared_pools_once(stage: Stage) -> None:
    """Three workers do not make three times the capacity."""
    status, text = await stage.get("/metrics")
    assert status == 200
    assert 'tokenpools_in_flight{entitlement="search",pool="qwen"} 2.0\n' in text
    assert 'tokenpools_waiting{entitlement="search",pool="qwen"} 3.0\n' in text
    assert 'tokenpools_capacity{pool="qwen",resource="concurrency"} 16.0\n' in text


async def test_a_decision_is_explained_by_whichever_worker_knows(stage: Stage) -> None:
    """And by the one that decided last where several do."""
    for reporter in stage.reporters:
        reporter.explanations.clear()
    assert (await stage.json("/explain?request_id=8f3c"))[0] == 404
    stage.reporters[2].explanations["8f3c"] = SHED
    assert (await stage.json("/explain?request_id=8f3c"))[1]["outcome"] == "shed"
    stage.reporters[0].explanations["8f3c"] = replace(SHED, age_ms=10, pool="newer")
    assert (await stage.json("/explain?request_id=8f3c"))[1]["pool"] == "newer"
    assert (await stage.json("/explain"))[0] == 400


@pytest.mark.parametrize("odd", ["a&request_id=b", "ü /?#", "%00"])
async def test_an_odd_id_reaches_the_workers_as_it_is(stage: Stage, odd: str) -> None:
    """A client may have chosen it."""
    stage.reporters[1].explanations[odd] = replace(SHED, request_id=odd)
    async with (
        ClientSession() as session,
        session.get(
            f"http://{LOOPBACK}:{stage.port}/explain", params={"request_id": odd}
        ) as answer,
    ):
        assert (await answer.json())["request_id"] == odd


async def test_all_have_to_be_ready(stage: Stage) -> None:
    """Who is not is named: it drains, it cannot decide, or it is away."""
    assert await stage.get("/readyz") == (200, "ok\n")
    stage.reporters[1].is_ready = False
    assert await stage.get("/readyz") == (503, "worker 1 is not ready\n")
    stage.workers[2].drain()
    stage.running.discard(0)
    assert await stage.get("/readyz") == (
        503,
        "worker 0 is not running; worker 1 is not ready; worker 2 is draining\n",
    )


async def test_what_a_ready_worker_remarks_is_passed_on(stage: Stage) -> None:
    """The store is the same for all of them."""
    stage.reporters[2].store_answers = False
    assert await stage.get("/readyz") == (200, "ok, but the shared store does not answer\n")


async def test_a_drain_of_all_is_told_at_once(stage: Stage) -> None:
    """Whatever the workers say."""
    stage.front.drain()
    assert await stage.get("/readyz") == (503, "draining\n")
    assert await stage.get("/healthz") == (200, "ok\n")


async def test_a_worker_that_is_away_is_no_reason_to_restart_all(stage: Stage) -> None:
    """It is being started again; neither is one that has no store."""
    stage.running.discard(0)
    stage.reporters[1].is_ready = False
    assert await stage.get("/healthz") == (200, "ok\n")


async def test_a_worker_that_hangs_is_named_and_holds_up_nothing(
    stage: Stage, hangs: Callable[[int], Awaitable[None]]
) -> None:
    """The others are asked all the same, and answer."""
    await hangs(1)
    assert await stage.get("/healthz") == (503, "worker 1 does not answer\n")
    assert await stage.get("/readyz") == (503, "worker 1 does not answer\n")
    status, document = await stage.json("/state")
    assert (status, document["pools"][0]["waiting"]) == (200, 2)
    assert (await stage.get("/metrics"))[0] == 200
    assert (await stage.json("/explain?request_id=8f3c"))[0] == 200
    status, document = await stage.json("/explain?request_id=other")
    assert status == 503
    assert "worker 1 does not answer" in document["error"]


async def test_when_nobody_answers_there_is_no_state_but_what_was_counted(stage: Stage) -> None:
    """No pools would be a lie; counters are in files."""
    for worker in stage.workers:
        await worker.stop()
    status, document = await stage.json("/state")
    assert (status, document) == (503, {"error": "No worker answers."})
    status, text = await stage.get("/metrics")
    assert status == 200
    assert 'tokenpools_worker_restarts_total{worker="0"} 0.0' in text
    assert "tokenpools_in_flight{" not in text


async def test_a_socket_that_a_dead_worker_left_is_taken_over(folder: Path) -> None:
    """The worker that is started again listens where the last one did."""
    path = folder / "0"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    again = AdminServer(FakeReporter(), PrometheusObserver())
    await again.start_on_socket(path)
    try:
        answer = await FanOut([path], lambda: [0]).ask(0, "/healthz")
        assert answer is not None
        assert answer.status == 200
    finally:
        await again.stop()


async def test_the_page_is_there(stage: Stage) -> None:
    """The same as of one process."""
    status, text = await stage.get("/")
    assert status == 200
    assert "Token pools" in text


def test_reports_are_read_as_they_were_written() -> None:
    """Every field, also of an entitlement."""
    body = msgspec.json.encode(state_document("1", [QWEN]))
    (pool,) = read_reports(body)
    assert replace(pool, entitlements=()) == replace(QWEN, entitlements=())
    assert list(pool.entitlements) == [SEARCH]
    for wrong in (b"", b"[]", b'{"pools": [{}]}', b'{"pools": [1]}'):
        with pytest.raises(msgspec.MsgspecError):
            read_reports(wrong)
