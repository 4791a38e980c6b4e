"""
Exchanges: bytes choose what Envoy sends on up to four streams at a time, and when it breaks them off.

They also choose how long the store, the tokenizer and the time take. The service, the gate and the memory store behind
it are the real ones.
"""

import asyncio
import atexit
import functools
from collections.abc import Sequence
from dataclasses import replace

import uvloop

from envoy_tokenpools.config import Config, ServerSettings
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import Limits, Mode, Pool, ServiceClass
from envoy_tokenpools.extproc.service import ExtProcService
from envoy_tokenpools.observer import Ending
from envoy_tokenpools.observer import Outcome as Decision
from envoy_tokenpools.openai.transcript import MAX_TOKENS
from tests.fuzz.books import CountingStore
from tests.fuzz.envoy_messages import MESSAGES, body_message, headers_message
from tests.fuzz.scripted import Script, ScriptedStream
from tests.support.gate import GateDesk, configured
from tests.support.pools import amount, entitlement, pool

_A = entitlement("a", ServiceClass.ELASTIC, amount(1_000, 1, 1_000_000))
_B = entitlement("b", ServiceClass.GUARANTEED, amount(100, 1, 200_000), slo_target_ms=200)
_C = entitlement("c", ServiceClass.PREEMPTIBLE, limits=Limits(concurrency=1))
_ROOMY = pool(amount(100_000, 100, 100_000_000), _A, _B, _C)
_TIGHT = pool(amount(1_200, 2, 1_300_000), _A, _B, _C, tick_ms=1_000)
_POOLS: Sequence[Pool] = (
    _ROOMY,
    _TIGHT,
    replace(_ROOMY, mode=Mode.SHADOW),
    replace(_TIGHT, mode=Mode.SHADOW),
    replace(_ROOMY, inject_usage=False),
    pool(amount(1_200, 2, 1_300_000), _A, _B, tick_ms=1_000),
    pool(amount(), entitlement("a", ServiceClass.SPOT)),
    replace(_TIGHT, entitlements={}),
)
"""Each may be in force first, and each may be reloaded to."""

_SETTINGS = (
    ServerSettings(),
    ServerSettings(max_body_bytes=1_000),
    ServerSettings(path_prefix="/team/", rejects_unknown_endpoints=True),
    ServerSettings(lease_ttl_ms=3_000, rejects_unknown_endpoints=True),
)
_HEADERS = (
    *(b":path", b":method", b"authorization", b"api-key", b"content-encoding", b"content-length"),
    *(b"x-forwarded-client-cert", b"x-stainless-retry-count", b":status", b"content-type"),
)
_TURNS = (2, 0, 1, 12)

MAX_STEPS = 80


def fuzz_exchange(data: bytes) -> dict[str, int]:
    """
    Play a script: one reply of its own kind for every message, every lease settled exactly once, and none left.
    """
    if len(data) < 3:
        return {}
    loop = _loop()
    try:
        return loop.run_until_complete(_play(Script(data)))
    finally:
        # A script that failed leaves its streams behind, which the next one must not find.
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = uvloop.new_event_loop()
    atexit.register(loop.close)
    return loop


@functools.cache
def _configuration(number: int, settings: int) -> Config:
    return configured(_POOLS[number], server=_SETTINGS[settings], default_pool="pool")


class _Play:
    """One script being played."""

    def __init__(self, desk: GateDesk, store: CountingStore, streams: int, settings: int) -> None:
        self.desk = desk
        self.store = store
        self.service = ExtProcService(desk.gate, desk.clock)
        self.streams = [ScriptedStream() for _ in range(streams)]
        self.tasks = [
            asyncio.ensure_future(self.service._process(None, stream)) for stream in self.streams
        ]
        self._settings = settings

    async def step(self, script: Script) -> None:
        """One step; the two highest bits choose the stream, the others what happens."""
        code = script.byte()
        number = (code >> 6) % len(self.streams)
        stream, action = self.streams[number], code & 0x3F
        if action < 40:
            stream.send(MESSAGES[script.byte() % len(MESSAGES)])
        elif action < 46:
            how = script.byte()
            kind = "request_body" if how & 1 else "response_body"
            stream.send(body_message(kind, script.some(), ends=bool(how & 2)))
        elif action < 49:
            how = script.byte()
            kind = "response_headers" if how & 1 else "request_headers"
            pairs = [(_HEADERS[script.byte() % len(_HEADERS)], script.some()) for _ in range(3)]
            stream.send(headers_message(kind, pairs, ends=bool(how & 2)))
        elif action < 50:
            stream.send_anything(script.some())
        elif action < 52:
            self.tasks[number].cancel()
        elif action < 53:
            stream.close()
        else:
            await self._change(action, script.byte())
        await turn(_TURNS[script.byte() & 3])

    async def _change(self, action: int, how: int) -> None:
        """Something that is not about one stream."""
        desk, store = self.desk, self.store
        if action < 56:
            # A reply travels for less time than a lease lives.
            await store.quiet()
            await desk.pass_ms((1, 250, 900, 2_900, 5_000, 20_000, 61_000, 0)[how & 7])
        elif action < 58:
            self.hold_counting(held=bool(how & 1))
        elif action < 60:
            store.there, store.back = how & 3, how >> 2 & 3
        elif action < 62:
            store.fails_there, store.fails_back = how & 7 == 1, how & 7 == 2
        elif action < 63:
            number = how % len(_POOLS)
            await desk.gate.reload(_configuration(number, self._settings))
        else:
            self.service.stop()

    def hold_counting(self, *, held: bool) -> None:
        """Make texts large or small: whether their counting waits."""
        if held and self.desk.counter.held is None:
            self.desk.counter.held = asyncio.Event()
        elif not held and self.desk.counter.held is not None:
            self.desk.counter.held.set()
            self.desk.counter.held = None

    async def end(self, last: int) -> None:
        """End every stream, one way or the other, and wait for all that goes on."""
        self.hold_counting(held=False)
        self.store.fails_there = self.store.fails_back = False
        for number, stream in enumerate(self.streams):
            if last >> number & 1:
                self.tasks[number].cancel()
            stream.close()
        await asyncio.wait(self.tasks)
        await self.service.settled()
        await self.desk.gate.close()

    def check_streams(self) -> None:
        """Replies are of the right kind, and no fault of ours ended a stream."""
        assert self.service.open_streams == 0
        for task, stream in zip(self.tasks, self.streams, strict=True):
            is_whole = not task.cancelled() and task.exception() is None
            assert is_whole or task.cancelled() or stream.may_fail
            stream.check(is_whole=is_whole)

    async def check_books(self) -> None:
        """Every lease has ended exactly once, everything is charged within bounds, nothing is in use."""
        desk, store = self.desk, self.store
        assert not any(desk.gate.house.held(name) for name in desk.config.pools)
        if store.failures:
            # What could not be given back returns by itself.
            await desk.pass_ms(desk.config.server.lease_ttl_ms + 1)
        else:
            assert set(store.asked) >= store.leased
        assert store.ended.keys() == store.leased
        assert all(times == 1 for times in store.ended.values()), store.ended
        assert all(times == 1 for times in store.asked.values()), store.asked
        view = await store.snapshot("pool")
        assert view.total == InUse(), view
        assert all(in_use == InUse() for in_use in view.accounts.values()), view
        settled = [one for one in desk.observer.settlements if one.ending is not Ending.EXPIRED]
        assert len(settled) == self.admissions
        for one in settled:
            for tokens in (one.prompt_tokens, one.completion_tokens, one.estimated_prompt_tokens):
                assert type(tokens) is int, one
                assert 0 <= tokens <= MAX_TOKENS, one
            assert one.held_ms >= 0, one

    @property
    def admissions(self) -> int:
        """Requests that were admitted."""
        events = self.desk.observer.decisions
        return sum(event.outcome is Decision.ADMITTED for event in events)


async def turn(times: int) -> None:
    """Let the event loop go round."""
    for _ in range(times):
        await asyncio.sleep(0)


async def _play(script: Script) -> dict[str, int]:
    number, settings = script.byte(), script.byte()
    streams = 1 + (settings >> 2 & 3)
    config = _configuration(number % len(_POOLS), settings & 3)
    desk = await GateDesk.open(
        *config.pools.values(),
        store=CountingStore,
        server=config.server,
        default_pool="pool",
    )
    assert isinstance(desk.store, CountingStore)
    play = _Play(desk, desk.store, streams, settings & 3)
    last = script.byte()
    steps = 0
    while script.left and steps < MAX_STEPS:
        steps += 1
        await play.step(script)
    await play.end(last)
    play.check_streams()
    await play.check_books()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return {
        "exchanges": streams,
        "messages": sum(len(stream.read_kinds) for stream in play.streams),
        "replies": sum(len(stream.replies) for stream in play.streams),
        "admitted": play.admissions,
        "leases": len(play.store.leased),
        "refused": len(desk.observer.decisions) - play.admissions,
        "cancelled": sum(task.cancelled() for task in play.tasks),
        "store_failures": play.store.failures.total(),
    }
