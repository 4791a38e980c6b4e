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

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.lab.calling import FAILURE_PAUSE_MS, Call, chat_body, retry_wait_ms
from envoy_tokenpools.lab.tally import Tally
from envoy_tokenpools.lab.tasks import cancel_all

GRACE_MS = 2_000
"""How long requests may go on after the end of a run before they are cut."""


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
            failures = await cancel_all(tasks)
            for tally in written.values():
                tally.ended_ms = clock.now_ms()
    for failure in failures:
        raise failure
    return written


@dataclass(frozen=True, slots=True)
class _Pause:
    """A request was not served: wait, then send the same body again, or another one."""

    wait_ms: float
    same_body: bool


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
        tally = self.tally
        tally.sent += 1
        tally.retried += retries > 0
        call = Call(
            self.clock,
            on_status=self._decided,
            on_first_text=lambda waited_us: tally.saw_first_token(waited_us / 1_000),
            on_tokens=tally.received,
        )
        try:
            await call.send(
                self.session,
                body,
                key=self.workload.key,
                retries=retries,
                stream=self.workload.stream,
            )
        except asyncio.CancelledError:
            tally.cancelled += 1
            raise
        finally:
            tally.in_flight -= call.status == 200
        return self._after(call)

    def _decided(self, status: int) -> None:
        if status == 200:
            self.tally.admitted += 1
            self.tally.in_flight += 1

    def _after(self, call: Call) -> _Pause | None:
        if call.completed:
            self.tally.completed += 1
            return None
        if call.failure:
            self.tally.errors[call.failure] += 1
            return _Pause(FAILURE_PAUSE_MS, same_body=False)
        if call.status == 429:
            self.tally.shed[call.shed_reason] += 1
        else:
            self.tally.errors[str(call.status)] += 1
        wait_ms = retry_wait_ms(call.asked_wait_ms, self.rng.random())
        return _Pause(wait_ms, same_body=call.may_retry)

    def _body(self, number: int) -> bytes:
        """The client's `number`-th body; no two clients or numbers have the same."""
        return chat_body(
            self.model,
            f"{self.name}-{number}",
            prompt_words=self.workload.prompt_words,
            max_tokens=self.workload.max_tokens,
            stream=self.workload.stream,
            include_usage=self.workload.include_usage,
        )

    def _left_ms(self) -> int:
        return self.stop_ms - self.tally.elapsed_ms

    async def _pause(self, wait_ms: float) -> None:
        """Wait, but never past the end of the client's time."""
        await asyncio.sleep(max(0.0, min(wait_ms, self._left_ms())) / 1_000)


def _earlier(end_ms: int, stop_ms: int | None) -> int:
    return end_ms if stop_ms is None else min(end_ms, stop_ms)
