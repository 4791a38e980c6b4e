"""
A backend that answers each request with given raw bytes, and remembers what it was sent.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

Responder = Callable[["Received", asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it arrived: the head's lines and the whole body."""

    request_line: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class ReplayBackend:
    """An HTTP/1.1 server on loopback; `respond` writes the raw answer, then the connection is closed."""

    respond: Responder
    received: list[Received] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> str:
        """Listen on a free port; returns the base URL."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()
        # Aborted transports close their sockets in the loop's next turn.
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._answer(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()
            try:
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
            finally:
                # Where we are stopped meanwhile, what a peer does not read any more must not hold the socket.
                writer.transport.abort()
                self._tasks.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        if request is not None:
            self.received.append(request)
            await self.respond(request, writer)
            await writer.drain()


async def read_request(reader: asyncio.StreamReader) -> Received | None:
    """One HTTP/1.1 request; None if the connection ended before it."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    line, *rest = head.rstrip("\r\n").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (h.partition(":") for h in rest)}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    else:
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(line, headers, body)


def always(raw: bytes) -> Responder:
    """Answers every request with the same bytes."""

    async def respond(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    return respond


def json_response(body: bytes, status: str = "200 OK") -> bytes:
    """A whole JSON response."""
    return (
        b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
        % (status.encode(), len(body), body)
    )
