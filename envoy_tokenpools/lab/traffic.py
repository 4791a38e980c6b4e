"""
Closed-loop clients: each sends a request, waits for its end, thinks, and sends the next one.

They behave as a well-meaning SDK does: a shed request is sent again with the same body after the
time that the 429 asked for, a little spread so that clients do not come back as one herd.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.lab.tally import Tally

GRACE_MS = 2_000
"""How long requests may go on after the end of a run before they are cut."""

RETRY_FLOOR_MS = 20
RETRY_CEILING_MS = 5_000
"""Bounds of the wait before a shed request is sent again, whatever the answer asks for."""

RETRY_SPREAD = 0.25
"""A wait is lengthened by up to this share of itself, by chance."""

FAILURE_PAUSE_MS = 200
"""The wait after an error that says nothing about when to come back."""

_CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Workload:
    """
    Clients of one entitlement that do the same.

    Attributes:
        entitlement: whose tally they write.
        key: their bearer token.
        clients: requests that they keep going at the same time.
        prompt_words: length of each prompt.
        max_tokens: what each request states.
        stream: whether answers are streamed; only streams give first-token samples.
        think_ms: pause between the end of an answer and the next request.
        start_ms: when they begin, from the start of the run.
        stop_ms: when they stop sending, before the end of the run; None is its end.
        include_usage: whether streams ask for usage, which then corrects the count of tokens.
    """

    entitlement: str
    key: str
    clients: int
    prompt_words: int
    max_tokens: int
    stream: bool = True
    think_ms: int = 0
    start_ms: int = 0
    stop_ms: int | None = None
    include_usage: bool = False


def tallies_for(workloads: Sequence[Workload], clock: Clock) -> dict[str, Tally]:
    """An empty tally for each entitlement, to be read while `run_traffic` writes it."""
    return {workload.entitlement: Tally(clock) for workload in workloads}


async def run_traffic(
    base_url: str,
    workloads: Sequence[Workload],
    *,
    model: str,
    duration_ms: int,
    clock: Clock,
    rng: random.Random,
    tallies: Mapping[str, Tally] | None = None,
    grace_ms: int = GRACE_MS,
) -> Mapping[str, Tally]:
    """
    Run all clients for a while.

    Args:
        base_url: where they send, without a path.
        workloads: who sends what.
        model: the model that they name.
        duration_ms: after this no request is sent.
        clock: measures waits and rates.
        rng: spreads retries.
        tallies: those of `tallies_for`, for a reader; made here if None.
        grace_ms: how long unfinished requests may go on after the end.

    Returns:
        The tallies, ended: every request has finished or was cut, at the latest after
        `duration_ms + grace_ms`.
    """
    written = tallies_for(workloads, clock) if tallies is None else tallies
    started_ms = clock.now_ms()
    for tally in written.values():
        tally.started_ms = started_ms
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(base_url, connector=connector, timeout=timeout) as session:
        clients = [
            _Client(
                session=session,
                workload=workload,
                model=model,
                name=f"{workload.entitlement}-{group}-{number}",
                stop_ms=_earlier(duration_ms, workload.stop_ms),
                tally=written[workload.entitlement],
                clock=clock,
                rng=rng,
            )
            for group, workload in enumerate(workloads)
            for number in range(workload.clients)
        ]
        tasks = [asyncio.create_task(client.run()) for client in clients]
        try:
            if tasks:
                await asyncio.wait(
                    tasks,
                    timeout=(duration_ms + grace_ms) / 1_000,
                    return_when=asyncio.FIRST_EXCEPTION,
                )
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            for tally in written.values():
                tally.ended_ms = clock.now_ms()
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return written


@dataclass(frozen=True, slots=True)
class _Pause:
    """A request was not served: wait, then send the same body again, or another one."""

    wait_ms: float
    same_body: bool


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    """What a client reads of a chunk, or of a whole body."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_ANSWERS = msgspec.json.Decoder(_Answer)


@dataclass(slots=True)
class _Client:
    """One client: one request at a time, until `stop_ms` of the run."""

    session: aiohttp.ClientSession
    workload: Workload
    model: str
    name: str
    stop_ms: int
    tally: Tally
    clock: Clock
    rng: random.Random

    async def run(self) -> None:
        await self._pause(self.workload.start_ms)
        number = 0
        while self._left_ms() > 0:
            await self._ask(self._body(number))
            number += 1
            await self._pause(self.workload.think_ms)

    async def _ask(self, body: bytes) -> None:
        """Send one body until it is served, given up, or the time is over."""
        retries = 0
        while self._left_ms() > 0:
            pause = await self._send(body, retries)
            if pause is None:
                return
            await self._pause(pause.wait_ms)
            if not pause.same_body:
                return
            retries += 1

    async def _send(self, body: bytes, retries: int) -> _Pause | None:
        headers = {
            "authorization": f"Bearer {self.workload.key}",
            "content-type": "application/json",
            "x-stainless-retry-count": str(retries),
        }
        self.tally.sent += 1
        self.tally.retried += retries > 0
        sent_us = self.clock.now_us()
        try:
            async with self.session.post(_CHAT_PATH, data=body, headers=headers) as answer:
                if answer.status != 200:
                    return await self._refused(answer)
                return await self._admitted(answer, sent_us)
        except aiohttp.ClientError:
            return self._failed("unreachable")
        except asyncio.CancelledError:
            self.tally.cancelled += 1
            raise

    async def _refused(self, answer: aiohttp.ClientResponse) -> _Pause:
        await answer.read()
        wait_ms = _asked_wait_ms(answer.headers)
        wait_ms = max(RETRY_FLOOR_MS, min(wait_ms, RETRY_CEILING_MS))
        wait_ms *= 1 + RETRY_SPREAD * self.rng.random()
        if answer.status == 429:
            self.tally.shed[answer.headers.get("x-tokenpools-reason", "unstated")] += 1
        else:
            self.tally.errors[str(answer.status)] += 1
        may_retry = answer.headers.get("x-should-retry") != "false"
        return _Pause(wait_ms, same_body=answer.status == 429 and may_retry)

    async def _admitted(self, answer: aiohttp.ClientResponse, sent_us: int) -> _Pause | None:
        self.tally.admitted += 1
        self.tally.in_flight += 1
        try:
            if self.workload.stream:
                ended_well = await self._read_stream(answer, sent_us)
            else:
                ended_well = self._read_whole(await answer.read())
        except (aiohttp.ClientError, msgspec.DecodeError):
            ended_well = False
        finally:
            self.tally.in_flight -= 1
        if not ended_well:
            return self._failed("broken_off")
        self.tally.completed += 1
        return None

    async def _read_stream(self, answer: aiohttp.ClientResponse, sent_us: int) -> bool:
        """Count text as it comes; whether the stream came to its end mark without an error."""
        counted = 0
        failed = ended = False
        # To its very end: a client that hangs up at the end mark looks like one that has left.
        async for line in answer.content:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                ended = True
                continue
            chunk = _ANSWERS.decode(data)
            failed = failed or chunk.error is not None
            texts = sum(bool(choice.delta.content) for choice in chunk.choices)
            if texts and not counted:
                self.tally.saw_first_token((self.clock.now_us() - sent_us) / 1_000)
            counted += texts
            self.tally.received(texts)
            if chunk.usage is not None:
                # Chunks are not tokens; the usage is cumulative and exact.
                self.tally.received(chunk.usage.completion_tokens - counted)
                counted = chunk.usage.completion_tokens
        return ended and not failed

    def _read_whole(self, body: bytes) -> bool:
        usage = _ANSWERS.decode(body).usage
        if usage is not None:
            self.tally.received(usage.completion_tokens)
        return True

    def _failed(self, what: str) -> _Pause:
        self.tally.errors[what] += 1
        return _Pause(FAILURE_PAUSE_MS, same_body=False)

    def _body(self, number: int) -> bytes:
        """The client's `number`-th body; no two clients or numbers have the same."""
        words = [f"{self.name}-{number}", *["word"] * (self.workload.prompt_words - 1)]
        body: dict[str, object] = {
            "model": self.model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": self.workload.max_tokens,
            "stream": self.workload.stream,
        }
        if self.workload.stream and self.workload.include_usage:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(body)

    def _left_ms(self) -> int:
        return self.stop_ms - self.tally.elapsed_ms

    async def _pause(self, wait_ms: float) -> None:
        """Wait, but never past the end of the client's time."""
        await asyncio.sleep(max(0.0, min(wait_ms, self._left_ms())) / 1_000)


def _asked_wait_ms(headers: Mapping[str, str]) -> float:
    """What an answer says about when to come back, as an SDK reads it."""
    for name, unit_ms in (("retry-after-ms", 1.0), ("retry-after", 1_000.0)):
        try:
            return float(headers[name]) * unit_ms
        except (KeyError, ValueError):
            continue
    return FAILURE_PAUSE_MS


def _earlier(end_ms: int, stop_ms: int | None) -> int:
    return end_ms if stop_ms is None else min(end_ms, stop_ms)
