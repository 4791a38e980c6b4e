"""
A filter that counts megabytes keeps answering: its health checks, and requests that are small.
"""

import asyncio
import contextlib
import itertools
import json
import statistics
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.replay import ReplayBackend, always, json_response
from tests.support.separate import Separate, separate
from tests.support.stack import GENEROUS

ANSWER = json_response(b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}')
PROMPTS = {
    "carets": "^" * 1_000_000,
    "zeros": "0" * 1_000_000,
    "blanks": " " * 999_999 + "x",
    "emoji": "👍" * 250_000,
    "prose": "The quick brown fox jumps over the lazy dog. " * 22_000,
}
"""A megabyte each; all but the last have no place where a text may be cut into pieces."""

SMALL_TRIES = 25
CHECK_EVERY_S = 0.02
HEALTH_P99_MS = 200
SMALL_MEDIAN_MS = 300
SLACK = 3
"""How much slower a busy machine may be than what is promised for a quiet one."""


def _request(prompt: str) -> bytes:
    body = json.dumps(
        {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": prompt}]},
        ensure_ascii=False,
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\nauthorization: Bearer key\r\n"
        f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _status_of(port: int, request: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        answer = await reader.read(-1)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return int(answer.split(b" ", 2)[1])


async def _small_requests(port: int) -> list[float]:
    """Milliseconds until each of some small requests was answered, one after the other."""
    loop = asyncio.get_running_loop()
    took_ms = []
    request = _request("hi")
    for _ in range(SMALL_TRIES):
        began = loop.time()
        assert await _status_of(port, request) == 200
        took_ms.append((loop.time() - began) * 1_000)
        await asyncio.sleep(0.1)
    return took_ms


async def _health_checks(port: int, took_ms: list[float]) -> None:
    """Check the filter's health over and over; milliseconds of each."""
    loop = asyncio.get_running_loop()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for number in itertools.count():
            began = loop.time()
            answer = await check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            if number:  # the first one connects
                took_ms.append((loop.time() - began) * 1_000)
            await asyncio.sleep(max(0.0, CHECK_EVERY_S - (loop.time() - began)))


async def _large_requests(port: int, prompt: str, counted: Iterator[int]) -> None:
    """Send the same large prompt again as soon as it is answered."""
    request = _request(prompt)
    while True:
        assert await _status_of(port, request) == 200
        next(counted)


@contextlib.asynccontextmanager
async def _going_on(*others: asyncio.Task[None]) -> AsyncIterator[None]:
    """Do something while these go on, none of which may end by itself."""
    try:
        yield
        for task in others:
            if task.done():
                task.result()
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _measure(running: Separate) -> tuple[list[float], list[float], int]:
    """Times of health checks and of small requests, and how many large ones were counted meanwhile."""
    health_ms: list[float] = []
    numbers = itertools.count()
    large = [
        asyncio.create_task(_large_requests(running.port, prompt, numbers))
        for prompt in PROMPTS.values()
    ]
    checks = asyncio.create_task(_health_checks(running.ext_proc_port, health_ms))
    async with _going_on(checks, *large):
        await asyncio.sleep(0.3)  # until all five are being counted
        small_ms = await _small_requests(running.port)
    return health_ms, small_ms, next(numbers)


@pytest.mark.timeout(180)
async def test_five_megabytes_of_the_worst_texts_hold_nobody_up(tmp_path: Path) -> None:
    """While they are counted, health checks and small requests are answered in a fraction of a second."""
    backend = ReplayBackend(always(ANSWER))
    try:
        async with separate(GENEROUS, await backend.start(), tmp_path) as running:
            assert await _status_of(running.port, _request("hi")) == 200
            health_ms, small_ms, counted = await _measure(running)
    finally:
        await backend.stop()
    p99_ms = statistics.quantiles(health_ms, n=100)[98]
    median_ms = statistics.median(small_ms)
    print(
        f"\n{counted} large prompts; {len(health_ms)} health checks: median "
        f"{statistics.median(health_ms):.1f} ms, p99 {p99_ms:.1f} ms, longest {max(health_ms):.1f} ms; "
        f"{len(small_ms)} small requests: median {median_ms:.1f} ms, longest {max(small_ms):.1f} ms"
    )
    assert counted >= len(PROMPTS)
    assert len(health_ms) >= 50
    assert p99_ms < HEALTH_P99_MS * SLACK
    assert median_ms < SMALL_MEDIAN_MS * SLACK
