"""Counting what is long, hostile or offline: exact, finite, and beside the event loop."""

import asyncio
import contextlib
import socket
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from envoy_tokenpools import server as server_module
from envoy_tokenpools.clock import SystemClock
from envoy_tokenpools.config import load_config
from envoy_tokenpools.extproc.service import SERVICE
from envoy_tokenpools.server import FilterServer, Listen
from envoy_tokenpools.tokenizer import VOCABULARY_NAMES, load_vocabularies
from tests.support.cases import FRAME, ROOMY, running, vocabularies
from tests.support.extproc import HI, Response, chat, post_rh, rb


def chat_on(model: str, text: str) -> bytes:
    """A chat with this text for one of the vocabularies: `o` or `c`."""
    return chat(text, model=model)


@pytest.mark.parametrize(
    ("character", "times", "tokens"),
    [
        ("a", 100_000, {"c": 12_500, "o": 12_500}),
        ("_", 50_000, {"c": 782, "o": 782}),
        ("^", 1_000_000, {"c": 250_000, "o": 125_000}),
        ("0", 1_000_000, {"c": 333_334, "o": 333_334}),
        ("中", 300_000, {"c": 300_000, "o": 300_000}),
        ("👍", 300_000, {"c": 900_000, "o": 300_000}),
    ],
)
async def test_long_runs_are_counted_exactly(
    character: str, times: int, tokens: dict[str, int]
) -> None:
    """Case 16: a run that cannot be cut is counted whole, in either vocabulary."""
    async with running(ROOMY) as desk:
        for model, expected in tokens.items():
            stream = await desk.admit(chat_on(model, character * times))
            assert desk.reserved[0] == expected + FRAME
            await stream.end()


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[FilterServer, grpc.aio.Channel]]:
    """A whole server, and a client that may send it megabytes."""
    server = FilterServer(load_config(ROOMY, env={}), Listen("127.0.0.1:0", "127.0.0.1", None))
    await server.start()
    options = [("grpc.max_send_message_length", -1)]
    address = f"127.0.0.1:{server.ext_proc_port}"
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield server, channel
    await server.stop()


async def decided(channel: grpc.aio.Channel, body: bytes) -> int:
    """Milliseconds until a request was let through."""
    clock = SystemClock()
    call = channel.stream_stream(f"/{SERVICE}/Process")()
    await call.write(bytes(post_rh()))
    await call.read()
    started_ms = clock.now_ms()
    await call.write(bytes(rb(body)))
    reply = Response.parse(await call.read())
    assert reply.immediate_response is None
    took_ms = clock.now_ms() - started_ms
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return took_ms


async def test_health_and_small_requests_do_not_wait_for_huge_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 16: while five bodies of a megabyte are counted, health answers and a small request is decided at once."""
    monkeypatch.setattr(server_module, "load_vocabularies", lambda _: vocabularies())
    clock = SystemClock()
    huge = [chat_on("o", character * 1_000_000) for character in "^0a_9"]
    async with served() as (_, channel):
        health = health_pb2_grpc.HealthStub(channel)
        counting = [asyncio.create_task(decided(channel, body)) for body in huge]
        await asyncio.sleep(0.02)
        small = asyncio.create_task(decided(channel, HI))
        waits_ms = []
        while not all(task.done() for task in counting):
            started_ms = clock.now_ms()
            await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
            waits_ms.append(clock.now_ms() - started_ms)
            await asyncio.sleep(0.02)
        await asyncio.gather(*counting)
        assert len(waits_ms) > 5
        assert statistics.quantiles(waits_ms, n=100)[98] < 200
        assert await small < 300


@pytest.mark.parametrize("blank", [" ", "\t", "\u00a0", "\u3000"])
async def test_a_million_blanks_are_a_finite_number_of_tokens(blank: str) -> None:
    """Case 17: where the tokenizer gives up there is still an estimate, and the worker lives on."""
    async with running(ROOMY) as desk:
        stream = await desk.admit(chat_on("o", blank * 999_999))
        assert 7_813 <= desk.reserved[0] < 999_999
        await stream.end()
        await desk.at_rest()


async def test_a_million_blanks_before_a_letter_are_too() -> None:
    """Case 17: the same in the other vocabulary; one blank less is the control, and exact."""
    async with running(ROOMY) as desk:
        for model, text, exact in (
            ("c", " " * 999_999 + "x", False),
            ("o", " " * 999_998, True),
            ("c", " " * 999_998, True),
        ):
            stream = await desk.admit(chat_on(model, text))
            content = desk.reserved[0] - FRAME
            assert content == 7_813 if exact else 7_813 <= content < 8_000
            await stream.end()
        await desk.at_rest()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("", b""),
        ("cl100k_base.tiktoken", b"IQ== 0\n"),
        ("9b5ad71b2ce5302211f9c61530b329a4922fc6a4", b"IQ== 0\n"),
        ("fb374d419588a4632f3f557e76b4b70aebbca790", b"\x49"),
    ],
)
async def test_the_vocabulary_needs_neither_network_nor_cache(
    name: str, content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Case 19: it comes with the installation, whatever TIKTOKEN_CACHE_DIR holds: nothing, a name or a damaged file."""

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise AssertionError("the network was used")

    if name:
        (tmp_path / name).write_bytes(content)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with monkeypatch.context() as offline:
        offline.setattr(socket, "socket", refuse)
        loaded = load_vocabularies(VOCABULARY_NAMES)
    assert [vocabulary.count("Hello world") for vocabulary in loaded.values()] == [2, 2]
