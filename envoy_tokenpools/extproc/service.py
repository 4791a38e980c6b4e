"""
The gRPC side of an exchange: reads Envoy's messages, lets the exchange decide what to do, and does it.
"""

import asyncio
import logging
from typing import NoReturn, Protocol

import grpc

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.extproc.exchange import Actions, Admit, Exchange, Reply, Settle
from envoy_tokenpools.extproc.wire import ProcessingRequest, parse_request
from envoy_tokenpools.gate.gate import Gate
from envoy_tokenpools.gate.order import Admitted, Order, Outcome
from envoy_tokenpools.observer import Decided, FirstToken

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


class Stream(Protocol):
    """One gRPC stream: what we use of `grpc.aio.ServicerContext`."""

    async def read(self) -> "ProcessingRequest | object":
        """The next message, or `grpc.aio.EOF`."""
        ...

    async def write(self, message: bytes) -> None:
        """Send a reply."""
        ...

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the stream with an error."""
        ...


class ExtProcService:
    """Serves `ExternalProcessor.Process`, one exchange per stream."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self._gate = gate
        self._clock = clock
        self._settling: set[asyncio.Task[None]] = set()
        self._open_streams = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_stopping = False

    @property
    def open_streams(self) -> int:
        """Streams that Envoy holds open: one per HTTP request until its end."""
        return self._open_streams

    def handler(self) -> grpc.GenericRpcHandler:
        """The handler to add to a `grpc.aio` server; replies leave as the bytes they are."""
        process = grpc.stream_stream_rpc_method_handler(
            self._process, request_deserializer=parse_request, response_serializer=None
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    async def _process(self, _: object, stream: Stream) -> None:
        exchange = Exchange(self._gate.directory, self._gate.config.server)
        self._open_streams += 1
        self._idle.clear()
        try:
            while True:
                message = await stream.read()
                if not isinstance(message, ProcessingRequest):
                    break
                actions = exchange.receive(message, self._clock.now_us())
                # A body of megabytes must not live while the next message is waited for.
                del message
                await self._act(exchange, actions, stream)
                del actions
        except Exception:
            log.exception("exchange failed")
            await stream.abort(grpc.StatusCode.INTERNAL, "exchange failed")
        finally:
            # Also when cancelled: what was admitted is settled by a task of its own, which no client can cancel.
            self._open_streams -= 1
            for action in exchange.finish(shutting_down=self._is_stopping):
                if isinstance(action, Settle):
                    self._settle(action.outcome)
            if self._open_streams == 0:
                self._idle.set()

    async def _act(self, exchange: Exchange, actions: Actions, stream: Stream) -> None:
        for action in actions:
            match action:
                case Reply(payload):
                    await stream.write(payload)
                case Admit(order):
                    await self._act(exchange, await self._decide(exchange, order), stream)
                case Settle(outcome):
                    self._settle(outcome)
                case _:
                    self._tell(action.event)

    async def _decide(self, exchange: Exchange, order: Order) -> Actions:
        try:
            verdict = await self._gate.admit(order)
        except RequestError as error:
            return exchange.rejected(error)
        if isinstance(verdict, Admitted):
            return exchange.admitted(verdict)
        return exchange.refused(verdict.answer)

    def _tell(self, event: Decided | FirstToken) -> None:
        if isinstance(event, Decided):
            self._gate.observer.decided(event)
        else:
            self._gate.observer.first_token(event)

    def _settle(self, outcome: Outcome) -> None:
        task = asyncio.create_task(self._gate.settle(outcome))
        self._settling.add(task)
        task.add_done_callback(self._settled)

    def _settled(self, task: asyncio.Task[None]) -> None:
        self._settling.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("settlement failed", exc_info=task.exception())

    def stop(self) -> None:
        """From now on, a stream that ends was ended by us."""
        self._is_stopping = True

    async def idle(self) -> None:
        """Wait until no stream is open."""
        await self._idle.wait()

    async def settled(self) -> None:
        """Wait until every settlement that has begun is done."""
        while self._settling:
            await asyncio.wait(self._settling)
