"""The waiting room: who is in it, and in which order they are served."""

import asyncio
from collections.abc import Iterator

import pytest

from envoy_tokenpools.core.admission import Balance, Reason, Refusal, Resource, Terms
from envoy_tokenpools.gate.waiting import Waiter, WaitingRoom
from envoy_tokenpools.store.base import Reply
from tests.support.pools import amount, claim, cost, terms

BALANCE = Balance(0, 0, 0, 0, 0, 0)


def refusal(retry_after_ms: int = 100) -> Reply:
    """The pool was full."""
    short = Refusal(Reason.POOL_CONTENDED, Resource.CONCURRENCY, 1, 0, retry_after_ms)
    return Reply(short, BALANCE)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Only makes futures."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Hall:
    """A room of a given size, and the terms of three tenants of different weight."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int = 10) -> None:
        self.room = WaitingRoom()
        self.limit = limit
        self.terms: dict[str, Terms] = {
            name: terms(name, weight=weight)
            for name, weight in (("low", 1.0), ("high", 2.0), ("equal", 2.0))
        }
        self._loop = loop

    def waiter(self, name: str, *, since_ms: int = 0, retry_after_ms: int = 100) -> Waiter:
        """A request of `name` that was just refused."""
        wanted = claim(f"lease-{since_ms}", cost(), self.terms[name], amount())
        return Waiter(wanted, refusal(retry_after_ms), since_ms, self._loop.create_future())

    def enter(self, name: str, *, since_ms: int = 0, retry_after_ms: int = 100) -> Waiter:
        """One that waits."""
        waiter = self.waiter(name, since_ms=since_ms, retry_after_ms=retry_after_ms)
        assert self.room.enter(waiter, self.limit)
        return waiter


def test_weight_goes_first_and_arrival_decides_between_equals(
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Whoever came first, the heavier entitlement is served first."""
    hall = Hall(loop)
    low, equal, high, late = (hall.enter(name) for name in ("low", "equal", "high", "equal"))
    assert hall.room.in_order(hall.terms) == [equal, high, late, low]


def test_the_weights_of_the_day_count(loop: asyncio.AbstractEventLoop) -> None:
    """A tick may turn the order round while somebody waits."""
    hall = Hall(loop)
    low, high = hall.enter("low"), hall.enter("high")
    hall.terms["low"] = terms("low", weight=5.0)
    assert hall.room.in_order(hall.terms) == [low, high]


def test_whoever_has_an_answer_is_not_served(loop: asyncio.AbstractEventLoop) -> None:
    """Though it may not have left yet."""
    hall = Hall(loop)
    first, second = hall.enter("low"), hall.enter("low")
    first.give_up()
    assert hall.room.in_order(hall.terms) == [second]
    assert hall.room.total == 2


def test_a_full_room_turns_the_least_away(loop: asyncio.AbstractEventLoop) -> None:
    """The latest of the lightest gives up for a heavier one, with its last refusal; an equal one does not enter."""
    hall = Hall(loop, limit=2)
    first, second = hall.enter("low"), hall.enter("low", retry_after_ms=7)
    assert not hall.room.enter(hall.waiter("low"), hall.limit)
    high = hall.enter("high")
    assert second.answer.result() is second.reply
    assert hall.room.in_order(hall.terms) == [high, first]
    hall.enter("equal")
    assert first.answer.done()
    assert not hall.room.enter(hall.waiter("high"), hall.limit)
    assert hall.room.total == 2


def test_a_room_without_places(loop: asyncio.AbstractEventLoop) -> None:
    """`max_waiting: 0` lets nobody wait."""
    hall = Hall(loop, limit=0)
    assert not hall.room.enter(hall.waiter("high"), hall.limit)


def test_it_counts_who_waits_and_for_how_long(loop: asyncio.AbstractEventLoop) -> None:
    """By entitlement, in all, and the first of those who are still here."""
    hall = Hall(loop)
    assert (hall.room.total, hall.room.oldest_ms(500)) == (0, 0)
    first = hall.enter("low", since_ms=100)
    hall.enter("low", since_ms=200)
    hall.enter("high", since_ms=300)
    assert hall.room.counts() == {"low": 2, "high": 1}
    assert hall.room.oldest_ms(500) == 400
    hall.room.leave(first)
    hall.room.leave(first)
    assert hall.room.oldest_ms(500) == 300


def test_it_knows_who_was_told_to_come_back_first(loop: asyncio.AbstractEventLoop) -> None:
    """That is when asking again may help."""
    hall = Hall(loop)
    assert hall.room.first_retry_ms(250) == 250
    hall.enter("low", retry_after_ms=90)
    hall.enter("high", retry_after_ms=40)
    assert hall.room.first_retry_ms(250) == 40


def test_a_waiter_is_answered_once(loop: asyncio.AbstractEventLoop) -> None:
    """What comes later is not heard."""
    waiter = Hall(loop).enter("low")
    lease = refusal(1)
    waiter.conclude(lease)
    waiter.give_up()
    waiter.fail(ValueError("late"))
    assert waiter.answer.result() is lease
