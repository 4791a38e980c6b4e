"""
A backend on loopback that behaves like vLLM's server, on the engine model in real time.

It keeps what clients and gateways of a real one depend on: the 200 goes out when a request is
accepted, even while it waits; the role chunk comes with the first output; a client that leaves
frees its slots; a full queue is a 503. The generated words are the same every time.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import msgspec
from aiohttp import web

from envoy_tokenpools.clock import Clock, SystemClock
from envoy_tokenpools.lab.dialect import Api, Offer, Refusal, understand
from envoy_tokenpools.lab.engine import EngineShape
from envoy_tokenpools.lab.engine_metrics import CONTENT_TYPE
from envoy_tokenpools.lab.faults import FAULT_HEADER, Fault
from envoy_tokenpools.lab.live_engine import Job, LiveEngine
from envoy_tokenpools.lab.rendering import Rendering

MAX_BODY_BYTES = 64 * 1024 * 1024
"""Largest request body; the limits of whatever stands in front are to be met first."""

_STOP_SECONDS = 0.1
"""How long `stop` lets running requests go on before it cuts them."""

_HttpHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_BUSY = Refusal(
    503,
    "The engine is currently busy and cannot accept new requests. Please try again later or on a "
    "different instance.",
    "Service Unavailable",
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """
    A request as it reached the backend, for tests of what stands in front of it.

    Attributes:
        path: without the query.
        headers: in their order, names in lower case, repeated ones apart.
        body: as sent.
    """

    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class BackendStats:
    """
    What happened since the start; requests are HTTP requests, sequences are the engine's.

    Attributes:
        requests: that arrived at a generating endpoint.
        accepted: that were given to the engine.
        refused: answered with an error, by status.
        running: sequences that have a slot now.
        waiting: sequences that wait for a slot now.
        finished: sequences that generated everything.
        aborted: sequences that ended early: the client left, or a fault was asked for.
        prompt_tokens: of the accepted requests.
        generated_tokens: that the engine put out.
        peak_running: most sequences that ran at the same time.
        peak_waiting: most sequences that waited at the same time.
    """

    requests: int
    accepted: int
    refused: Mapping[int, int]
    running: int
    waiting: int
    finished: int
    aborted: int
    prompt_tokens: int
    generated_tokens: int
    peak_running: int
    peak_waiting: int


class SimulatedBackend:
    """
    The server: `url = await backend.start()`, then `await backend.stop()`.

    Attributes:
        arrivals: the last requests, as many as `remember` says.
    """

    def __init__(
        self,
        shape: EngineShape,
        offer: Offer,
        *,
        clock: Clock | None = None,
        remember: int = 0,
    ) -> None:
        """
        Build a backend that is not listening yet.

        Args:
            shape: size and speed of its engine.
            offer: models and lengths that it serves.
            clock: the time; the system's by default.
            remember: how many requests `arrivals` keeps.

        Raises:
            ValueError: a sequence as long as the offer allows would not fit the KV cache.
        """
        if offer.max_model_len > shape.kv_tokens:
            message = f"max_model_len {offer.max_model_len} exceeds kv_tokens {shape.kv_tokens}"
            raise ValueError(message)
        self.arrivals: deque[Arrival] = deque(maxlen=remember)
        self._offer = offer
        self._clock = clock or SystemClock()
        self._engine = LiveEngine(shape, offer.models[0], self._clock)
        self._requests = 0
        self._accepted = 0
        self._refused: Counter[int] = Counter()
        self._runner: web.AppRunner | None = None

    @property
    def stats(self) -> BackendStats:
        """The counters as they are now."""
        engine = self._engine.stats
        return BackendStats(
            requests=self._requests,
            accepted=self._accepted,
            refused=dict(self._refused),
            running=self._engine.running,
            waiting=self._engine.waiting,
            finished=engine.finished,
            aborted=engine.aborted,
            prompt_tokens=engine.prompt_tokens,
            generated_tokens=engine.generated_tokens,
            peak_running=engine.peak_running,
            peak_waiting=engine.peak_waiting,
        )

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen, on a free port unless one is named; returns the URL without a path."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json])
        for api in Api:
            app.router.add_post(api.value, self._handler(api))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._scrape)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_STOP_SECONDS
        )
        await runner.setup()
        self._runner = runner
        await web.TCPSite(runner, host, port).start()
        bound_host, bound_port = runner.addresses[0][:2]
        return f"http://{bound_host}:{bound_port}"

    async def stop(self) -> None:
        """Stop listening and cut what still runs."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self._engine.stop()

    def resize(self, slots: int) -> None:
        """Change the number of slots, as an outage or its end does."""
        self._engine.resize(slots)

    def _handler(self, api: Api) -> _HttpHandler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, api)

        return handle

    async def _answer(self, request: web.Request, api: Api) -> web.StreamResponse:
        self._requests += 1
        raw = await request.read()
        headers = tuple((name.lower(), value) for name, value in request.headers.items())
        self.arrivals.append(Arrival(request.path, headers, raw))
        try:
            fault = Fault.parse(request.headers.get(FAULT_HEADER, ""))
        except ValueError as unknown:
            return self._refuse(Refusal(400, str(unknown), param=FAULT_HEADER))
        if fault.status is not None:
            return self._refuse(Refusal(fault.status, "A fault that was asked for.", "LabFault"))
        question = understand(api, raw, self._offer)
        if isinstance(question, Refusal):
            return self._refuse(question)
        job = self._engine.submit(question.replies, question.prompt_tokens)
        if job is None:
            return self._refuse(_BUSY)
        self._accepted += 1
        created = self._clock.now_ms() // 1_000
        rendering = Rendering(question, self._accepted, created, usage=not fault.no_usage)
        try:
            if question.stream:
                return await _stream(request, rendering, job, fault)
            return await _whole(request, rendering, job, fault)
        except ConnectionError:
            # A client may leave while a chunk is written: end as quietly as aiohttp's own
            # cancellation of the handler does.
            raise asyncio.CancelledError from None
        finally:
            self._engine.release(job)

    def _refuse(self, refusal: Refusal) -> web.Response:
        self._refused[refusal.status] += 1
        return _json(refusal.body(), status=refusal.status)

    async def _models(self, _request: web.Request) -> web.Response:
        models = [
            {
                "id": model,
                "object": "model",
                "created": 0,
                "owned_by": "vllm",
                "root": model,
                "parent": None,
                "max_model_len": self._offer.max_model_len,
            }
            for model in self._offer.models
        ]
        return _json(msgspec.json.encode({"object": "list", "data": models}))

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _scrape(self, _request: web.Request) -> web.Response:
        exposition = self._engine.metrics.exposition()
        return web.Response(body=exposition, headers={"content-type": CONTENT_TYPE})


@web.middleware
async def _errors_as_json(request: web.Request, handler: _HttpHandler) -> web.StreamResponse:
    """Unknown paths and methods are answered as vLLM's framework does."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _json(msgspec.json.encode({"detail": error.reason}), status=error.status)


async def _stream(
    request: web.Request, rendering: Rendering, job: Job, fault: Fault
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    sent = 0
    while tokens := await job.next_tokens():
        output = b"" if sent else rendering.opening()
        for token in tokens:
            output += rendering.piece(job.replies[token.ticket], token.generated)
            sent += 1
            if fault.cuts_after(sent):
                await response.write(output)
                return await _cut(request, response, fault)
        await response.write(output)
    await response.write_eof(rendering.closing())
    return response


async def _cut(
    request: web.Request, response: web.StreamResponse, fault: Fault
) -> web.StreamResponse:
    """End a stream early: cleanly, or by breaking off the connection."""
    if fault.reset_after is not None:
        _break_off(request)
    await response.write_eof()
    return response


async def _whole(
    request: web.Request, rendering: Rendering, job: Job, fault: Fault
) -> web.Response:
    generated = 0
    while tokens := await job.next_tokens():
        generated += len(tokens)
        if fault.reset_after is not None and generated >= fault.reset_after:
            _break_off(request)
    body = rendering.whole()
    if fault.truncate_after is not None:
        body = body[: len(body) // 2]
    return _json(body)


def _break_off(request: web.Request) -> NoReturn:
    """Close the connection in the middle of the answer; the handler ends as on a lost client."""
    if request.transport is not None:
        request.transport.abort()
    message = "a fault that was asked for"
    raise ConnectionResetError(message)


def _json(body: bytes, *, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
