"""
A load generator for where wrk is missing: `python -m tests.bench.python_load PORT PATH CONNECTIONS SECONDS`.

Raw HTTP/1.1 on uvloop: it finds the end of an answer and its status, and reads nothing else of it.
"""

import asyncio
import json
import sys
import time
from functools import partial
from typing import cast

import uvloop

from tests.bench.traffic import API_KEY, STREAM_PATH, request_body


class _Connection(asyncio.Protocol):
    """One connection that always has one request on the way."""

    def __init__(self, request: bytes, durations_us: list[float], stop_at: float) -> None:
        self._request = request
        self._durations_us = durations_us
        self._stop_at = stop_at
        self._answer = bytearray()
        self._began = 0.0
        self._transport: asyncio.Transport | None = None
        self.failures = 0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not its subclasses
        self._send()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.over.done():
            self.failures += 1
            self.over.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if not _is_whole(self._answer):
            return
        now = time.perf_counter()
        self._durations_us.append((now - self._began) * 1e6)
        self.failures += not self._answer.startswith(b"HTTP/1.1 200")
        self._answer.clear()
        if now < self._stop_at:
            self._send()
        elif not self.over.done():
            self.over.set_result(None)

    def _send(self) -> None:
        assert self._transport is not None
        self._began = time.perf_counter()
        self._transport.write(self._request)


def _itself(connection: _Connection) -> _Connection:
    return connection


def _is_whole(answer: bytearray) -> bool:
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = answer[:end].lower()
    if b"transfer-encoding: chunked" in head:
        return answer.endswith(b"\r\n0\r\n\r\n")
    length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
    return len(answer) - end - 4 >= int(length or 0)


async def _load(port: int, path: str, connections: int, seconds: float) -> None:
    body = request_body(stream=path == STREAM_PATH)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {API_KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    durations_us: list[float] = []
    began = time.perf_counter()
    opened = []
    for _ in range(connections):
        connection = _Connection(head.encode() + body, durations_us, began + seconds)
        await loop.create_connection(partial(_itself, connection), "127.0.0.1", port)
        opened.append(connection)
    await asyncio.gather(*(connection.over for connection in opened))
    durations_us.sort()
    last = len(durations_us) - 1
    summary = {
        "requests": len(durations_us),
        "seconds": time.perf_counter() - began,
        "failures": sum(connection.failures for connection in opened),
        "p50_us": durations_us[last // 2] if durations_us else 0.0,
        "p99_us": durations_us[last * 99 // 100] if durations_us else 0.0,
    }
    print("JSON", json.dumps(summary))


if __name__ == "__main__":
    uvloop.run(_load(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
