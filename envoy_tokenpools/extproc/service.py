"""
The gRPC side of an exchange: reads Envoy's messages, lets the exchange decide what to do, and does it.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, NoReturn, Protocol

import grpc

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.extproc import replies
from envoy_tokenpools.extproc.actions import Abort, Actions, Admit, Reply, Settle
from envoy_tokenpools.extproc.exchange import Exchange
from envoy_tokenpools.extproc.wire import ProcessingRequest, parse_request
from envoy_tokenpools.gate.gate import Gate
from envoy_tokenpools.gate.order import Admitted, Order, Outcome
from envoy_tokenpools.observer import Decided, FirstToken

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

WAIT_MARGIN_MS = 2_000
"""Envoy waits this much longer than a request may, so that it is we who end the wait."""


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


class _Call:
    """
    One gRPC stream and the exchange that it carries.

    An eviction comes from outside. While the stream is read nothing is being written, so that it can be acted upon at
    once; else whoever writes does so next. Two must never write at the same time, nor anybody after its end.
    """

    __slots__ = ("_ending", "exchange", "is_evicted", "is_reading", "stream")

    def __init__(self, exchange: Exchange, stream: Stream) -> None:
        self.exchange = exchange
        self.stream = stream
        self.is_reading = False
        self.is_evicted = False
        self._ending: Actions = ()

    def evict(self) -> None:
        """From here on the exchange has nothing more to say but how it ends."""
        self.is_evicted = True
        if self.is_reading:
            self._ending = self.exchange.evicted()

    def take_ending(self) -> Actions:
        """How an evicted exchange ends: whoever acts on it takes it."""
        ending, self._ending = self._ending, ()
        if self.is_evicted and not ending:
            return self.exchange.evicted()
        return ending

    async def read(self) -> ProcessingRequest | None:
        """The next message; None at the end."""
        self.is_reading = True
        message = await self.stream.read()
        self.is_reading = False
        return message if isinstance(message, ProcessingRequest) else None

    async def tell_wait(self, wait_ms: int) -> None:
        """The verdict may take this long."""
        if not self.exchange.observes:
            await self.stream.write(replies.message_timeout(wait_ms + WAIT_MARGIN_MS))


class ExtProcService:
    """Serves `ExternalProcessor.Process`, one exchange per stream."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self._gate = gate
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
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
        call = _Call(exchange, stream)
        self._open_streams += 1
        self._idle.clear()
        try:
            while (message := await call.read()) is not None:
                actions = exchange.receive(message, self._clock.now_us())
                # A body of megabytes must not live while the next message is waited for.
                del message
                await self._act(call, actions)
                del actions
                if call.is_evicted:
                    await self._act(call, call.take_ending())
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError as error:
            log.debug("stream ended while it was written to", extra={"error": str(error)})
        except Exception:
            log.exception("exchange failed")
            await stream.abort(grpc.StatusCode.INTERNAL, "exchange failed")
        finally:
            # Also when cancelled: what was admitted is settled by a task of its own, which no client can cancel.
            self._open_streams -= 1
            for action in (
                *call.take_ending(),
                *exchange.finish(shutting_down=self._is_stopping),
            ):
                if isinstance(action, Settle):
                    self._settle(action.outcome)
            if self._open_streams == 0:
                self._idle.set()

    async def _act(self, call: _Call, actions: Actions) -> None:
        for action in actions:
            match action:
                case Reply(payload):
                    await call.stream.write(payload)
                case Admit(order):
                    await self._act(call, await self._decide(call, order))
                case Settle(outcome):
                    self._settle(outcome)
                case Abort():
                    await call.stream.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "evicted")
                case _:
                    self._tell(action.event)

    async def _decide(self, call: _Call, order: Order) -> Actions:
        exchange = call.exchange
        try:
            verdict = await self._gate.admit(order, call.tell_wait)
        except RequestError as error:
            return exchange.rejected(error)
        if not isinstance(verdict, Admitted):
            return exchange.refused(verdict.answer)
        actions = exchange.admitted(verdict)
        verdict.holding.on_evict(lambda: self._evict(call))
        return call.take_ending() if call.is_evicted else actions

    def _evict(self, call: _Call) -> None:
        call.evict()
        if call.is_reading:
            self._spawn(self._end(call))

    async def _end(self, call: _Call) -> None:
        """Act on an eviction from outside, unless the stream's own task is there first; Envoy may be gone by now."""
        if not call.is_reading:
            return
        try:
            await self._act(call, call.take_ending())
        except grpc.aio.AbortError:
            pass
        except (grpc.aio.BaseError, asyncio.CancelledError) as error:
            log.debug("evicted stream had ended", extra={"error": str(error)})

    def _tell(self, event: Decided | FirstToken) -> None:
        if isinstance(event, Decided):
            self._gate.observer.decided(event)
        else:
            self._gate.observer.first_token(event)

    def _settle(self, outcome: Outcome) -> None:
        self._spawn(self._gate.settle(outcome))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("settlement failed", exc_info=task.exception())

    def stop(self) -> None:
        """From now on, a stream that ends was ended by us."""
        self._is_stopping = True

    async def idle(self) -> None:
        """Wait until no stream is open."""
        await self._idle.wait()

    async def settled(self) -> None:
        """Wait until every settlement and eviction that has begun is done."""
        while self._tasks:
            await asyncio.wait(self._tasks)
