"""
An asyncio event loop on which time passes only when nobody has anything left to do.

It is asyncio's own loop, but for where it would wait for the world: there it goes to the next timer instead. So hours
of waiting take as long as the work in between, and the same program with the same seed runs the same way every time.
Sockets, subprocesses and signals do not exist on it.
"""

import asyncio
import contextvars
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, TypeVarTuple

from envoy_tokenpools.errors import TokenpoolsError

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class DeadlockError(TokenpoolsError):
    """Somebody waits for what can never happen: nothing is ready, and no timer is left."""


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop; `time()` starts at 0."""

    # Where asyncio's loop keeps what is ready and what is due.
    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now_us = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._unhandled: list[Mapping[str, Any]] = []
        self.set_exception_handler(lambda _, context: self._unhandled.append(context))

    @property
    def now_us(self) -> int:
        """Microseconds since the start."""
        return self._now_us

    def time(self) -> float:
        """Seconds since the start."""
        return self._now_us / 1_000_000

    def run(self, main: Coroutine[Any, Any, _T]) -> _T:
        """
        Run `main` to its end; tasks that it leaves behind are cancelled.

        Raises:
            DeadlockError: it waits for what can never happen.
            RuntimeError: a callback failed, or a task of which nobody heard.
        """
        try:
            result = self.run_until_complete(main)
        finally:
            left = asyncio.all_tasks(self)
            for task in left:
                task.cancel()
            if left:
                self.run_until_complete(asyncio.wait(left))
        for context in self._unhandled:
            raise RuntimeError(context["message"]) from context.get("exception")
        return result

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """As every loop's; of those that are due at the same time, the first one that was asked for goes first."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    # What asyncio's loop asks of its kind.

    def _run_once(self) -> None:
        """Go to the next timer if nobody has anything to do; then run what is ready, but not what that makes ready."""
        ready = self._ready
        if not ready and not self._stopping:
            self._advance()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()  # noqa: SLF001  as every loop does

    def _advance(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            raise DeadlockError(
                f"after {self.time():g} s everybody waits, and nothing is left that could happen"
            )
        when, _, first = heapq.heappop(timers)
        self._ready.append(first)
        self._now_us = max(self._now_us, math.ceil(when * 1_000_000))
        while timers and timers[0][0] <= self.time():
            self._ready.append(heapq.heappop(timers)[2])

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer is passed over when its time comes."""

    def _process_events(self, event_list: list[Any]) -> None:
        """No file ever has news."""

    def _write_to_self(self) -> None:
        """Nobody else runs who could wake it."""


class VirtualClock:
    """The loop's time as a `Clock`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now_ms(self) -> int:
        """Milliseconds since the loop's start."""
        return self._loop.now_us // 1_000

    def now_us(self) -> int:
        """Microseconds since the loop's start."""
        return self._loop.now_us
