"""Clients against the simulated backend, and against a server that sheds, over loopback HTTP."""

import asyncio
import random
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec
import pytest
from aiohttp import web

from envoy_tokenpools.clock import ManualClock, SystemClock
from envoy_tokenpools.lab.backend import SimulatedBackend
from envoy_tokenpools.lab.dialect import Offer
from envoy_tokenpools.lab.engine import EngineShape
from envoy_tokenpools.lab.tally import Tally
from envoy_tokenpools.lab.traffic import Workload, run_traffic, tallies_for
from tests.support.chat_server import answering

CLOCK = SystemClock()
FAST = EngineShape(slots=8, tokens_per_second=80_000, prefill_tokens_per_second=1_000_000)
STUCK = EngineShape(slots=1, tokens_per_second=1, prefill_tokens_per_second=1_000_000)


@asynccontextmanager
async def backend(shape: EngineShape) -> AsyncIterator[tuple[SimulatedBackend, str]]:
    """A backend that remembers what came."""
    served = SimulatedBackend(shape, Offer(models=("tiny",)), remember=10_000)
    url = await served.start()
    try:
        yield served, url
    finally:
        await served.stop()


async def run(url: str, *workloads: Workload, duration_ms: int, grace_ms: int = 2_000) -> Tally:
    """Run for a short while; the tally of the first workload."""
    tallies = await run_traffic(
        url,
        workloads,
        model="tiny",
        duration_ms=duration_ms,
        clock=CLOCK,
        rng=random.Random(1),
        grace_ms=grace_ms,
    )
    return tallies[workloads[0].entitlement]


async def run_until(condition: Callable[[], bool], url: str, workload: Workload) -> Tally:
    """Let time stand still until enough has happened, then end the run."""
    clock = ManualClock()
    running = asyncio.create_task(
        run_traffic(
            url, [workload], model="tiny", duration_ms=60_000, clock=clock, rng=random.Random(1)
        )
    )
    for _ in range(2_000):
        if condition() or running.done():
            break
        await asyncio.sleep(0.002)
    assert condition()
    clock.advance(60_000)
    return (await running)[workload.entitlement]


async def test_streams_are_counted_to_the_token() -> None:
    """What the clients counted is what the backend generated, and nobody hangs up early."""
    async with backend(FAST) as (served, url):
        tally = await run_until(
            lambda: served.stats.accepted >= 20 and served.stats.peak_running == 4,
            url,
            Workload("search", "key", 4, 10, 8),
        )
    assert tally.sent == tally.admitted == tally.completed == served.stats.accepted
    assert tally.tokens == served.stats.generated_tokens == 8 * tally.completed
    assert len(tally.first_tokens) == tally.completed
    assert (tally.in_flight, tally.cancelled, served.stats.aborted) == (0, 0, 0)
    assert not tally.shed
    assert not tally.errors
    assert served.stats.peak_running == 4, "each client keeps one request going"


async def test_requests_carry_the_key_and_differ_from_each_other() -> None:
    """A prompt of the wanted length, the stated maximum, and a body that no other request has."""
    async with backend(FAST) as (served, url):
        await run_until(
            lambda: served.stats.accepted >= 6, url, Workload("search", "secret", 3, 10, 8)
        )
        bodies = [msgspec.json.decode(arrival.body) for arrival in served.arrivals]
        headers = dict(served.arrivals[0].headers)
    prompts = [body["messages"][0]["content"] for body in bodies]
    assert len(set(prompts)) == len(prompts)
    assert all(len(prompt.split()) == 10 for prompt in prompts)
    assert bodies[0]["max_tokens"] == 8
    assert "stream_options" not in bodies[0]
    assert headers["authorization"] == "Bearer secret"
    assert headers["x-stainless-retry-count"] == "0"


@pytest.mark.parametrize(
    "workload",
    [
        Workload("batch", "key", 2, 10, 8, stream=False),
        Workload("batch", "key", 2, 10, 8, include_usage=True),
    ],
)
async def test_usage_gives_the_same_count_of_tokens(workload: Workload) -> None:
    """In a whole body, and at the end of a stream that asked for it."""
    async with backend(FAST) as (served, url):
        tally = await run_until(lambda: served.stats.accepted >= 4, url, workload)
    assert tally.tokens == served.stats.generated_tokens >= 4 * 8
    assert bool(tally.first_tokens) == workload.stream


async def test_workloads_begin_and_end_when_told() -> None:
    """The late one sends nothing early, the short one nothing late; one tally per entitlement."""
    async with backend(FAST) as (served, url):
        tallies = await run_traffic(
            url,
            [
                Workload("late", "key", 1, 5, 2, start_ms=400, stop_ms=99_999),
                Workload("short", "key", 1, 5, 2, stop_ms=300),
                Workload("never", "key", 1, 5, 2, start_ms=1_000),
            ],
            model="tiny",
            duration_ms=500,
            clock=CLOCK,
            rng=random.Random(1),
        )
        order = "".join("L" if b"late" in arrival.body else "S" for arrival in served.arrivals)
    assert tallies["late"].first_tokens[0].at_ms >= 400
    assert re.fullmatch("S+L+", order)
    assert tallies["never"].sent == 0


async def test_a_thinking_client_sends_less() -> None:
    """It pauses after each answer; it is never past the end of the run for that."""
    async with backend(FAST) as (_, url):
        tally = await run(url, Workload("chat", "key", 1, 5, 2, think_ms=10_000), duration_ms=300)
    assert tally.sent == tally.completed == 1
    assert tally.elapsed_ms < 2_000


async def test_the_tally_is_live() -> None:
    """A reader sees requests in flight while they run, and none after a run was cancelled."""
    workload = Workload("search", "key", 3, 5, 8)
    tallies = tallies_for([workload], CLOCK)
    async with backend(STUCK) as (_, url):
        running = asyncio.create_task(
            run_traffic(
                url,
                [workload],
                model="tiny",
                duration_ms=60_000,
                clock=CLOCK,
                rng=random.Random(1),
                tallies=tallies,
            )
        )
        for _ in range(2_000):
            if running.done() or tallies["search"].in_flight == 3:
                break
            await asyncio.sleep(0.002)
        assert tallies["search"].in_flight == 3
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (tallies["search"].in_flight, tallies["search"].cancelled) == (0, 3)
    assert tallies["search"].ended_ms is not None


async def test_the_end_is_bounded_and_leaves_nothing_behind() -> None:
    """Requests that never end are cut after the grace time, and the backend is told."""
    async with backend(STUCK) as (served, url):
        tally = await run(url, Workload("search", "key", 3, 5, 8), duration_ms=300, grace_ms=50)
        assert tally.elapsed_ms < 2_000
        assert (tally.sent, tally.admitted, tally.completed, tally.cancelled) == (3, 3, 0, 3)
        assert tally.in_flight == 0
        for _ in range(200):
            if served.stats.running + served.stats.waiting == 0:
                break
            await asyncio.sleep(0.005)
        assert served.stats.aborted == 3


async def test_a_shed_request_comes_back_with_the_same_body() -> None:
    """After the time that the 429 asked for, saying how often it was tried; then it is served."""
    arrivals: dict[bytes, list[tuple[str, int]]] = defaultdict(list)

    async def shed_twice(request: web.Request) -> web.Response:
        body = await request.read()
        arrivals[body].append((request.headers["x-stainless-retry-count"], CLOCK.now_ms()))
        if len(arrivals[body]) < 3:
            headers = {"retry-after": "1", "retry-after-ms": "40", "x-tokenpools-reason": "busy"}
            return web.json_response({"error": {}}, status=429, headers=headers)
        return web.json_response({"usage": {"completion_tokens": 8}})

    async with answering(shed_twice) as url:
        tally = await run_until(
            lambda: sum(len(tries) == 3 for tries in arrivals.values()) >= 2,
            url,
            Workload("batch", "key", 2, 5, 8, stream=False),
        )
    for tries in (tries for tries in arrivals.values() if len(tries) == 3):
        assert [count for count, _ in tries] == ["0", "1", "2"]
        assert all(later - earlier >= 39 for (_, earlier), (_, later) in pairwise(tries))
    assert set(tally.shed) == {"busy"}
    assert tally.sent == tally.admitted + tally.shed["busy"]
    assert tally.retried == sum(len(tries) - 1 for tries in arrivals.values())


@pytest.mark.parametrize(
    ("headers", "within_ms"),
    [
        ({"retry-after-ms": "99999999"}, 5_000),
        ({"retry-after": "later"}, 200),
        ({"x-should-retry": "false", "retry-after-ms": "0"}, 20),
    ],
)
async def test_waits_are_bounded(headers: dict[str, str], within_ms: int) -> None:
    """Neither an endless wait nor a busy loop, and never past the end of the run."""
    bodies: list[bytes] = []

    async def shed(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.json_response({}, status=429, headers=headers)

    async with answering(shed) as url:
        tally = await run(url, Workload("batch", "key", 1, 5, 8), duration_ms=200)
    assert tally.elapsed_ms < 2_000
    assert 1 <= tally.shed["unstated"] <= 1 + 200 // within_ms
    gives_up = headers.get("x-should-retry") == "false"
    assert len(set(bodies)) == (len(bodies) if gives_up else 1)


async def test_errors_are_counted_by_what_went_wrong() -> None:
    """A status, a broken stream, an error in mid-stream, JSON that is none."""
    clock = ManualClock()
    all_there = asyncio.Barrier(4)

    async def misbehave(request: web.Request) -> web.StreamResponse:
        await all_there.wait()
        clock.advance(1_000)  # so that each client asks once
        kind = msgspec.json.decode(await request.read())["max_tokens"]
        if kind == 1:
            return web.json_response({}, status=503)
        if kind == 2:
            return web.Response(body=b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        if kind == 3:
            return web.Response(body=b'data: {"error":{"code":500}}\n\ndata: [DONE]\n\n')
        return web.Response(body=b"data: {broken\n\n")

    workloads = [Workload(f"w{kind}", "key", 1, 5, kind) for kind in (1, 2, 3, 4)]
    async with answering(misbehave) as url:
        tallies = await run_traffic(
            url, workloads, model="tiny", duration_ms=1_000, clock=clock, rng=random.Random(1)
        )
    assert [dict(tally.errors) for tally in tallies.values()] == [
        {"503": 1},
        {"broken_off": 1},
        {"broken_off": 1},
        {"broken_off": 1},
    ]
    assert [tally.admitted for tally in tallies.values()] == [0, 1, 1, 1]
    assert all(tally.completed == 0 for tally in tallies.values())


async def test_no_workloads_are_no_traffic() -> None:
    """It ends at once."""
    assert not await run_traffic(
        "http://127.0.0.1:1",
        [],
        model="tiny",
        duration_ms=99_999,
        clock=CLOCK,
        rng=random.Random(1),
    )


async def test_a_defect_in_a_client_ends_the_run_and_is_raised() -> None:
    """A silent client would make the numbers lie."""

    class Broken(random.Random):
        def random(self) -> float:
            message = "defect"
            raise RuntimeError(message)

    async def shed(_: web.Request) -> web.Response:
        return web.json_response({}, status=429)

    async with answering(shed) as url, asyncio.timeout(5):
        with pytest.raises(RuntimeError, match="defect"):
            await run_traffic(
                url,
                [Workload("batch", "key", 2, 5, 8)],
                model="tiny",
                duration_ms=60_000,
                clock=CLOCK,
                rng=Broken(),
            )


async def test_nobody_listening_is_an_error_of_its_own() -> None:
    """And the client goes on trying at a bearable pace."""
    async with backend(FAST) as (_, url):
        pass
    tally = await run(url, Workload("batch", "key", 1, 5, 8), duration_ms=150)
    assert dict(tally.errors) == {"unreachable": 1}
    assert tally.sent == 1
