"""
A filter that answers as it is told, and a backend that answers whatever it is asked.
"""

import asyncio
from collections.abc import Callable

import grpc
from aiohttp import WSMsgType, web
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    BodyResponse,
    HeadersResponse,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)

Answer = Callable[[ProcessingRequest], ProcessingResponse]


def carry_on(message: ProcessingRequest) -> ProcessingResponse:
    """The answer that changes nothing."""
    if message.request_headers is not None:
        return ProcessingResponse(request_headers=HeadersResponse())
    if message.response_headers is not None:
        return ProcessingResponse(response_headers=HeadersResponse())
    if message.request_body is not None:
        return ProcessingResponse(request_body=BodyResponse())
    return ProcessingResponse(response_body=BodyResponse())


def headers_of(message: HttpHeaders) -> dict[str, str]:
    """Names and values as Envoy sends them."""
    assert message.headers is not None
    return {entry.key: entry.raw_value.decode() for entry in message.headers.headers}


class ExtProcStub:
    """An ext_proc server; `answer` may be replaced at any time, `seen` holds what arrived."""

    def __init__(self) -> None:
        self.answer: Answer = carry_on
        self.seen: list[ProcessingRequest] = []
        self.port = 0
        self._server: grpc.aio.Server | None = None

    def request_headers(self) -> HttpHeaders:
        """Headers of the request that came last."""
        found = [each.request_headers for each in self.seen if each.request_headers is not None]
        return found[-1]

    async def start(self) -> None:
        """Listen, on the port of the last time if there was one."""
        limit = ("grpc.max_receive_message_length", 64 << 20)
        self._server = grpc.aio.server(options=[limit, ("grpc.so_reuseport", 0)])
        process = grpc.stream_stream_rpc_method_handler(self._process)
        service = "envoy.service.ext_proc.v3.ExternalProcessor"
        handler = grpc.method_handlers_generic_handler(service, {"Process": process})
        self._server.add_generic_rpc_handlers((handler,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """End at once, as a process that dies."""
        assert self._server is not None
        await self._server.stop(None)

    async def _process(self, requests: object, context: grpc.aio.ServicerContext) -> None:
        """One exchange."""
        del requests
        while (raw := await context.read()) is not grpc.aio.EOF:
            message = ProcessingRequest.parse(raw)
            self.seen.append(message)
            await context.write(bytes(self.answer(message)))


class BackendStub:
    """An HTTP backend that echoes websockets and tells what it received of everything else."""

    def __init__(self) -> None:
        self.requests: list[web.Request] = []
        self.status = 200
        self.port = 0
        self.was_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close everything."""
        self.may_answer.set()
        assert self._runner is not None
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        """Echo a websocket; answer anything else with the number of body bytes."""
        self.requests.append(request)
        if request.headers.get("upgrade") == "websocket":
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    await socket.send_str(message.data)
            return socket
        body = await request.read()
        self.was_asked.set()
        await self.may_answer.wait()
        return web.json_response(
            {"received": len(body)}, status=self.status, headers={"server": "the-backend"}
        )
