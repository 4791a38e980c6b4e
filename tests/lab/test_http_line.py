"""The clients of a scenario against servers that serve, shed and break off, over loopback HTTP."""

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from envoy_tokenpools.clock import SystemClock
from envoy_tokenpools.core.pool import Mode
from envoy_tokenpools.lab.arrivals import Arrival
from envoy_tokenpools.lab.backend import SimulatedBackend
from envoy_tokenpools.lab.clients import Clients
from envoy_tokenpools.lab.dialect import Offer
from envoy_tokenpools.lab.http_line import http_line
from envoy_tokenpools.lab.record import Attempt, Result
from envoy_tokenpools.lab.scenario import Scenario
from envoy_tokenpools.lab.scenario_file import load_scenarios
from tests.support.chat_server import answering

TEXT = """
name: small
duration: 300ms
engine: {slots: 4, tokens_per_second: 40000, prefill_tokens_per_second: 100000}
pool:
  name: tiny
  models: [tiny]
  capacity: {tokens_per_second: 1k, kv_cache: 1GiB, concurrency: 4}
  kv_bytes_per_token: 1KiB
  entitlements:
    - {name: batch, class: spot, reclaim: evict}
loads:
  - {entitlement: batch, clients: 2, prompt: 20, output: 8}
"""
(SCENARIO,) = load_scenarios(TEXT)


@asynccontextmanager
async def served(scenario: Scenario) -> AsyncIterator[tuple[SimulatedBackend, str]]:
    """The scenario's engine, which remembers what came."""
    backend = SimulatedBackend(scenario.engine, Offer(("tiny",)), remember=1_000)
    try:
        yield backend, await backend.start()
    finally:
        await backend.stop()


async def attempts_of(
    scenario: Scenario, url: str, arrivals: tuple[Arrival, ...] = ()
) -> list[Attempt]:
    """What became of everything that the scenario's clients sent."""
    clock = SystemClock()
    attempts: list[Attempt] = []
    async with http_line(scenario, url, clock) as line:
        clients = Clients(scenario, line, clock, attempts)
        await clients.run(arrivals)
    return attempts


def ended(attempts: list[Attempt]) -> set[tuple[Result, str]]:
    """Results and reasons of all but those that the end of the run cut."""
    return {(one.result, one.reason) for one in attempts if one.result is not Result.CUT}


async def test_closed_loops_record_what_the_backend_did() -> None:
    """Every request, its length as drawn, to the token and in the order of its stages."""
    async with served(SCENARIO) as (backend, url):
        attempts = await attempts_of(SCENARIO, url)
        stats = backend.stats
        prompts = [msgspec.json.decode(arrival.body) for arrival in backend.arrivals]
    done = [one for one in attempts if one.result is Result.COMPLETED]
    cut = [one for one in attempts if one.result is Result.CUT]
    assert len(done) + len(cut) == len(attempts) == stats.accepted
    assert len(done) > 4
    assert len(cut) <= 2
    assert stats.prompt_tokens == 20 * len(attempts)
    assert all(one.output_tokens == one.asked_tokens == 8 for one in done)
    for one in done:
        assert one.decided_ms is not None
        assert one.first_token_ms is not None
        assert one.wanted_ms <= one.sent_ms <= one.decided_ms <= one.first_token_ms <= one.ended_ms
    assert len({prompt["messages"][0]["content"] for prompt in prompts}) == len(prompts)
    assert all(prompt["ignore_eos"] for prompt in prompts)


async def test_open_loops_send_at_their_times_whatever_becomes_of_earlier_ones() -> None:
    """Three at once though the engine has a single slot, and none before its time."""
    engine = dataclasses.replace(SCENARIO.engine, slots=1, tokens_per_second=10)
    load = dataclasses.replace(SCENARIO.loads[0], clients=0, rate=1.0, retries=0)
    scenario = dataclasses.replace(SCENARIO, engine=engine, loads=(load,))
    arrivals = tuple(Arrival(at_ms, load, 10, 5) for at_ms in (50.0, 60.0, 70.0))
    async with served(scenario) as (backend, url):
        attempts = await attempts_of(scenario, url, arrivals)
        assert backend.stats.peak_running + backend.stats.peak_waiting == 3
    assert [one.result for one in attempts] == [Result.CUT] * 3
    assert all(one.sent_ms >= 50 for one in attempts)


async def test_who_is_shed_comes_back_with_the_same_until_it_is_served() -> None:
    """Retries are told, counted from the first attempt, and end when they are used up."""
    bodies: list[bytes] = []
    retries: list[str] = []

    async def shed(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        retries.append(request.headers["x-stainless-retry-count"])
        headers = {"retry-after-ms": "20", "x-tokenpools-reason": "pool_contended"}
        return web.Response(status=429, headers=headers)

    load = dataclasses.replace(SCENARIO.loads[0], clients=0, rate=1.0, retries=2)
    scenario = dataclasses.replace(SCENARIO, loads=(load,))
    async with answering(shed) as url:
        attempts = await attempts_of(scenario, url, (Arrival(0.0, load, 10, 5),))
    assert [one.retries for one in attempts] == [0, 1, 2]
    assert retries == ["0", "1", "2"]
    assert len(set(bodies)) == 1
    assert {(one.result, one.reason) for one in attempts} == {(Result.SHED, "pool_contended")}
    assert len({one.wanted_ms for one in attempts}) == 1
    assert attempts[0].sent_ms < attempts[1].sent_ms < attempts[2].sent_ms


async def test_the_stated_maximum_may_be_more_than_what_comes() -> None:
    """Then the backend ends the answer by itself."""
    load = dataclasses.replace(SCENARIO.loads[0], clients=1, max_tokens=500)
    async with served(SCENARIO) as (backend, url):
        await attempts_of(dataclasses.replace(SCENARIO, loads=(load,)), url)
        body = msgspec.json.decode(backend.arrivals[0].body)
    assert body["max_tokens"] == 500
    assert "ignore_eos" not in body


@pytest.mark.parametrize(
    ("reason", "mode", "result"),
    [
        ("evicted", Mode.ENFORCE, Result.EVICTED),
        ("low_priority", Mode.ENFORCE, Result.SHED),
        ("", Mode.ENFORCE, Result.EVICTED),
        ("", Mode.SHADOW, Result.FAILED),
    ],
)
async def test_an_eviction_is_a_429_that_says_so_or_an_answer_that_breaks_off(
    reason: str, mode: Mode, result: Result
) -> None:
    """The latter only where runs may be ended at all: anywhere else it is a failure."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if reason:
            return web.Response(status=429, headers={"x-tokenpools-reason": reason})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return response

    pool = dataclasses.replace(SCENARIO.pool, mode=mode)
    config = dataclasses.replace(SCENARIO.config, pools={pool.name: pool})
    async with answering(answer) as url:
        attempts = await attempts_of(dataclasses.replace(SCENARIO, config=config), url)
    assert {one for one, _ in ended(attempts)} == {result}
    if not reason:
        assert attempts[0].output_tokens == 1
        assert attempts[0].first_token_ms is not None


async def test_a_server_that_is_away_or_broken_is_a_failure() -> None:
    """By the status, or as unreachable."""

    async def broken(_: web.Request) -> web.Response:
        return web.Response(status=500)

    async with answering(broken) as url:
        attempts = await attempts_of(SCENARIO, url)
    assert ended(attempts) == {(Result.FAILED, "500")}
    assert ended(await attempts_of(SCENARIO, url)) == {(Result.FAILED, "unreachable")}
