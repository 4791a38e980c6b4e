"""
The model of an inference engine with continuous batching, as a pure, event-driven class.

Rules of this file: no I/O, no clock, no randomness. Time is passed in, so that the simulated
backend (real time) and a simulator (virtual time) drive the same code: `submit` and `abort` when
something happens, `advance` at `next_event_ms()`.

What is modelled: a first-in first-out queue, a fixed number of slots, a KV cache that a sequence
takes with its whole context before it starts, a prefill time in proportion to the prompt, then one
token per interval and sequence. The total generation rate is `tokens_per_second` when every slot is
taken and never more. What is not: prefix caching, preemption, prefill that slows its neighbours.
"""

import heapq
from collections import deque
from dataclasses import dataclass
from typing import NewType

Ticket = NewType("Ticket", int)


@dataclass(frozen=True, slots=True)
class EngineShape:
    """
    How large and how fast an engine is.

    Attributes:
        slots: sequences that run at the same time.
        tokens_per_second: generation rate of all slots together; each running sequence gets
            `tokens_per_second / slots`, whatever the others do.
        prefill_tokens_per_second: rate at which one sequence's prompt is processed.
        max_waiting: sequences that may wait for a slot; None is without end.
        kv_tokens: tokens of context that the KV cache holds.
    """

    slots: int
    tokens_per_second: int
    prefill_tokens_per_second: int
    max_waiting: int | None = None
    kv_tokens: int = 262_144

    def __post_init__(self) -> None:
        rates = (self.tokens_per_second, self.prefill_tokens_per_second)
        if min(self.slots, self.kv_tokens, *rates) < 1:
            message = f"slots, rates and kv_tokens are at least 1: {self}"
            raise ValueError(message)
        if self.max_waiting is not None and self.max_waiting < 0:
            message = f"max_waiting is never negative: {self.max_waiting}"
            raise ValueError(message)

    def prefill_us(self, prompt_tokens: int) -> int:
        """How long one prompt is processed, in microseconds, rounded up."""
        return -(-prompt_tokens * 1_000_000 // self.prefill_tokens_per_second)

    def generation_us(self, tokens: int) -> int:
        """When the `tokens`-th token is out, in microseconds after prefill, rounded up."""
        return -(-tokens * self.slots * 1_000_000 // self.tokens_per_second)

    def tokens_after(self, generating_us: int) -> int:
        """How many tokens are out `generating_us` after prefill: `generation_us` inverted."""
        return max(0, generating_us) * self.tokens_per_second // (self.slots * 1_000_000)


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence left the queue and has a slot."""

    ticket: Ticket
    at_ms: int


@dataclass(frozen=True, slots=True)
class Token:
    """A sequence has generated `generated` tokens in all."""

    ticket: Ticket
    at_ms: int
    generated: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence has generated all its tokens and its slot is free."""

    ticket: Ticket
    at_ms: int
    generated: int


Event = Started | Token | Finished


@dataclass(slots=True)
class _Sequence:
    """One sequence; `generating_from_us` and `emitted` have a meaning once it runs."""

    ticket: Ticket
    prompt_tokens: int
    output_tokens: int
    generating_from_us: int = 0
    emitted: int = 0

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class Engine:
    """
    One replica of an inference engine.

    Times are whole milliseconds and never go backwards; inside, microseconds are kept, so that
    rates hold exactly. An event's `at_ms` is rounded up.
    """

    def __init__(self, shape: EngineShape, *, every_token: bool = True) -> None:
        """
        Build an idle engine.

        Args:
            shape: its size and speed.
            every_token: True gives a `Token` event for each token; False only for the first and
                the last one of a sequence, so that hours can be simulated by milestones.
        """
        self.shape = shape
        self._every_token = every_token
        self._slots = shape.slots
        self._now_us = 0
        self._tickets = 0
        self._waiting: dict[Ticket, _Sequence] = {}
        self._running: dict[Ticket, _Sequence] = {}
        self._kv_reserved = 0
        # Entries of sequences that were aborted stay until they come up, and are skipped then.
        self._due: list[tuple[int, Ticket]] = []
        self._events: deque[Event] = deque()

    @property
    def slots(self) -> int:
        """Slots in service; `shape.slots` unless resized."""
        return self._slots

    @property
    def running(self) -> int:
        """Sequences that have a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._waiting)

    @property
    def kv_tokens_in_use(self) -> int:
        """Tokens of context that the running sequences have filled so far."""
        return sum(
            sequence.prompt_tokens + self._generated(sequence)
            for sequence in self._running.values()
        )

    def submit(self, *, prompt_tokens: int, output_tokens: int, now_ms: int) -> Ticket | None:
        """
        Queue one sequence; it starts at once when a slot is free.

        Args:
            prompt_tokens: length of its prompt.
            output_tokens: tokens that it will generate; 0 ends it after prefill.
            now_ms: the time.

        Returns:
            Its ticket, or None when it would have to wait and the queue is full.

        Raises:
            ValueError: it could never fit into the KV cache, or a length is negative.
        """
        if min(prompt_tokens, output_tokens) < 0:
            message = f"lengths are never negative: {prompt_tokens}, {output_tokens}"
            raise ValueError(message)
        if prompt_tokens + output_tokens > self.shape.kv_tokens:
            message = f"{prompt_tokens + output_tokens} tokens never fit the KV cache"
            raise ValueError(message)
        self._run_to(now_ms)
        sequence = _Sequence(Ticket(self._tickets + 1), prompt_tokens, output_tokens)
        if self._waiting or not self._fits(sequence):
            limit = self.shape.max_waiting
            if limit is not None and len(self._waiting) >= limit:
                return None
        self._tickets += 1
        self._waiting[sequence.ticket] = sequence
        self._start_waiting()
        return sequence.ticket

    def generated(self, ticket: Ticket, now_ms: int) -> int:
        """How many tokens a sequence has generated so far; 0 for one that waits or has ended."""
        self._run_to(now_ms)
        sequence = self._running.get(ticket)
        return 0 if sequence is None else self._generated(sequence)

    def abort(self, ticket: Ticket, now_ms: int) -> bool:
        """
        End a sequence early; its slot is free at once and no further event names it.

        Returns:
            False when it had ended already.
        """
        self._run_to(now_ms)
        if self._waiting.pop(ticket, None) is None and not self._release(ticket):
            return False
        self._events = deque(event for event in self._events if event.ticket != ticket)
        self._start_waiting()
        return True

    def resize(self, slots: int, now_ms: int) -> None:
        """
        Change the number of slots, as an outage or its end does; each keeps its own rate.

        Sequences that run above a lower number are left to finish.
        """
        if slots < 0:
            message = f"slots are never negative: {slots}"
            raise ValueError(message)
        self._run_to(now_ms)
        self._slots = slots
        self._start_waiting()

    def next_event_ms(self) -> int | None:
        """The first time at which `advance` has something to tell; None while idle."""
        if self._events:
            return self._now_us // 1_000
        while self._due and self._due[0][1] not in self._running:
            heapq.heappop(self._due)
        return _ms_rounded_up(self._due[0][0]) if self._due else None

    def advance(self, now_ms: int) -> list[Event]:
        """Everything that happened up to `now_ms` and was not told before, in order."""
        self._run_to(now_ms)
        events = list(self._events)
        self._events.clear()
        return events

    def _run_to(self, now_ms: int) -> None:
        until_us = now_ms * 1_000
        if until_us < self._now_us:
            message = f"time never goes backwards: {now_ms} ms after {self._now_us} us"
            raise ValueError(message)
        while self._due and self._due[0][0] <= until_us:
            self._now_us, ticket = heapq.heappop(self._due)
            sequence = self._running.get(ticket)
            if sequence is not None:
                self._emit(sequence)
        self._now_us = until_us

    def _emit(self, sequence: _Sequence) -> None:
        """Tell the token that is due now, then end the sequence or schedule its next one."""
        at_ms = _ms_rounded_up(self._now_us)
        if sequence.output_tokens:
            sequence.emitted = self._next_emission(sequence)
            self._events.append(Token(sequence.ticket, at_ms, sequence.emitted))
        if sequence.emitted < sequence.output_tokens:
            self._schedule(sequence)
            return
        self._release(sequence.ticket)
        self._events.append(Finished(sequence.ticket, at_ms, sequence.emitted))
        self._start_waiting()

    def _next_emission(self, sequence: _Sequence) -> int:
        """The number of tokens that the next `Token` event reports."""
        if self._every_token or not sequence.emitted:
            return min(sequence.emitted + 1, sequence.output_tokens)
        return sequence.output_tokens

    def _schedule(self, sequence: _Sequence) -> None:
        after_us = self.shape.generation_us(self._next_emission(sequence))
        heapq.heappush(self._due, (sequence.generating_from_us + after_us, sequence.ticket))

    def _start_waiting(self) -> None:
        """Give free slots to those who wait; the first one that does not fit holds the others."""
        while self._waiting:
            sequence = next(iter(self._waiting.values()))
            if not self._fits(sequence):
                return
            del self._waiting[sequence.ticket]
            self._running[sequence.ticket] = sequence
            self._kv_reserved += sequence.kv_tokens
            sequence.generating_from_us = self._now_us + self.shape.prefill_us(
                sequence.prompt_tokens
            )
            self._events.append(Started(sequence.ticket, _ms_rounded_up(self._now_us)))
            self._schedule(sequence)

    def _fits(self, sequence: _Sequence) -> bool:
        return (
            len(self._running) < self._slots
            and self._kv_reserved + sequence.kv_tokens <= self.shape.kv_tokens
        )

    def _release(self, ticket: Ticket) -> bool:
        sequence = self._running.pop(ticket, None)
        if sequence is None:
            return False
        self._kv_reserved -= sequence.kv_tokens
        return True

    def _generated(self, sequence: _Sequence) -> int:
        out = self.shape.tokens_after(self._now_us - sequence.generating_from_us)
        return min(out, sequence.output_tokens)


def _ms_rounded_up(time_us: int) -> int:
    return -(-time_us // 1_000)
