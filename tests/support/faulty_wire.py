"""A TCP connection that can be made slow, cut, deaf or forgetful, between a client and a real server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class FaultyWire:
    """
    Listens on a free loopback port, and passes bytes on to another.

    Attributes:
        delay_ms: how long a request and its reply take together, beside the server's own time.
        is_deaf: what is sent never arrives; connections stay open.
        is_refused: nobody is connected.
        lost_replies: so many replies more are not delivered: the connection is closed in their place.
        connections: how many were made.
    """

    def __init__(self, port: int) -> None:
        self.delay_ms = 0
        self.is_deaf = False
        self.is_refused = False
        self.lost_replies = 0
        self.connections = 0
        self._target = port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The server by way of this wire."""
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    def cut(self) -> None:
        """Close all connections now."""
        for writer in list(self._open):
            writer.transport.abort()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def close(self) -> None:
        """Stop, and cut."""
        assert self._server is not None
        self._server.close()
        self.cut()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.is_refused:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, back}
        for source, target, is_reply in ((reader, back, False), (there, writer, True)):
            pump = asyncio.create_task(self._pump(source, target, is_reply=is_reply))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        try:
            while piece := await source.read(65_536):
                if self.is_deaf:
                    continue
                if self.delay_ms:
                    await asyncio.sleep(self.delay_ms / 2_000)
                if is_reply and self.lost_replies > 0:
                    self.lost_replies -= 1
                    break
                target.write(piece)
                await target.drain()
        except ConnectionError:
            pass
        finally:
            self._open.discard(target)
            target.transport.abort()


@contextlib.asynccontextmanager
async def faulty_wire(port: int) -> AsyncIterator[FaultyWire]:
    """A wire to the server on `port`."""
    wire = FaultyWire(port)
    await wire.start()
    try:
        yield wire
    finally:
        await wire.close()
