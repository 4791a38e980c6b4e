"""Clients that send what a library would put right, a backend that takes websockets, and an Envoy set up otherwise."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import httpx
import pytest
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExternalProcessor

from envoy_tokenpools.envoyconf.child import EnvoyChild
from envoy_tokenpools.envoyconf.filter import external_processor
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from envoy_tokenpools.standalone import Standalone
from tests.support.extproc import CHAT, HI
from tests.support.replay import ReplayBackend, always, json_response, read_request
from tests.support.stack import standalone

WITHIN_S = 20.0

Headers = Sequence[tuple[str, str]]

POOLS = """
default_pool: roomy
pools:
  - name: roomy
    models: [m, new-1, new-2, new-3]
    capacity: {tokens_per_second: 100M, kv_cache: 1Ti, concurrency: 1000}
    kv_bytes_per_token: 1Ki
    output_estimate: max_tokens
    entitlements:
      - {name: tenant, class: spot, keys: [{plain: key}]}
      - name: vip
        class: guaranteed
        baseline: {tokens_per_second: 1M, kv_cache: 1Gi, concurrency: 10}
        keys: [{plain: vip}, {principal: "spiffe://vip"}]
  - name: single
    models: [one]
    capacity: {tokens_per_second: 100M, kv_cache: 1Ti, concurrency: 1}
    kv_bytes_per_token: 1Ki
    entitlements:
      - {name: tenant, class: spot, keys: [{plain: key}]}
"""
"""
Nothing is ever short, but for model `one`, which is served to one at a time.

How prompts of a model are really counted is learned from what is reported: the `new` ones are for tests that want to
see the first estimate.
"""

ONE = HI.replace(b'"m"', b'"one"')
"""The smallest request for it."""

ANSWER = json_response(b'{"choices":[]}')
"""It reports nothing, so that nothing is learned from it."""


def head_of(path: str, *headers: tuple[str, str], method: str = "POST", key: str = "key") -> bytes:
    """The head of an HTTP/1.1 request that closes its connection, with exactly these headers beside the key."""
    lines = [f"{method} {path} HTTP/1.1", "host: test", f"authorization: Bearer {key}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode("latin-1")


def chunked(*pieces: bytes, ends: bool = True) -> bytes:
    """A body in chunked framing, without its end if it does not end."""
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return framed + b"0\r\n\r\n" if ends else framed


@dataclass(frozen=True, slots=True)
class Answered:
    """A response as it came: framing undone, nothing decoded."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: str) -> str | None:
        """The only value of a header; None if it did not come."""
        values = [value for key, value in self.headers if key == name]
        assert len(values) <= 1, (name, values)
        return values[0] if values else None


async def raw_request(port: int, *pieces: bytes) -> Answered:
    """
    Send these bytes on a connection of their own, and read the one answer to its end.

    The status is 0 where Envoy closed the connection without a word.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        data = b""
        with contextlib.suppress(ConnectionError):
            data = await asyncio.wait_for(reader.read(-1), WITHIN_S)
    finally:
        await _closed(writer)
    head, _, body = data.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 1"):
        head, _, body = body.partition(b"\r\n\r\n")
    if not data:
        return Answered(0, (), b"")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    pairs = [line.partition(":") for line in lines]
    headers = [(name.lower(), value.strip()) for name, _, value in pairs]
    if ("transfer-encoding", "chunked") in headers:
        body = _unchunked(body)
    return Answered(int(status_line.split(" ")[1]), headers, body)


def _unchunked(framed: bytes) -> bytes:
    body = b""
    while framed:
        size, _, framed = framed.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            break
        body += framed[:length]
        framed = framed[length + 2 :]
    return body


async def h2_request(
    port: int, headers: Headers, body: bytes | None, trailers: Headers = ()
) -> Answered:
    """
    One HTTP/2 request with exactly these headers, in this order and number, and its answer.

    Args:
        port: of a listener that speaks HTTP/2 with prior knowledge.
        headers: pseudo-headers first.
        body: None is none at all.
        trailers: sent behind the body, which then has no end of stream.
    """
    settings = h2.config.H2Configuration(
        client_side=True,
        header_encoding="latin-1",
        validate_outbound_headers=False,
        normalize_outbound_headers=False,
    )
    connection = h2.connection.H2Connection(settings)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        connection.initiate_connection()
        stream = connection.get_next_available_stream_id()
        connection.send_headers(stream, headers, end_stream=body is None)
        if body is not None:
            connection.send_data(stream, body, end_stream=not trailers)
        if trailers:
            connection.send_headers(stream, trailers, end_stream=True)
        writer.write(connection.data_to_send())
        await writer.drain()
        return await asyncio.wait_for(_h2_answer(connection, reader, writer), WITHIN_S)
    finally:
        await _closed(writer)


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def _h2_answer(
    connection: h2.connection.H2Connection,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> Answered:
    headers: list[tuple[str, str]] = []
    body = b""
    while data := await reader.read(65_536):
        for event in connection.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                headers = [(str(name), str(value)) for name, value in event.headers or ()]
            elif isinstance(event, h2.events.DataReceived):
                body += event.data or b""
            elif isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset)):
                assert isinstance(event, h2.events.StreamEnded), event
                return Answered(int(dict(headers)[":status"]), headers, body)
        writer.write(connection.data_to_send())
    return Answered(0, headers, body)


@dataclass(slots=True)
class EchoingBackend(ReplayBackend):
    """A backend that also takes websockets, which it echoes byte for byte."""

    upgrades: list[dict[str, str]] = field(default_factory=list)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        if request is not None and "upgrade" in request.headers:
            self.upgrades.append(request.headers)
            writer.write(
                b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
            )
            while data := await reader.read(4_096):
                writer.write(data)
        elif request is not None:
            self.received.append(request)
            await self.respond(request, writer)
            await writer.drain()


@dataclass(slots=True)
class Rig:
    """Filter and Envoy in front of a backend."""

    both: Standalone
    backend: EchoingBackend
    client: httpx.AsyncClient

    @property
    def port(self) -> int:
        """Where Envoy listens."""
        return self.both.envoy.listen_port

    async def post(self, body: bytes, path: str = CHAT, **headers: str) -> httpx.Response:
        """A request with the tenant's key; underscores of header names are dashes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(
            self.both.url + path, content=body, headers={"authorization": "Bearer key", **named}
        )

    async def in_use(self) -> list[dict[str, int]]:
        """What is in use in every pool."""
        url = f"http://127.0.0.1:{self.both.filter.admin_port}/state"
        return [pool["in_use"] for pool in (await self.client.get(url)).json()["pools"]]

    async def held(self, requests: int) -> None:
        """Wait until this many requests are in flight, and no others."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WITHIN_S
        while sum(in_use["in_flight"] for in_use in await self.in_use()) != requests:
            assert loop.time() < deadline, await self.in_use()
            await asyncio.sleep(0.01)

    async def quiet(self, within_s: float = 1.0) -> None:
        """Nothing is in use any more, within a second."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while any(any(in_use.values()) for in_use in await self.in_use()):
            assert loop.time() < deadline, await self.in_use()
            await asyncio.sleep(0.01)

    async def at_rest(self) -> None:
        """INV: nothing is in use, and the next ordinary request is served."""
        await self.quiet()
        self.backend.respond = always(ANSWER)
        assert (await self.post(ONE)).status_code == 200
        await self.quiet()


@contextlib.asynccontextmanager
async def rigged() -> AsyncIterator[Rig]:
    """A rig with the pools above."""
    backend = EchoingBackend(always(ANSWER))
    async with (
        standalone(POOLS, await backend.start()) as both,
        httpx.AsyncClient(timeout=WITHIN_S) as client,
    ):
        yield Rig(both, backend, client)
    await backend.stop()


@contextlib.asynccontextmanager
async def altered_envoy(
    options: EnvoyOptions, alter: Callable[[ExternalProcessor], None]
) -> AsyncIterator[EnvoyChild]:
    """An Envoy whose ext_proc filter is configured as somebody else might."""

    def altered(given: EnvoyOptions) -> ExternalProcessor:
        processor = external_processor(given)
        alter(processor)
        return processor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("envoy_tokenpools.envoyconf.listener.external_processor", altered)
        envoy = EnvoyChild(options, log_level="error", concurrency=1)
        await envoy.start()
    try:
        yield envoy
    finally:
        await envoy.stop()
