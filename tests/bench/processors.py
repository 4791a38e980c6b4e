"""
The ext_proc servers that are compared, each in a process of its own.

`python -m tests.bench.processors KIND CORE CONFIG` prints a free port and serves on it; only ours reads the CONFIG.
All of them run grpc.aio on uvloop with the same options; they differ in what they do with a message.
"""

import enum
import os
import sys
from collections.abc import AsyncIterator, Callable

import grpc
import uvloop
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    BodyResponse,
    CommonResponse,
    HeadersResponse,
    ProcessingRequest,
    ProcessingResponse,
    TrailersResponse,
)

from envoy_tokenpools import cli
from envoy_tokenpools.extproc import replies, wire
from envoy_tokenpools.extproc.service import SERVICE
from tests.bench.children import die_with_parent, free_port


class Kind(enum.Enum):
    """What a server does with a message."""

    NO_OP = "no-op"
    OURS = "ours"
    NAIVE = "naive"


OPTIONS = (
    ("grpc.max_receive_message_length", 9 * 1024 * 1024),
    ("grpc.max_send_message_length", 9 * 1024 * 1024),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
)
"""As `FilterServer` sets them."""

_REPLIES = (
    ("response_body", replies.CONTINUE_RESPONSE_BODY),
    ("request_headers", replies.CONTINUE_REQUEST_HEADERS),
    ("request_body", replies.CONTINUE_REQUEST_BODY),
    ("response_headers", replies.CONTINUE_RESPONSE_HEADERS),
    ("request_trailers", replies.CONTINUE_REQUEST_TRAILERS),
    ("response_trailers", replies.CONTINUE_RESPONSE_TRAILERS),
)


async def _no_op(_: object, stream: grpc.aio.ServicerContext) -> None:
    """Our narrow messages and constant replies: what is left is gRPC and the parsing."""
    while True:
        message = await stream.read()
        if message is grpc.aio.EOF:
            return
        for name, reply in _REPLIES:
            if getattr(message, name) is not None:
                await stream.write(reply)
                break


async def _naive(
    messages: AsyncIterator[ProcessingRequest], _: object
) -> AsyncIterator[ProcessingResponse]:
    """The full types both ways, as the examples of most libraries have it."""
    async for message in messages:
        if message.request_headers is not None:
            yield ProcessingResponse(request_headers=HeadersResponse(response=CommonResponse()))
        elif message.request_body is not None:
            yield ProcessingResponse(request_body=BodyResponse(response=CommonResponse()))
        elif message.response_headers is not None:
            yield ProcessingResponse(response_headers=HeadersResponse(response=CommonResponse()))
        elif message.response_body is not None:
            yield ProcessingResponse(response_body=BodyResponse(response=CommonResponse()))
        elif message.request_trailers is not None:
            yield ProcessingResponse(request_trailers=TrailersResponse())
        elif message.response_trailers is not None:
            yield ProcessingResponse(response_trailers=TrailersResponse())


async def _serve(
    process: Callable[..., object],
    parse: Callable[[bytes], object],
    serialize: Callable[..., bytes] | None,
) -> None:
    server = grpc.aio.server(options=OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(
        process, request_deserializer=parse, response_serializer=serialize
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def _serve_ours(config: str) -> None:
    """The product itself, as its users start it."""
    port = free_port()
    print(port, flush=True)
    address = ("--ext-proc", f"127.0.0.1:{port}", "--admin", "127.0.0.1:0")
    sys.exit(cli.main(["--log-level", "warning", "serve", "--config", config, *address]))


def main() -> None:
    """Pin this process, then serve until killed."""
    kind, core, config = Kind(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    die_with_parent()
    os.sched_setaffinity(0, {core})
    match kind:
        case Kind.OURS:
            _serve_ours(config)
        case Kind.NO_OP:
            uvloop.run(_serve(_no_op, wire.parse_request, None))
        case Kind.NAIVE:
            uvloop.run(_serve(_naive, ProcessingRequest.parse, bytes))


if __name__ == "__main__":
    main()
