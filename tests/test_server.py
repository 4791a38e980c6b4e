"""The server as a whole: it listens, reloads, drains and stops without losing a lease."""

import asyncio
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from envoy_tokenpools import server as server_module
from envoy_tokenpools.config import Config, ServerSettings
from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.errors import ConfigError
from envoy_tokenpools.extproc.service import SERVICE
from envoy_tokenpools.gate.order import Outcome
from envoy_tokenpools.server import FilterServer, Listen
from envoy_tokenpools.tokenizer import VOCABULARY_NAMES, Vocabulary, load_vocabularies
from tests.support.extproc import (
    Message,
    Response,
    chat,
    immediate_of,
    kind_of,
    post_rh,
    rb,
    sb,
    sh,
)
from tests.support.gate import configured
from tests.support.pools import amount, entitlement, pool
from tests.support.scrapes import parse_text
from tests.support.streams import S

LOOPBACK = "127.0.0.1"
ANYWHERE = Listen(ext_proc=f"{LOOPBACK}:0", admin_host=LOOPBACK, admin_port=0)
SSE = "text/event-stream"
WITHIN_S = 20
DRAIN_MS = 20_000


def config(*names: str, drain_ms: int = DRAIN_MS, max_body_bytes: int = 100_000) -> Config:
    """One pool with these entitlements; it drains for longer than any test waits, unless told."""
    who = [entitlement(name, ServiceClass.SPOT) for name in names or ("a",)]
    settings = ServerSettings(drain_ms=drain_ms, max_body_bytes=max_body_bytes)
    return configured(pool(amount(), *who), server=settings)


@pytest.fixture(scope="module")
def vocabularies() -> dict[str, Vocabulary]:
    """Loaded once: it takes half a second."""
    return load_vocabularies(VOCABULARY_NAMES)


@pytest.fixture(autouse=True)
def _same_vocabularies(
    monkeypatch: pytest.MonkeyPatch, vocabularies: dict[str, Vocabulary]
) -> None:
    monkeypatch.setattr(server_module, "load_vocabularies", lambda _: vocabularies)


@asynccontextmanager
async def running(one: Config, listen: Listen = ANYWHERE) -> AsyncIterator[FilterServer]:
    """A started server, stopped in any case."""
    server = FilterServer(one, listen)
    await server.start()
    try:
        yield server
    finally:
        await asyncio.wait_for(server.stop(), WITHIN_S)


@asynccontextmanager
async def connected(server: FilterServer) -> AsyncIterator[grpc.aio.Channel]:
    """A client of the gRPC port, which accepts messages of any size."""
    options = [("grpc.max_send_message_length", -1)]
    target = f"{LOOPBACK}:{server.ext_proc_port}"
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        yield channel


def stream(channel: grpc.aio.Channel) -> Any:
    """A stream as Envoy opens one."""
    return channel.stream_stream(f"/{SERVICE}/Process")()


async def say(call: Any, *messages: Message) -> list[Response]:
    """Each message after the reply to the one before."""
    replies = []
    for message in messages:
        await call.write(bytes(message))
        reply = await asyncio.wait_for(call.read(), WITHIN_S)
        assert isinstance(reply, bytes), reply
        replies.append(Response.parse(reply))
    return replies


async def health(channel: grpc.aio.Channel, service: str = SERVICE) -> int:
    """What the health service says."""
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    status: int = answer.status
    return status


async def admin(server: FilterServer, path: str) -> tuple[int, str]:
    """Status and text of an admin page."""
    url = f"http://{LOOPBACK}:{server.admin_port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text()


async def counted(server: FilterServer, name: str, label: str) -> dict[str, float]:
    """Samples of a counter by one of its labels."""
    _, text = await admin(server, "/metrics")
    return {
        sample.labels[label]: sample.value
        for family in parse_text(text)
        for sample in family.samples
        if sample.name == name
    }


def endings(server: FilterServer) -> dict[str, float]:
    """Completions by ending, also of a server that no longer listens."""
    text = server._metrics.render(server.gate.report())[0].decode()
    return {
        sample.labels["ending"]: sample.value
        for family in parse_text(text)
        for sample in family.samples
        if sample.name == "tokenpools_completions_total"
    }


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until `condition` holds."""

    async def watch() -> None:
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)

    await asyncio.wait_for(watch(), WITHIN_S)


async def test_it_serves_decides_and_counts() -> None:
    """Health, readiness, a whole exchange counted with the real tokenizer, and its metrics."""
    async with running(config()) as server, connected(server) as channel:
        assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
        assert await health(channel, "") == health_pb2.HealthCheckResponse.SERVING
        assert (await admin(server, "/readyz"))[0] == 200
        call = stream(channel)
        await say(call, post_rh(), rb(chat(stream=True)), sh(200, SSE), sb(S, eos=True))
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        assert await counted(server, "tokenpools_requests_total", "outcome") == {"admitted": 1}
        assert await counted(server, "tokenpools_completions_total", "ending") == {"completed": 1}
        assert await counted(server, "tokenpools_in_flight", "entitlement") == {"a": 0}


async def test_a_drain_is_told_and_requests_are_still_taken() -> None:
    """Not ready and not serving; who comes nevertheless is served."""
    async with running(config()) as server, connected(server) as channel:
        await server.drain()
        assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await admin(server, "/readyz"))[0] == 503
        assert (await admin(server, "/healthz"))[0] == 200
        call = stream(channel)
        assert kind_of((await say(call, post_rh()))[0]) == "request_headers"
        call.cancel()


async def test_a_stop_waits_for_what_is_in_flight() -> None:
    """New streams are refused; the open one goes on to its end and is settled as completed."""
    server = FilterServer(config(), ANYWHERE)
    await server.start()
    async with connected(server) as channel:
        call = stream(channel)
        await say(call, post_rh(), rb(chat(stream=True)), sh(200, SSE), sb(S[:300]))
        stopping = asyncio.create_task(server.stop())
        await until(lambda: not server._service.open_streams or server._admin._drain.started)
        await say(call, sb(S[300:]), sb(eos=True))
        assert not stopping.done()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        await asyncio.wait_for(stopping, WITHIN_S)
        late = stream(channel)
        assert await late.code() is grpc.StatusCode.UNAVAILABLE
    assert endings(server) == {"completed": 1}


@pytest.mark.parametrize("drain_ms", [0, 50])
async def test_a_stop_settles_what_did_not_end_in_time(drain_ms: int) -> None:
    """As truncated, by us, with what was delivered; nothing stays in the books."""
    server = FilterServer(config(drain_ms=drain_ms), ANYWHERE)
    await server.start()
    async with connected(server) as channel:
        calls = [stream(channel) for _ in range(5)]
        for call in calls:
            await say(call, post_rh(), rb(chat(stream=True)), sh(200, SSE), sb(S[:300]))
        await asyncio.wait_for(server.stop(), WITHIN_S)
        for call in calls:
            assert await call.code() is not grpc.StatusCode.OK
    assert endings(server) == {"truncated": 5}
    assert (await server._store.snapshot("pool")).total.in_flight == 0
    assert server._service.open_streams == 0


async def test_a_stop_waits_for_settlements(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long they take: the store is closed after the last of them."""
    server = FilterServer(config(drain_ms=0), ANYWHERE)
    await server.start()
    settle, close, order = server.gate.settle, server._store.close, []

    async def slow(outcome: Outcome) -> None:
        for _ in range(10_000):
            await asyncio.sleep(0)
        await settle(outcome)
        order.append("settled")

    async def closed() -> None:
        await close()
        order.append("closed")

    monkeypatch.setattr(server.gate, "settle", slow)
    monkeypatch.setattr(server._store, "close", closed)
    async with connected(server) as channel:
        await say(stream(channel), post_rh(), rb(chat(stream=True)))
        await asyncio.wait_for(server.stop(), WITHIN_S)
    assert order == ["settled", "closed"]


async def test_a_health_watcher_does_not_hold_up_a_stop() -> None:
    """It never ends by itself, and holds no lease."""
    server = FilterServer(config(), ANYWHERE)
    await server.start()
    async with connected(server) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        answer = await watch.read()
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await asyncio.wait_for(server.stop(), DRAIN_MS / 2_000)


async def test_nothing_is_left_running_after_a_stop() -> None:
    """No task, and the port is free again."""
    before = asyncio.all_tasks()
    async with running(config()) as server, connected(server) as channel:
        await health(channel)
        port = server.ext_proc_port
    await until(lambda: asyncio.all_tasks() - {asyncio.current_task()} <= before)
    async with running(config(), replace(ANYWHERE, ext_proc=f"{LOOPBACK}:{port}")) as again:
        assert again.ext_proc_port == port


# Addresses


@pytest.mark.parametrize("which", ["ext_proc", "admin"])
async def test_a_port_in_use_is_an_error_that_leaves_nothing(which: str) -> None:
    """The second server does not start; the first one goes on."""
    async with running(config()) as first, connected(first) as channel:
        listen = ANYWHERE
        if which == "ext_proc":
            listen = replace(listen, ext_proc=f"{LOOPBACK}:{first.ext_proc_port}")
        else:
            listen = replace(listen, admin_port=first.admin_port)
        before = asyncio.all_tasks()
        second = FilterServer(config(), listen)
        with pytest.raises(OSError, match=r"cannot listen|in use"):
            await second.start()
        await second.stop()
        await until(lambda: asyncio.all_tasks() - {asyncio.current_task()} <= before)
        assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
        assert (await admin(first, "/readyz"))[0] == 200


async def test_a_unix_socket_can_be_used_by_its_group(tmp_path: Path) -> None:
    """Envoy is usually another user."""
    path = tmp_path / "ext_proc.sock"
    async with running(config(), replace(ANYWHERE, ext_proc=f"unix:{path}")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            assert await health(channel) == health_pb2.HealthCheckResponse.SERVING


async def test_the_admin_can_be_left_out() -> None:
    """Without a port there is none."""
    async with running(config(), replace(ANYWHERE, admin_port=None)) as server:
        assert server.admin_port is None


async def test_a_stop_without_a_start_does_nothing() -> None:
    """A failed start-up ends like this."""
    await FilterServer(config(), ANYWHERE).stop()


def test_a_state_that_no_store_knows_is_a_fault() -> None:
    """Before anything listens."""
    with pytest.raises(ConfigError):
        FilterServer(replace(config(), state="etcd://"), ANYWHERE)


# Bodies


async def test_bodies_up_to_the_limit_fit_into_a_message() -> None:
    """GRPC's own limit of 4 MiB is out of the way; above ours it is 413, by an answer."""
    limit = 6 * 1024 * 1024
    async with running(config(max_body_bytes=limit)) as server, connected(server) as channel:
        room = limit - len(chat("", max_tokens=1))
        for size, kind in ((room, "request_body"), (room + 1, "immediate_response")):
            call = stream(channel)
            # Pictures are not counted by their length.
            url = {"type": "image_url", "image_url": {"url": "a" * size}}
            shorter = size - len(chat([url], max_tokens=1)) + len(chat("", max_tokens=1)) + size
            url = {"type": "image_url", "image_url": {"url": "a" * shorter}}
            body = chat([url], max_tokens=1)
            assert len(body) == len(chat("", max_tokens=1)) + size
            _, reply = await say(call, post_rh(), rb(body))
            assert kind_of(reply) == kind
            if kind == "immediate_response":
                assert immediate_of(reply)[0] == 413
            call.cancel()


# Reloads


async def test_a_reload_changes_who_is_served_and_is_counted() -> None:
    """For the streams that come after it."""
    async with running(config("a")) as server, connected(server) as channel:
        call = stream(channel)
        assert immediate_of((await say(call, post_rh(key="key-b")))[0])[0] == 401
        await server.reload(config("b"))
        call = stream(channel)
        replies = await say(call, post_rh(key="key-b"), rb(chat(max_tokens=1)))
        assert kind_of(replies[1]) == "request_body"
        call = stream(channel)
        assert immediate_of((await say(call, post_rh(key="key-a")))[0])[0] == 401
        server.config_refused()
        found = await counted(server, "tokenpools_config_reloads_total", "result")
        assert sorted(found.values()) == [1, 1]
