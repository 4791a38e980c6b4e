"""
The filter as the cases of `tests/cases` speak to it: everything but gRPC and Envoy is real, and time stands still.

One `Stream` is one ext_proc stream, spoken to message by message; it ends by EOF or CANCEL, as Envoy ends it.
"""

import asyncio
import contextlib
import functools
import gzip
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import brotli
import grpc

from envoy_tokenpools.clock import Clock, ManualClock
from envoy_tokenpools.config import load_config
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.extproc.service import ExtProcService
from envoy_tokenpools.extproc.wire import ProcessingRequest, parse_request
from envoy_tokenpools.gate.gate import Gate
from envoy_tokenpools.observer import Decided, Settled
from envoy_tokenpools.store.base import Store
from envoy_tokenpools.store.memory import MemoryStore
from envoy_tokenpools.tokenizer import (
    VOCABULARY_NAMES,
    TokenCounter,
    Vocabulary,
    load_vocabularies,
)
from tests.support.extproc import (
    CHAT,
    HI,
    Message,
    Response,
    immediate_of,
    kind_of,
    post_rh,
    rb,
    sb,
    sh,
)
from tests.support.observers import RecordingObserver

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

WITHIN_S = 20.0
SSE = "text/event-stream"

FRAME = 7
"""What a chat of one message counts beside its content: four for the message, three for the reply."""

ENCODINGS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "br": brotli.compress,
    "zstd": zstd.compress,
}
"""Content codings, and what makes them."""

ROOMY = """
default_pool: o
pools:
  - name: o
    models: [o, m]
    capacity: {tokens_per_second: 100M, kv_cache: 1Ti, concurrency: 10000}
    kv_bytes_per_token: 1Ki
    tokenizer: o200k_base
    entitlements:
      - {name: a, class: spot, keys: [{plain: key-a}]}
  - name: c
    models: [c]
    capacity: {tokens_per_second: 100M, kv_cache: 1Ti, concurrency: 10000}
    kv_bytes_per_token: 1Ki
    tokenizer: cl100k_base
    entitlements:
      - {name: a, class: spot, keys: [{plain: key-a}]}
"""
"""A pool for each vocabulary, in which nothing is ever short."""

THOUSAND = """
pools:
  - name: pool
    models: [m]
    capacity: {tokens_per_second: 100, kv_cache: 1000Ki, concurrency: 100}
    kv_bytes_per_token: 1Ki
    default_max_tokens: 1024
    entitlements:
      - {name: a, class: spot, keys: [{plain: key-a}]}
"""
"""A pool of 1000 tokens, which refills by 100 a second; an output of 1024 is assumed where no maximum is stated."""

ONE_AT_A_TIME = """
pools:
  - name: pool
    models: [m]
    capacity: {tokens_per_second: 10k, kv_cache: 1Gi, concurrency: 1}
    kv_bytes_per_token: 1Ki
    entitlements:
      - {name: a, class: spot, keys: [{plain: key-a}]}
"""
"""A pool with room for a single sequence."""


@functools.cache
def vocabularies() -> dict[str, Vocabulary]:
    """Both vocabularies, loaded once."""
    return load_vocabularies(VOCABULARY_NAMES)


class Stream:
    """One ext_proc stream to a service; each message waits until the service is done with it."""

    def __init__(self, service: ExtProcService) -> None:
        self.payloads: list[bytes] = []
        self.status = grpc.StatusCode.OK
        self._incoming: asyncio.Queue[ProcessingRequest | object] = asyncio.Queue()
        self._asks = asyncio.Event()
        self._task = asyncio.create_task(service._process(None, self))

    async def say(self, *messages: Message) -> list[Response]:
        """Send messages one by one; the replies to them, each of its message's kind."""
        before = len(self.payloads)
        observes = False
        for message in messages:
            observes = observes or message.observability_mode
            said = len(self.payloads)
            self.begin(message)
            await self.heard()
            new = [Response.parse(payload) for payload in self.payloads[said:]]
            assert len(new) == (0 if observes else 1)
            assert all(kind_of(r) in (kind_of(message), "immediate_response") for r in new)
        return self.replies[before:]

    @property
    def replies(self) -> list[Response]:
        """All replies so far."""
        return [Response.parse(payload) for payload in self.payloads]

    def begin(self, message: Message | bytes) -> None:
        """Send a message, maybe as the bytes that it is, without waiting for what comes of it."""
        self._asks.clear()
        self._incoming.put_nowait(parse_request(bytes(message)))

    async def heard(self) -> None:
        """Wait until the service asks for the next message."""
        for _ in range(10):  # mostly it takes a turn or two
            if self._asks.is_set():
                return
            await asyncio.sleep(0)
        asked = asyncio.create_task(self._asks.wait())
        await asyncio.wait({asked, self._task}, timeout=WITHIN_S, return_when="FIRST_COMPLETED")
        assert asked.done(), "the stream has ended or hangs"

    async def end(self) -> None:
        """EOF: Envoy half-closes, and the stream ends well."""
        self._incoming.put_nowait(grpc.aio.EOF)
        await asyncio.wait_for(self._task, WITHIN_S)
        assert self.status is grpc.StatusCode.OK

    async def cancel(self) -> None:
        """CANCEL: Envoy resets the stream."""
        await asyncio.sleep(0)  # the service runs at least to its first wait
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def read(self) -> ProcessingRequest | object:
        """For the service: see `extproc.service.Stream`."""
        self._asks.set()
        return await self._incoming.get()

    async def write(self, message: bytes) -> None:
        """For the service: see `extproc.service.Stream`."""
        self.payloads.append(message)

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """For the service: see `extproc.service.Stream`."""
        self.status = code
        raise AssertionError(details)


@dataclass(slots=True)
class Filter:
    """
    The filter of one configuration.

    Attributes:
        gate: the real one, over a real store, tokenizer and directory.
        store: its books.
        clock: moves only when told.
        observer: what was told.
    """

    gate: Gate
    store: Store
    clock: ManualClock
    observer: RecordingObserver
    service: ExtProcService
    _streams: list[Stream] = field(default_factory=list)

    def stream(self) -> Stream:
        """A new stream, as Envoy opens for each request."""
        stream = Stream(self.service)
        self._streams.append(stream)
        return stream

    async def ask(
        self,
        body: bytes,
        path: str = CHAT,
        *headers: tuple[str, str | bytes],
        key: str | None = "key-a",
    ) -> tuple[Stream, Response]:
        """A new stream with a whole request on it; the last reply."""
        stream = self.stream()
        (reply,) = await stream.say(post_rh(path, *headers, key=key))
        if reply.immediate_response is None:
            (reply,) = await stream.say(rb(body))
        return stream, reply

    async def admit(
        self, body: bytes, path: str = CHAT, *headers: tuple[str, str | bytes], key: str = "key-a"
    ) -> Stream:
        """A request that must be admitted."""
        stream, reply = await self.ask(body, path, *headers, key=key)
        assert reply.immediate_response is None, immediate_of(reply)
        return stream

    async def refuse(
        self,
        body: bytes,
        path: str = CHAT,
        *headers: tuple[str, str | bytes],
        key: str | None = "key-a",
    ) -> tuple[int, dict[str, str], Any]:
        """A request that must be refused: status, headers and decoded body of the answer."""
        stream, reply = await self.ask(body, path, *headers, key=key)
        await stream.end()
        return immediate_of(reply)

    async def answer(
        self, stream: Stream, *pieces: bytes, status: int = 200, content_type: str = SSE
    ) -> list[Response]:
        """Answer an admitted request in pieces and end its stream; the replies."""
        bodies = [*(sb(piece) for piece in pieces), sb(eos=True)]
        replies = await stream.say(sh(status, content_type), *bodies)
        await stream.end()
        await self.settled()
        return replies

    @property
    def reserved(self) -> tuple[int, int]:
        """Prompt and output tokens that the last admitted request reserved."""
        decided = self.decided
        return decided.estimated_prompt_tokens, (
            decided.reserved_tokens - decided.estimated_prompt_tokens
        )

    @property
    def decided(self) -> Decided:
        """The last decision."""
        return self.observer.decisions[-1]

    @property
    def charged(self) -> tuple[int, int]:
        """Prompt and completion tokens of the last settlement."""
        return self.last_settled.prompt_tokens, self.last_settled.completion_tokens

    @property
    def last_settled(self) -> Settled:
        """The last settlement."""
        return self.observer.settlements[-1]

    async def settled(self) -> None:
        """Wait until every settlement that has begun is done."""
        await asyncio.wait_for(self.service.settled(), WITHIN_S)
        await self.gate.close()

    async def in_use(self) -> InUse:
        """What the first pool has in use."""
        return (await self.store.snapshot(next(iter(self.gate.config.pools)))).total

    async def at_rest(self) -> None:
        """INV: nothing is in flight or reserved in any pool, and the next ordinary request is served."""
        await asyncio.wait_for(self.service.idle(), WITHIN_S)
        await self.settled()
        for pool in self.gate.config.pools:
            assert (await self.store.snapshot(pool)).total == InUse(), pool
        stream = await self.admit(HI)
        await self.answer(stream, status=500, content_type="text/plain")
        assert await self.in_use() == InUse()

    def forget(self) -> None:
        """Forget streams that have ended."""
        self._streams.clear()

    async def close(self) -> None:
        """End every stream."""
        for stream in self._streams:
            await stream.cancel()
        await self.settled()


@contextlib.asynccontextmanager
async def running(
    document: str, *, store: Callable[[Clock], Store] = MemoryStore
) -> AsyncIterator[Filter]:
    """The filter of a configuration as users write it, with both vocabularies."""
    config = load_config(document, env={})
    clock = ManualClock(1_000_000)
    observer = RecordingObserver()
    books = store(clock)
    counter = TokenCounter(vocabularies())
    numbers = itertools.count(1)
    gate = Gate(
        config,
        store=books,
        counter=counter,
        clock=clock,
        observer=observer,
        new_lease_id=lambda: f"lease-{next(numbers)}",
        jitter=lambda: 0.0,
    )
    await gate.house.start()
    one = Filter(gate, books, clock, observer, ExtProcService(gate, clock))
    try:
        yield one
    finally:
        await one.close()
        counter.close()
