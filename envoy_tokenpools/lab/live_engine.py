"""
The engine model in real time, on the running event loop: requests in, tokens out as they come.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.lab.dialect import Reply
from envoy_tokenpools.lab.engine import Engine, EngineShape, Event, Finished, Ticket, Token
from envoy_tokenpools.lab.engine_metrics import EngineMetrics


@dataclass(slots=True)
class Job:
    """
    The sequences of one request.

    Attributes:
        replies: what each ticket will say.
        submitted_ms: when the engine got them.
        unfinished: tickets that the engine still has.
    """

    replies: dict[Ticket, Reply]
    submitted_ms: int
    unfinished: set[Ticket]
    _tokens: list[Token] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def next_tokens(self) -> Sequence[Token]:
        """All tokens that came since the last call, at least one; empty when all have finished."""
        while not self._tokens and self.unfinished:
            self._changed.clear()
            await self._changed.wait()
        tokens, self._tokens = self._tokens, []
        return tokens

    def tell(self, event: Event) -> None:
        """Take over what the engine tells about one of the sequences."""
        if isinstance(event, Token):
            self._tokens.append(event)
        elif isinstance(event, Finished):
            self.unfinished.discard(event.ticket)
        self._changed.set()


@dataclass(slots=True)
class EngineStats:
    """
    What the engine did since the start, in sequences and tokens.

    Attributes:
        finished: sequences that generated everything.
        aborted: sequences that were ended early.
        prompt_tokens: of all that was accepted.
        generated_tokens: that came out.
        peak_running: most sequences that ran at the same time.
        peak_waiting: most sequences that waited at the same time.
    """

    finished: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    peak_running: int = 0
    peak_waiting: int = 0


class LiveEngine:
    """
    Drives an `Engine` by a timer.

    Attributes:
        stats: counters since the start.
        metrics: the same, as vLLM exposes them.
    """

    def __init__(self, shape: EngineShape, model: str, clock: Clock) -> None:
        """Build an idle engine; `model` is its name in the metrics."""
        self.stats = EngineStats()
        self._engine = Engine(shape)
        self.metrics = EngineMetrics(self._engine, model)
        self._clock = clock
        self._jobs: dict[Ticket, Job] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        """Sequences that have a slot now."""
        return self._engine.running

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot now."""
        return self._engine.waiting

    def submit(self, replies: Sequence[Reply], prompt_tokens: int) -> Job | None:
        """
        Give the sequences of one request to the engine, all or none.

        Args:
            replies: one per sequence.
            prompt_tokens: of the request, for the counters: choices share their prompt.

        Returns:
            None when the queue is too full for them.
        """
        now_ms = self._clock.now_ms()
        tickets: dict[Ticket, Reply] = {}
        for reply in replies:
            ticket = self._engine.submit(
                prompt_tokens=reply.prompt_tokens,
                output_tokens=reply.output_tokens,
                now_ms=now_ms,
            )
            if ticket is None:
                for taken in tickets:
                    self._engine.abort(taken, now_ms)
                self._run(now_ms)
                return None
            tickets[ticket] = reply
        job = Job(tickets, now_ms, set(tickets))
        self._jobs.update(dict.fromkeys(tickets, job))
        self.stats.prompt_tokens += prompt_tokens
        self.metrics.prompt_tokens.inc(prompt_tokens)
        self._run(now_ms)
        return job

    def release(self, job: Job) -> None:
        """End what a request left unfinished; its slots are free at once."""
        if not job.unfinished:
            return
        now_ms = self._clock.now_ms()
        self._run(now_ms)
        for ticket in job.unfinished:
            self._engine.abort(ticket, now_ms)
            del self._jobs[ticket]
            self.stats.aborted += 1
            self.metrics.ended("abort")
        job.unfinished.clear()
        self._run(now_ms)

    def resize(self, slots: int) -> None:
        """Change the number of slots, as an outage or its end does."""
        now_ms = self._clock.now_ms()
        self._engine.resize(slots, now_ms)
        self._run(now_ms)

    def stop(self) -> None:
        """Let time stand still; waiting jobs hear nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        self._run(self._clock.now_ms())

    def _run(self, now_ms: int) -> None:
        """Tell what happened up to now, and come back when more is due."""
        for event in self._engine.advance(now_ms):
            self._tell(event)
        self.stats.peak_running = max(self.stats.peak_running, self._engine.running)
        self.stats.peak_waiting = max(self.stats.peak_waiting, self._engine.waiting)
        self.stop()
        next_ms = self._engine.next_event_ms()
        if next_ms is not None:
            delay_seconds = max(0, next_ms - now_ms) / 1_000
            self._timer = asyncio.get_running_loop().call_later(delay_seconds, self._wake)

    def _tell(self, event: Event) -> None:
        job = self._jobs[event.ticket]
        if isinstance(event, Token):
            self.stats.generated_tokens += 1
            self.metrics.generation_tokens.inc()
            if event.generated == 1:
                waited_ms = event.at_ms - job.submitted_ms
                self.metrics.first_token_seconds.observe(waited_ms / 1_000)
        elif isinstance(event, Finished):
            del self._jobs[event.ticket]
            self.stats.finished += 1
            self.metrics.ended(job.replies[event.ticket].finish_reason)
        job.tell(event)
