"""
The waiting room of a pool: requests that rather wait for capacity than be shed, in the order in which they are served.

Pure: it knows neither the store nor the time.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from envoy_tokenpools.core.admission import Claim, Refusal, Terms
from envoy_tokenpools.core.refusals import Precedence
from envoy_tokenpools.store.base import Reply


@dataclass(slots=True, eq=False)
class Waiter:
    """
    One request that waits.

    Attributes:
        claim: what it asks for; asked again with the terms of the day.
        reply: the refusal that it got last.
        since_ms: when it began to wait.
        answer: its final reply, once there is one.
    """

    claim: Claim
    reply: Reply
    since_ms: int
    answer: asyncio.Future[Reply]

    @property
    def entitlement(self) -> str:
        """Whose request it is."""
        return self.claim.terms.entitlement

    def give_up(self) -> None:
        """It has waited long enough: the last refusal is its answer."""
        self.conclude(self.reply)

    def conclude(self, reply: Reply) -> None:
        """Answer it, unless it has its answer."""
        if not self.answer.done():
            self.answer.set_result(reply)

    def fail(self, error: Exception) -> None:
        """Let it fail, unless it has its answer."""
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True)
class WaitingRoom:
    """
    Who waits, in order of arrival.

    Attributes:
        is_served: somebody is asking the store for the waiters right now.
        has_news: capacity may have come free since they began to be served.
        timer: when they are served next, should nothing happen before.
    """

    is_served: bool = False
    has_news: bool = False
    timer: asyncio.TimerHandle | None = None
    _waiters: dict[Waiter, None] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """How many wait."""
        return len(self._waiters)

    def counts(self) -> Mapping[str, int]:
        """How many wait, by entitlement."""
        counts: dict[str, int] = {}
        for waiter in self._waiters:
            counts[waiter.entitlement] = counts.get(waiter.entitlement, 0) + 1
        return counts

    def oldest_ms(self, now_ms: int) -> int:
        """How long the first of those here has waited; 0 if nobody does."""
        for waiter in self._waiters:
            return max(0, now_ms - waiter.since_ms)
        return 0

    def first_retry_ms(self, default_ms: int) -> int:
        """The shortest time after which one of them was told to come back."""
        refusals = (waiter.reply.outcome for waiter in self._waiters)
        return min(
            (refusal.retry_after_ms for refusal in refusals if isinstance(refusal, Refusal)),
            default=default_ms,
        )

    def enter(self, waiter: Waiter, limit: int) -> bool:
        """
        Let it wait; False if there is no room for it.

        In a full room whoever has the least precedence gives up, the latest of them first; that may be the newcomer.
        """
        if len(self._waiters) >= limit:
            least = min(reversed(self._waiters), key=_precedence, default=None)
            if least is None or _precedence(least) >= _precedence(waiter):
                return False
            self.leave(least)
            least.give_up()
        self._waiters[waiter] = None
        return True

    def leave(self, waiter: Waiter) -> None:
        """It waits no longer, whether or not it did."""
        self._waiters.pop(waiter, None)

    def in_order(self, terms: Mapping[str, Terms]) -> list[Waiter]:
        """All that wait for an answer: by today's precedence of their entitlements, then by arrival."""
        waiting = [waiter for waiter in self._waiters if not waiter.answer.done()]
        by_entitlement = {name: each.precedence for name, each in terms.items()}
        nobody: Precedence = (0, 0.0)
        waiting.sort(
            key=lambda waiter: by_entitlement.get(waiter.entitlement, nobody), reverse=True
        )
        return waiting


def _precedence(waiter: Waiter) -> Precedence:
    return waiter.claim.terms.precedence
