"""
The way of a pool's operations to the server: in order, several in one call, one call at a time.

While a call is on its way the next operations gather, so that a busy replica makes few large calls and an idle one is
not held up. A call whose reply was lost is sent again under the same number, which the script answers as it did before.

Trouble is a call that failed, or that takes longer than a decision may. From then on nobody waits for the server any
more: claims fail at once, and calls go out seldom, until one comes back in time.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from envoy_tokenpools.errors import StoreError
from envoy_tokenpools.store.redis import wire
from envoy_tokenpools.store.redis.wire import Answer, Operation

MAX_OPERATIONS = 64
"""In one call, so that it keeps the server from others for a few milliseconds at most."""

MAX_KEPT = 20_000
"""Operations kept for a server that is away; beyond it the oldest are given up, and their leases expire."""

RETRY_MS = (20, 500)
"""
A failed call is sent again at once, for connections break; then after the first of these, and after twice as long each
time up to the second.
"""

TRIAL_MS = 20
"""A server that was late is tried again this long after, as long as it answers at all."""


class Send(Protocol):
    """Takes a call to the server."""

    async def __call__(self, number: str, operations: bytes) -> object:
        """
        The script's reply.

        Raises:
            StoreError: it failed; transient unless the script itself did.
        """
        ...


@dataclass(slots=True, eq=False)
class _Asked:
    """
    One operation on its way.

    Attributes:
        operation: what is asked.
        answer: what becomes of it.
        expires_at: loop time after which nobody wants the answer.
        is_kept: to be done all the same.
    """

    operation: Operation
    answer: asyncio.Future[Answer]
    expires_at: float
    is_kept: bool

    @property
    def is_wanted(self) -> bool:
        return self.is_kept or not self.answer.done()


class Line:
    """The operations on one pool."""

    def __init__(self, send: Send, *, deadline_ms: int, on_epoch: Callable[[], None]) -> None:
        """
        Build the line.

        Args:
            send: takes a call to the server.
            deadline_ms: longer than this a decision must not take.
            on_epoch: called when the books turn out to have been opened anew.
        """
        self._send = send
        self._deadline_s = deadline_ms / 1_000
        self._on_epoch = on_epoch
        self._waiting: deque[_Asked] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._flying: list[_Asked] = []
        self._sent_at: float | None = None
        self._is_troubled = False
        self._is_late = False
        self._cause = ""
        self._calls = 0
        self._is_closed = False
        self.epoch = ""

    @property
    def is_troubled(self) -> bool:
        """Whether the server cannot be waited for."""
        if self._is_troubled:
            return True
        return self._sent_at is not None and self._now() - self._sent_at > self._deadline_s

    async def decide(self, operation: Operation) -> Answer:
        """
        The answer, in time for a decision.

        Raises:
            StoreError: there is none in time.
        """
        if self.is_troubled:
            message = f"the store is away or too slow{self._cause}"
            raise StoreError(message, transient=True, uncertain=False)
        return await self._ask(operation, self._deadline_s, is_kept=False)

    async def ask(self, operation: Operation, *, within_s: float, is_kept: bool = False) -> Answer:
        """
        The answer, if it comes within `within_s`; what `is_kept` is done later all the same.

        Raises:
            StoreError: there is none in time.
        """
        return await self._ask(operation, within_s, is_kept=is_kept)

    async def close(self, within_s: float) -> None:
        """Deliver what is kept, if that is possible in time, and end."""
        if self._sender is not None:
            await asyncio.wait((self._sender,), timeout=within_s)
        self._is_closed = True
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        if self._expiry is not None:
            self._expiry.cancel()
        for asked in (*self._flying, *self._waiting):
            _fail(asked, StoreError("the store was closed", transient=False))

    # ------------------------------------------------------------------

    def _ask(
        self, operation: Operation, within_s: float, *, is_kept: bool
    ) -> asyncio.Future[Answer]:
        loop = asyncio.get_running_loop()
        asked = _Asked(operation, loop.create_future(), loop.time() + within_s, is_kept)
        if self._is_closed:
            _fail(asked, StoreError("the store is closed", transient=False))
            return asked.answer
        self._waiting.append(asked)
        if len(self._waiting) > MAX_KEPT:
            _fail(
                self._waiting.popleft(),
                StoreError("the store was away for too long", transient=True),
            )
        if self._sender is None:
            self._sender = loop.create_task(self._deliver())
        self._watch(asked.expires_at)
        return asked.answer

    def _watch(self, expires_at: float) -> None:
        """One timer for all: it ends the waiting of whoever has waited long enough."""
        if self._expiry is not None:
            if self._expiry.when() <= expires_at:
                return
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_at(expires_at, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        now = self._now()
        following = float("inf")
        for asked in (*self._flying, *self._waiting):
            if asked.answer.done():
                continue
            if asked.expires_at <= now:
                message = f"the store did not answer in time{self._cause}"
                is_sent = asked in self._flying
                _fail(asked, StoreError(message, transient=True, uncertain=is_sent))
            else:
                following = min(following, asked.expires_at)
        if following < float("inf"):
            self._watch(following)

    async def _deliver(self) -> None:
        try:
            while self._waiting or self._is_late:
                self._gather()
                if not self._flying:
                    await asyncio.sleep(TRIAL_MS / 1_000)
                    self._gather()
                self._calls += 1
                await self._send_until_answered(str(self._calls))
        finally:
            self._sender = None

    def _gather(self) -> None:
        """The next call's operations: whatever waits, but for what nobody wants any more."""
        self._flying = []
        while self._waiting and len(self._flying) < MAX_OPERATIONS:
            asked = self._waiting.popleft()
            if asked.is_wanted:
                self._flying.append(asked)

    async def _send_until_answered(self, number: str) -> None:
        """One call, again and again while anybody wants it; its outcome may be known to the server only."""
        payload = wire.encode_operations([asked.operation for asked in self._flying])
        failures, (delay_ms, longest_ms) = 0, RETRY_MS
        while True:
            sent_at = self._sent_at = self._now()
            try:
                reply = await self._send(number, payload)
                epoch, answers = wire.decode_answers(reply, len(self._flying))
            except StoreError as error:
                failures += 1
                self._cause = f" ({error})"
                self._is_late = False
                if not error.transient:
                    self._refuse(error)
                    return
            else:
                self._is_late = self._is_troubled = self._now() - sent_at > self._deadline_s
                self._answer(epoch, answers)
                return
            finally:
                self._sent_at = None
            if failures > 1:
                self._is_troubled = True
                await asyncio.sleep(delay_ms / 1_000)
                delay_ms = min(2 * delay_ms, longest_ms)
            if not any(asked.is_wanted for asked in self._flying):
                return

    def _refuse(self, error: StoreError) -> None:
        for asked in self._flying:
            _fail(asked, error)
        self._flying = []

    def _answer(self, epoch: str, answers: list[Answer]) -> None:
        is_new = bool(self.epoch) and epoch != self.epoch
        self.epoch = epoch
        for asked, answer in zip(self._flying, answers, strict=True):
            if not asked.answer.done():
                asked.answer.set_result(answer)
        self._flying = []
        self._cause = ""
        if is_new:
            self._on_epoch()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _fail(asked: _Asked, error: StoreError) -> None:
    if not asked.answer.done():
        asked.answer.set_exception(error)
