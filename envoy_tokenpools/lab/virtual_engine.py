"""
The engine model on the running event loop, by its milestones: first token, and end.
"""

import asyncio
from dataclasses import dataclass

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.lab.engine import Engine, EngineShape, Finished, Ticket, Token


@dataclass(slots=True, eq=False)
class Run:
    """
    One sequence in the engine.

    Attributes:
        ticket: the engine's name for it.
        ended: done when it has generated everything, or was aborted.
        first_token_ms: when its first token came; None before.
        generated: tokens that came.
    """

    ticket: Ticket
    ended: asyncio.Future[None]
    first_token_ms: int | None = None
    generated: int = 0


class VirtualEngine:
    """Drives an `Engine` by timers of the loop that it is used on."""

    def __init__(self, shape: EngineShape, clock: Clock) -> None:
        self._engine = Engine(shape, every_token=False)
        self._clock = clock
        self._runs: dict[Ticket, Run] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_ms = 0

    @property
    def running(self) -> int:
        """Sequences that have a slot."""
        return self._engine.running

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return self._engine.waiting

    def submit(self, *, prompt_tokens: int, output_tokens: int) -> Run | None:
        """
        Let it generate; None if its queue is full.

        Raises:
            ValueError: it could never fit into the KV cache.
        """
        now_ms = self._clock.now_ms()
        ticket = self._engine.submit(
            prompt_tokens=prompt_tokens, output_tokens=output_tokens, now_ms=now_ms
        )
        if ticket is None:
            return None
        run = Run(ticket, asyncio.get_running_loop().create_future())
        self._runs[ticket] = run
        self._tell(now_ms)
        return run

    def abort(self, run: Run) -> None:
        """End it early, unless it has ended; its slot is free at once."""
        if self._runs.pop(run.ticket, None) is None:
            return
        now_ms = self._clock.now_ms()
        run.generated = self._engine.generated(run.ticket, now_ms)
        self._engine.abort(run.ticket, now_ms)
        if not run.ended.done():
            run.ended.set_result(None)
        self._tell(now_ms)

    def resize(self, slots: int) -> None:
        """Change the number of slots, as an outage or its end does."""
        now_ms = self._clock.now_ms()
        self._engine.resize(slots, now_ms)
        self._tell(now_ms)

    def _wake(self) -> None:
        self._timer = None
        self._tell(self._clock.now_ms())

    def _tell(self, now_ms: int) -> None:
        """Pass on what happened up to now, and come back when more is due."""
        for event in self._engine.advance(now_ms):
            run = self._runs.get(event.ticket)
            if run is None:
                continue
            if isinstance(event, Token):
                run.generated = event.generated
                if run.first_token_ms is None:
                    run.first_token_ms = event.at_ms
            elif isinstance(event, Finished):
                del self._runs[event.ticket]
                if not run.ended.done():
                    run.ended.set_result(None)
        due_ms = self._engine.next_event_ms()
        if due_ms is None or (self._timer is not None and self._due_ms <= due_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_ms = due_ms
        delay_s = max(0, due_ms * 1_000 - self._clock.now_us()) / 1_000_000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)
