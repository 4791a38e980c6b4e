"""
Thousands of streams that end anywhere, through a real Envoy: nothing stays behind in the filter.

`TOKENPOOLS_STRESS_STREAMS` says how many; a thousand take some seconds.
"""

import asyncio
import contextlib
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.replay import Received, ReplayBackend
from tests.support.separate import Separate, separate
from tests.support.stack import GENEROUS, NOTHING_IN_USE, standalone
from tests.support.streams import chunk, stream_of, total

STREAMS = int(os.environ.get("TOKENPOOLS_STRESS_STREAMS", "1000"))
WARM_UP_STREAMS = 300
AT_A_TIME = 64
MAX_GROWTH_BYTES = 20 * 1024 * 1024
"""Of the filter's resident memory after the warm-up, however many streams there were."""

CHUNKS = 20
_EVENTS = [stream_of(chunk({"content": f"word{number} "})) for number in range(CHUNKS)]
_END = stream_of(total(5, CHUNKS), "[DONE]")
_ANSWER_BYTES = sum(map(len, _EVENTS)) + 300
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"

BODY = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\nauthorization: Bearer key\r\n"
    b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(BODY)
) + BODY


async def _stream(_: Received, writer: asyncio.StreamWriter) -> None:
    """Twenty chunks, one after the other, in about 40 ms."""
    writer.write(_HEAD)
    for event in _EVENTS:
        writer.write(event)
        await writer.drain()
        await asyncio.sleep(0.002)
    writer.write(_END)


async def _leave_anywhere(port: int, rng: random.Random) -> str:
    """One request whose client leaves, or stays; says which of them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    kind = rng.choice(("in the request", "at once", "after a moment", "in the answer", "stays"))
    try:
        if kind == "in the request":
            writer.write(REQUEST[: rng.randrange(len(REQUEST))])
            await asyncio.sleep(rng.uniform(0, 0.01))
            return kind
        writer.write(REQUEST)
        await writer.drain()
        if kind == "after a moment":
            await asyncio.sleep(rng.uniform(0, 0.06))
        elif kind == "in the answer":
            with contextlib.suppress(asyncio.IncompleteReadError):
                await reader.readexactly(rng.randint(1, _ANSWER_BYTES))
        elif kind == "stays":
            answer = await reader.read(-1)
            assert b"[DONE]" in answer, answer[:300]
            assert b'"usage"' not in answer
        return kind
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _many(port: int, count: int, seed: int) -> Counter[str]:
    """So many streams, some of them at a time; how they left."""
    left = iter(range(count))
    kinds: Counter[str] = Counter()

    async def one_after_the_other(rng: random.Random) -> None:
        for _ in left:
            kinds[await _leave_anywhere(port, rng)] += 1

    await asyncio.gather(
        *(one_after_the_other(random.Random(seed + number)) for number in range(AT_A_TIME))
    )
    return kinds


async def _until(condition: Callable[[], Awaitable[bool]], within_s: float = 1.0) -> bool:
    """Whether it comes true in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not await condition():
        if loop.time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


@contextlib.asynccontextmanager
async def _backend() -> AsyncIterator[str]:
    backend = ReplayBackend(_stream)
    try:
        yield await backend.start()
    finally:
        await backend.stop()


async def _check_books(running: Separate) -> None:
    async def nothing_in_use() -> bool:
        return bool((await running.state())["in_use"] == NOTHING_IN_USE)

    assert await _until(nothing_in_use), (await running.state())["in_use"]
    admitted = await running.total("tokenpools_requests_total", outcome="admitted")
    assert await running.total("tokenpools_completions_total") == admitted


@pytest.mark.timeout(60 + STREAMS // 20)
async def test_streams_that_end_anywhere_leave_nothing_in_the_filter(tmp_path: Path) -> None:
    """Leases and reservations are back within 1 s, each settled once; memory, files and threads do not grow."""
    async with _backend() as url, separate(GENEROUS, url, tmp_path) as running:
        await _many(running.port, WARM_UP_STREAMS, seed=1)
        await _check_books(running)
        process = running.process
        resident_bytes, threads, files = _measured(running)
        kinds = await _many(running.port, STREAMS, seed=100)
        await _check_books(running)
        assert kinds.total() == STREAMS
        admitted = await running.total("tokenpools_requests_total", outcome="admitted")
        assert admitted >= STREAMS // 4
        for ending in ("completed", "client_gone"):
            ended = await running.total("tokenpools_completions_total", ending=ending)
            assert ended >= STREAMS // 10, ending
        growth_bytes = process.memory_info().rss - resident_bytes
        print(f"\n{STREAMS} streams ({dict(kinds)}), {growth_bytes / 1024**2:.1f} MB more")
        assert growth_bytes < MAX_GROWTH_BYTES
        _, threads_after, files_after = _measured(running)
        assert threads_after <= threads + 1
        # Envoy may have opened another connection.
        assert files_after <= files + 4


def _measured(running: Separate) -> tuple[int, int, int]:
    """Resident memory, threads and open files of the filter."""
    process = running.process
    return process.memory_info().rss, process.num_threads(), process.num_fds()


async def test_streams_that_end_anywhere_leave_no_task() -> None:
    """In the filter's event loop there are as many tasks afterwards as before, within 1 s."""
    async with _backend() as url, standalone(GENEROUS, url) as both:
        port = both.envoy.listen_port
        await _many(port, AT_A_TIME, seed=1)

        async def only_as_many_tasks() -> bool:
            return len(asyncio.all_tasks()) <= tasks

        tasks = 0
        await _until(only_as_many_tasks)
        tasks = len(asyncio.all_tasks())
        await _many(port, WARM_UP_STREAMS, seed=100)
        assert await _until(only_as_many_tasks), asyncio.all_tasks()

        async def no_open_stream() -> bool:
            return both.filter._service.open_streams == 0

        assert await _until(no_open_stream), both.filter._service.open_streams
        assert not both.filter._service._tasks
        assert not both.filter.gate._reservations._tasks
