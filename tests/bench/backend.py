"""
A backend that only streams: `python -m tests.bench.backend CORE` prints its port and serves.

Raw and pre-built, so that its own work does not disturb what is measured.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from typing import cast

import uvloop

from tests.bench.children import die_with_parent
from tests.bench.traffic import CHUNK_GAP_S, stream_chunks

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_WRITES = tuple(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in stream_chunks())
_END = b"0\r\n\r\n"


class _Answerer(asyncio.Protocol):
    """Answers one request at a time on a kept connection; reads what Envoy sends and nothing else."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._left: Iterator[bytes] = iter(())
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not its subclasses

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if blank and length.strip().isdigit() and len(body) >= int(length):
            self._received.clear()
            self._left = iter(_WRITES)
            self._write(_HEAD)
            self._loop.call_later(CHUNK_GAP_S, self._next)

    def _next(self) -> None:
        piece = next(self._left, None)
        if piece is None:
            self._write(_END)
            return
        self._write(piece)
        self._loop.call_later(CHUNK_GAP_S, self._next)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Answerer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    die_with_parent()
    os.sched_setaffinity(0, {int(sys.argv[1])})
    uvloop.run(_serve())
