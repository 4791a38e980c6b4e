"""
The clients of a scenario: closed loops, open loops, retries, and what each attempt came to.

They know a `Line` and nothing of what is behind it: HTTP and a real Envoy, or the simulator.
"""

import asyncio
import itertools
import random
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.lab.arrivals import Arrival
from envoy_tokenpools.lab.calling import FAILURE_PAUSE_MS, retry_wait_ms
from envoy_tokenpools.lab.record import Attempt, Result
from envoy_tokenpools.lab.scenario import Load, Scenario
from envoy_tokenpools.lab.tasks import cancel_all

_TIMER_MS = 1
"""Timers may be early by so much, and who arrives early is of another phase."""


@dataclass(frozen=True, slots=True)
class Wish:
    """
    One request that somebody wants served, by as many attempts as it takes.

    Attributes:
        load: whose it is.
        number: unique within the run.
        prompt_tokens: length of its prompt.
        output_tokens: length of the answer that it wants.
    """

    load: Load
    number: int
    prompt_tokens: int
    output_tokens: int

    @property
    def max_tokens(self) -> int:
        """What it states as the most that it wants."""
        stated = self.load.max_tokens
        return self.output_tokens if stated is None else stated


@dataclass(slots=True)
class Seen:
    """
    What a client has seen of one attempt so far; times are on the line's clock, in microseconds.

    Attributes:
        result: what became of it.
        reason: why it was shed, evicted or failed.
        asked_wait_ms: when to come back, as the answer states it.
        decided_us: when its status was known.
        first_token_us: when the first text came.
        output_tokens: tokens that came.
    """

    result: Result = Result.CUT
    reason: str = ""
    asked_wait_ms: float = FAILURE_PAUSE_MS
    decided_us: int | None = None
    first_token_us: int | None = None
    output_tokens: int = 0


class Sink(Protocol):
    """Takes attempts as they end: a list, or whatever counts them."""

    def append(self, attempt: Attempt, /) -> None:
        """Take one."""
        ...


class Line(Protocol):
    """Carries requests to whoever serves them."""

    async def send(self, wish: Wish, retries: int, seen: Seen) -> None:
        """One attempt, to its end; `seen` is right at any time, also when this is cancelled."""
        ...


@dataclass(slots=True)
class Clients:
    """
    Everybody who sends in one run.

    Attributes:
        scenario: who sends what.
        line: to whom.
        clock: the time of the run.
        attempts: takes what became of each attempt, in the order of their end.
    """

    scenario: Scenario
    line: Line
    clock: Clock
    attempts: Sink
    _started_us: int = 0
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def elapsed_ms(self) -> float:
        """Time since the start of the run."""
        return (self.clock.now_us() - self._started_us) / 1_000

    async def run(self, arrivals: Iterable[Arrival]) -> None:
        """
        Send until the run is over; whatever is under way then is cut and recorded as such.

        Args:
            arrivals: of the open loops, in order of time.
        """
        scenario = self.scenario
        self._started_us = self.clock.now_us()
        closed = [
            self._closed_loop(load, random.Random(f"{scenario.seed} {group} {number}"))
            for group, load in enumerate(scenario.loads)
            for number in range(load.clients)
        ]
        await _until(scenario.duration_ms / 1_000, [*closed, self._open_loop(arrivals)])

    async def _closed_loop(self, load: Load, rng: random.Random) -> None:
        await self._sleep_until(load.start_ms)
        while self.elapsed_ms < load.stop_ms:
            await self._serve(self._wish(load, load.prompt.draw(rng), load.output.draw(rng)), rng)
            await asyncio.sleep(load.think_ms / 1_000)

    async def _open_loop(self, arrivals: Iterable[Arrival]) -> None:
        rng = random.Random(f"{self.scenario.seed} retries")
        # Not a TaskGroup: it cancels in no order, and the same run must give the same record.
        serving: dict[asyncio.Task[None], None] = {}
        failures: list[BaseException] = []

        def ended(task: asyncio.Task[None]) -> None:
            del serving[task]
            if not task.cancelled() and (failure := task.exception()) is not None:
                failures.append(failure)

        try:
            for arrival in arrivals:
                await self._sleep_until(arrival.at_ms)
                wish = self._wish(arrival.load, arrival.prompt_tokens, arrival.output_tokens)
                task = asyncio.create_task(self._serve(wish, rng))
                serving[task] = None
                task.add_done_callback(ended)
                if failures:
                    raise failures[0]
            await asyncio.gather(*serving)
        finally:
            await cancel_all(serving)

    def _wish(self, load: Load, prompt_tokens: int, output_tokens: int) -> Wish:
        return Wish(load, next(self._numbers), prompt_tokens, output_tokens)

    async def _serve(self, wish: Wish, rng: random.Random) -> None:
        """Send one request until it is served or given up, or its load stops."""
        load = wish.load
        wanted_ms = round(self.elapsed_ms)
        for retries in itertools.count():
            seen = await self._attempt(wish, wanted_ms, retries)
            if seen.result is Result.COMPLETED:
                return
            wait_ms = retry_wait_ms(seen.asked_wait_ms, rng.random())
            if load.retries is not None and retries >= load.retries:
                return
            if self.elapsed_ms + wait_ms >= load.stop_ms:
                # Else it would ask for something else at once.
                await self._sleep_until(load.stop_ms)
                return
            await asyncio.sleep(wait_ms / 1_000)

    async def _attempt(self, wish: Wish, wanted_ms: int, retries: int) -> Seen:
        seen = Seen()
        sent_ms = round(self.elapsed_ms)
        try:
            await self.line.send(wish, retries, seen)
        finally:
            self.attempts.append(
                Attempt(
                    entitlement=wish.load.entitlement,
                    wanted_ms=wanted_ms,
                    sent_ms=sent_ms,
                    ended_ms=round(self.elapsed_ms),
                    prompt_tokens=wish.prompt_tokens,
                    asked_tokens=wish.output_tokens,
                    result=seen.result,
                    reason=seen.reason,
                    retries=retries,
                    decided_ms=self._ms(seen.decided_us),
                    first_token_ms=self._ms(seen.first_token_us),
                    output_tokens=seen.output_tokens,
                )
            )
        return seen

    def _ms(self, at_us: int | None) -> int | None:
        return None if at_us is None else round((at_us - self._started_us) / 1_000)

    async def _sleep_until(self, at_ms: float) -> None:
        left_ms = at_ms - self.elapsed_ms
        if left_ms > 0:
            await asyncio.sleep((left_ms + _TIMER_MS) / 1_000)


async def _until(seconds: float, running: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of them for so long, then cancel what is left; a failure of one ends all."""
    tasks = [asyncio.create_task(one) for one in running]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        failures = await cancel_all(tasks)
    for failure in failures:
        raise failure
