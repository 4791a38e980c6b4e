"""The service over real gRPC in one process: what Envoy sees, and what is left when it goes."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from envoy_tokenpools.config import ServerSettings
from envoy_tokenpools.core.admission import Lease
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import Pool, ServiceClass
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.extproc.service import SERVICE, ExtProcService
from envoy_tokenpools.gate.holding import Holding
from envoy_tokenpools.gate.live import LivePool
from envoy_tokenpools.observer import Ending
from envoy_tokenpools.observer import Outcome as Decision
from tests.support.extproc import (
    HI,
    Message,
    Response,
    chat,
    immediate_of,
    kind_of,
    post_rh,
    rb,
    rh,
    sb,
    sh,
)
from tests.support.gate import DistantStore, GateDesk, configured
from tests.support.pools import amount, entitlement, pool
from tests.support.streams import S

METHOD = f"/{SERVICE}/Process"
SSE = "text/event-stream"
POOL = pool(amount(), entitlement("a", ServiceClass.SPOT))
WITHIN_S = 10

Call = Any  # grpc has no types


@dataclass(slots=True)
class Running:
    """A service that listens, the gate behind it and a client in front of it."""

    desk: GateDesk
    service: ExtProcService
    channel: grpc.aio.Channel

    def call(self) -> Call:
        """A new stream, as Envoy opens for every request."""
        return self.channel.stream_stream(METHOD)()

    async def say(self, call: Call, *messages: Message) -> list[Response]:
        """Send messages one by one, each after the reply to the one before."""
        replies = []
        for message in messages:
            await call.write(bytes(message))
            reply = await asyncio.wait_for(call.read(), WITHIN_S)
            assert isinstance(reply, bytes), reply
            replies.append(Response.parse(reply))
        return replies

    async def quiet(self) -> InUse:
        """Wait until every stream has ended and every settlement is done; what is in use then."""
        await asyncio.wait_for(self.service.idle(), WITHIN_S)
        await asyncio.wait_for(self.service.settled(), WITHIN_S)
        await self.desk.gate.close()
        return await self.desk.total()


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    """On a free port of the loopback interface, over a store that takes its time."""
    desk = await GateDesk.open(
        POOL, store=DistantStore, server=ServerSettings(max_body_bytes=100_000)
    )
    service = ExtProcService(desk.gate, desk.clock)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((service.handler(),))
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    await health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Running(desk, service, channel)
    await server.stop(0)


def stream_of(body: bytes = HI) -> list[Message]:
    """A whole streamed exchange."""
    pieces = [S[:200], S[200:420], S[420:]]
    return [post_rh(), rb(body), sh(200, SSE), *(sb(piece) for piece in pieces), sb(eos=True)]


# Scripts


async def test_a_whole_exchange(running: Running) -> None:
    """One reply for each message; settled at its end, before the stream is closed."""
    call = running.call()
    replies = await running.say(call, *stream_of())
    assert [kind_of(reply) for reply in replies] == [
        "request_headers",
        "request_body",
        "response_headers",
        *["response_body"] * 4,
    ]
    assert running.service.open_streams == 1
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert await running.quiet() == InUse()
    (settled,) = running.desk.observer.settlements
    assert (settled.prompt_tokens, settled.completion_tokens) == (26, 9)
    assert settled.ending is Ending.COMPLETED
    assert len(running.desk.observer.first_tokens) == 1


async def test_replies_come_in_the_order_of_the_messages(running: Running) -> None:
    """Also when Envoy sends several before it reads."""
    call = running.call()
    for message in stream_of():
        await call.write(bytes(message))
    kinds = []
    for _ in range(7):
        reply = await asyncio.wait_for(call.read(), WITHIN_S)
        assert isinstance(reply, bytes)
        kinds.append(kind_of(Response.parse(reply)))
    assert kinds == [
        "request_headers",
        "request_body",
        "response_headers",
        *["response_body"] * 4,
    ]
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK


async def test_a_shed_request_is_answered_once(running: Running) -> None:
    """An immediate response; the stream ends well."""
    running.desk.gate.house.pool(POOL).ramp = replace(
        running.desk.gate.house.pool(POOL).ramp, start=amount(0), target=amount(0)
    )
    await running.desk.pass_ms(1_000)
    call = running.call()
    _, reply = await running.say(call, post_rh(), rb(HI))
    status, headers, _ = immediate_of(reply)
    assert status == 429
    assert int(headers["retry-after"]) >= 1
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    assert running.desk.observer.outcomes() == [(Decision.SHED, "pool_contended")]


async def test_a_request_that_can_never_fit_is_answered_and_told(running: Running) -> None:
    """By the gate's error, as a rejection."""
    narrow = pool(amount(kv_bytes=10_000), entitlement("a", ServiceClass.SPOT))
    await running.desk.gate.reload(replace(running.desk.config, pools={"pool": narrow}))
    call = running.call()
    _, reply = await running.say(call, post_rh(), rb(chat(max_tokens=4_000)))
    assert immediate_of(reply)[0] == 400
    assert running.desk.observer.outcomes() == [(Decision.REJECTED, "context_length_exceeded")]


async def test_what_is_not_metered_is_told(running: Running) -> None:
    """As bypassed."""
    call = running.call()
    await running.say(call, rh([(":method", "GET"), (":path", "/v1/models")], eos=True))
    assert running.desk.observer.outcomes() == [(Decision.BYPASSED, "unmetered")]
    call.cancel()


async def test_a_reload_is_for_the_next_stream(running: Running) -> None:
    """Who began under the old configuration is known by it to the end."""
    call = running.call()
    await running.say(call, post_rh())
    closed = pool(amount(), entitlement("b", ServiceClass.SPOT))
    await running.desk.gate.reload(replace(running.desk.config, keys={}, pools={"pool": closed}))
    (reply,) = await running.say(call, rb(HI))
    assert immediate_of(reply)[0] == 404
    other = running.call()
    (reply,) = await running.say(other, post_rh())
    assert immediate_of(reply)[0] == 401


async def test_health_is_served_beside_it(running: Running) -> None:
    """On the same port, by the service's name."""
    stub = health_pb2_grpc.HealthStub(running.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


# Cancelled


@pytest.mark.parametrize("steps", range(8))
async def test_a_cancellation_at_any_point_leaves_nothing(running: Running, steps: int) -> None:
    """After each message of an exchange: one settlement if it was admitted, none otherwise."""
    call = running.call()
    await running.say(call, *stream_of()[:steps])
    call.cancel()
    if steps:
        assert await running.quiet() == InUse()
    assert len(running.desk.observer.settlements) == (steps >= 2)


@pytest.mark.parametrize("steps", range(1, 8))
async def test_an_end_of_the_stream_at_any_point_leaves_nothing(
    running: Running, steps: int
) -> None:
    """Envoy half-closes where it does not reset."""
    call = running.call()
    await running.say(call, *stream_of()[:steps])
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    assert await running.quiet() == InUse()
    assert len(running.desk.observer.settlements) == (steps >= 2)


async def test_a_client_that_leaves_while_its_prompt_is_counted_leaves_nothing(
    running: Running,
) -> None:
    """The decision is given up; nothing is written to the dead stream."""
    running.desk.counter.held = asyncio.Event()
    call = running.call()
    await running.say(call, post_rh())
    await call.write(bytes(rb(HI)))
    await until(lambda: bool(running.desk.counter.counted))
    call.cancel()
    assert await running.quiet() == InUse()
    running.desk.counter.held.set()
    assert await running.quiet() == InUse()
    assert running.desk.observer.decisions == []


async def test_a_client_that_leaves_while_the_store_decides_leaves_nothing(
    running: Running,
) -> None:
    """What was taken meanwhile is given back."""
    assert isinstance(running.desk.store, DistantStore)
    arrived, go = asyncio.Event(), asyncio.Event()
    reserve = running.desk.store.reserve

    async def slow(*given: Any) -> Any:
        reply = await reserve(*given)
        arrived.set()
        await go.wait()
        return reply

    running.desk.store.reserve = slow  # type: ignore[method-assign, assignment]
    call = running.call()
    await running.say(call, post_rh())
    await call.write(bytes(rb(HI)))
    await asyncio.wait_for(arrived.wait(), WITHIN_S)
    assert (await running.desk.total()).in_flight == 1
    call.cancel()
    assert await running.quiet() == InUse()
    assert running.desk.observer.settlements == []


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until `condition` holds."""

    async def watch() -> None:
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)

    await asyncio.wait_for(watch(), WITHIN_S)


async def test_two_hundred_streams_cancelled_anywhere_leave_nothing(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """No lease, no task, no stream, no error in the log; and the next request is served."""
    dice = random.Random(7)
    baseline = len(asyncio.all_tasks())

    async def one(script: Sequence[Message], patience: int, *, reads: bool) -> None:
        call = running.call()
        try:
            for message in script:
                await call.write(bytes(message))
                if reads:
                    await call.read()
                for _ in range(patience):
                    await asyncio.sleep(0)
        finally:
            call.cancel()

    with caplog.at_level(logging.WARNING):
        scripts = [stream_of(chat(stream=True))[: dice.randrange(8)] for _ in range(200)]
        await asyncio.gather(
            *(one(script, dice.randrange(4), reads=dice.random() < 0.7) for script in scripts)
        )
        assert await running.quiet() == InUse()
        await until(lambda: len(asyncio.all_tasks() - {asyncio.current_task()}) <= baseline)
    assert running.service.open_streams == 0
    assert [record.getMessage() for record in caplog.records] == []
    admitted = [one for one in running.desk.observer.decisions if one.outcome is Decision.ADMITTED]
    assert len(admitted) >= len(running.desk.observer.settlements) > 0
    call = running.call()
    assert kind_of((await running.say(call, post_rh(), rb(HI)))[1]) == "request_body"
    call.cancel()
    assert await running.quiet() == InUse()


# Faults


async def test_a_fault_in_the_gate_ends_the_stream_with_an_error(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """INTERNAL, logged once, without holding anything; other streams go on."""

    async def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(running.desk.gate, "admit", broken)
    call = running.call()
    await running.say(call, post_rh())
    await call.write(bytes(rb(HI)))
    assert await call.code() is grpc.StatusCode.INTERNAL
    assert "ZeroDivision" not in (await call.details() or "")
    assert await running.quiet() == InUse()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == [
        "exchange failed"
    ]
    other = running.call()
    assert kind_of((await running.say(other, post_rh()))[0]) == "request_headers"
    other.cancel()


async def test_a_fault_after_admission_settles(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails, what was admitted is given back."""
    call = running.call()
    await running.say(call, post_rh(), rb(HI))
    assert (await running.desk.total()).in_flight == 1

    def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(running.desk.observer.__class__, "first_token", lambda *_: broken(None))
    await running.say(call, sh(200, SSE))
    await call.write(bytes(sb(S)))
    assert await call.code() is grpc.StatusCode.INTERNAL
    assert await running.quiet() == InUse()
    assert len(running.desk.observer.settlements) == 1


@pytest.mark.parametrize("junk", [b"\xff", b"\x12\x7f", b"\x12\x02\x08\x01", b"\x00" * 50])
async def test_bytes_that_are_no_message_end_the_stream(running: Running, junk: bytes) -> None:
    """Never the server: the next stream is served."""
    call = running.call()
    await call.write(junk)
    await call.done_writing()
    with contextlib.suppress(grpc.aio.AioRpcError):
        while isinstance(await call.read(), bytes):
            pass
    assert await call.code() in (grpc.StatusCode.OK, grpc.StatusCode.INTERNAL)
    assert await running.quiet() == InUse()
    other = running.call()
    assert kind_of((await running.say(other, post_rh()))[0]) == "request_headers"
    other.cancel()


async def test_a_settlement_that_fails_is_logged(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream ended long ago; nobody else would hear of it."""

    async def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(running.desk.gate, "settle", broken)
    call = running.call()
    await running.say(call, *stream_of())
    call.cancel()
    await running.quiet()
    assert "settlement failed" in [record.getMessage() for record in caplog.records]


async def test_an_error_that_the_gate_raises_is_an_answer(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a fault: the stream goes on."""

    async def refuse(*_: object) -> None:
        raise RequestError(400, "context_length_exceeded", "Too long.")

    monkeypatch.setattr(running.desk.gate, "admit", refuse)
    call = running.call()
    _, reply = await running.say(call, post_rh(), rb(HI))
    assert immediate_of(reply)[0] == 400
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK


async def test_a_stream_that_we_cut_was_truncated(running: Running) -> None:
    """After `stop`, an end is our doing."""
    call = running.call()
    await running.say(call, post_rh(), rb(HI), sh(200, SSE), sb(S[:300]))
    running.service.stop()
    call.cancel()
    assert await running.quiet() == InUse()
    (settled,) = running.desk.observer.settlements
    assert settled.ending is Ending.TRUNCATED


# Waiting and eviction


def busy(**changes: object) -> Pool:
    """A pool of one sequence, whose requests wait for it."""
    patient = replace(entitlement("a", ServiceClass.SPOT), max_wait_ms=60_000)
    return replace(pool(amount(sequences=1), patient), **changes)  # type: ignore[arg-type]


async def admitted(running: Running) -> Call:
    """A stream whose request was let through."""
    call = running.call()
    await running.say(call, post_rh(), rb(chat(stream=True)))
    return call


async def waiting(running: Running) -> Call:
    """A stream whose request waits, as Envoy was told."""
    call = running.call()
    (_, told) = await running.say(call, post_rh(), rb(HI))
    assert told.override_message_timeout == timedelta(seconds=62)
    return call


async def test_a_waiting_request_goes_on_when_another_ends(running: Running) -> None:
    """Envoy is told how long it may take, in a message of its own; the reply comes after it."""
    await running.desk.gate.reload(configured(busy()))
    first = await admitted(running)
    second = await waiting(running)
    await first.done_writing()
    reply = Response.parse(await asyncio.wait_for(second.read(), WITHIN_S))
    assert kind_of(reply) == "request_body"
    second.cancel()
    assert await running.quiet() == InUse()


async def test_a_client_that_leaves_while_waiting_leaves_nothing(running: Running) -> None:
    """The stream is cancelled; whoever comes next finds the capacity."""
    await running.desk.gate.reload(configured(busy()))
    first = await admitted(running)
    second = await waiting(running)
    second.cancel()
    third = await waiting(running)
    await first.done_writing()
    assert kind_of(Response.parse(await asyncio.wait_for(third.read(), WITHIN_S))) == "request_body"
    third.cancel()
    assert await running.quiet() == InUse()


async def code_of(call: Call) -> grpc.StatusCode:
    """How the stream ends, once everything that was said is read."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await asyncio.wait_for(call.read(), WITHIN_S) is not grpc.aio.EOF:
            pass
    code: grpc.StatusCode = await asyncio.wait_for(call.code(), WITHIN_S)
    return code


async def evict_all(running: Running) -> None:
    """The store wants every lease back."""
    for lease_id in running.desk.gate.house.held("pool"):
        running.desk.gate.house.evict("pool", lease_id)


async def test_an_eviction_while_the_stream_is_quiet(running: Running) -> None:
    """The answer comes unasked; the stream then ends as any other."""
    call = await admitted(running)
    await evict_all(running)
    reply = Response.parse(await asyncio.wait_for(call.read(), WITHIN_S))
    assert immediate_of(reply)[0] == 429
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    assert await running.quiet() == InUse()
    assert [event.ending for event in running.desk.observer.settlements] == [Ending.EVICTED]


async def test_an_eviction_after_the_answer_began(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream ends with an error, and nothing is logged of it."""
    caplog.set_level(logging.WARNING)
    call = await admitted(running)
    await running.say(call, sh(200, SSE), sb(S[:40]))
    await evict_all(running)
    assert await code_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await running.quiet() == InUse()
    assert [event.ending for event in running.desk.observer.settlements] == [Ending.EVICTED]
    assert caplog.records == []


@pytest.mark.parametrize("passed", range(6))
async def test_an_eviction_while_a_reply_is_on_its_way(running: Running, passed: int) -> None:
    """At whatever point of the exchange it comes, the request ends, settled once."""
    call = await admitted(running)
    await running.say(call, sh(200, SSE))
    await call.write(bytes(sb(S[:40])))
    for _ in range(passed):
        await asyncio.sleep(0)
    await evict_all(running)
    assert await code_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await running.quiet() == InUse()
    assert len(running.desk.observer.settlements) == 1


async def test_a_lease_that_is_wanted_back_at_once(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted before anybody listened: its request never goes upstream."""
    hold = running.desk.gate.house.hold

    def hold_evicted(live: LivePool, lease: Lease) -> Holding:
        holding = hold(live, lease)
        holding.evict()
        return holding

    monkeypatch.setattr(running.desk.gate.house, "hold", hold_evicted)
    call = running.call()
    _, reply = await running.say(call, post_rh(), rb(HI))
    assert immediate_of(reply)[0] == 429
    await call.done_writing()
    assert await running.quiet() == InUse()


async def test_a_client_that_leaves_as_it_is_evicted(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """Two hundred streams, half of them cancelled in the same turn: each settled once, nothing in the log."""
    caplog.set_level(logging.WARNING)
    rng = random.Random(4)
    calls = [await admitted(running) for _ in range(200)]
    for call in calls[::2]:
        await running.say(call, sh(200, SSE), sb(S[:40]))
    rng.shuffle(calls)
    for call in calls[::2]:
        call.cancel()
    await evict_all(running)
    await asyncio.sleep(0)
    for call in calls[1::4]:
        call.cancel()
    for call in calls:
        with contextlib.suppress(asyncio.CancelledError):
            await call.done_writing()
    assert await running.quiet() == InUse()
    assert len(running.desk.observer.settlements) == 200
    assert caplog.records == []
