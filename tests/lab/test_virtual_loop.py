"""asyncio in virtual time: what it can do, in which order, and what it says when nothing can happen any more."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from envoy_tokenpools.lab.virtual_loop import DeadlockError, VirtualClock, VirtualLoop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run it on a loop of its own."""
    loop = VirtualLoop()
    try:
        return loop.run(main)
    finally:
        loop.close()


def test_hours_pass_in_no_time() -> None:
    """A day of sleep takes no second."""

    async def main() -> tuple[float, int]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        await asyncio.sleep(86_400)
        return loop.time(), VirtualClock(loop).now_ms()

    began = time.monotonic()
    assert run(main()) == (86_400.0, 86_400_000)
    assert time.monotonic() - began < 1


def test_things_happen_in_the_order_of_their_times() -> None:
    """Whoever is due first runs first; what is due at the same time runs in the order in which it was asked for."""

    async def main() -> list[str]:
        told: list[str] = []
        loop = asyncio.get_running_loop()
        for delay, name in ((2.0, "late"), (1.0, "a"), (1.0, "b"), (0.0, "first")):
            loop.call_later(delay, told.append, name)
        loop.call_later(0.5, told.append, "cancelled").cancel()
        await asyncio.sleep(3)
        return told

    assert run(main()) == ["first", "a", "b", "late"]


@pytest.mark.parametrize("delay", [0.001, 0.1234567, 1 / 3, 1e-9, 1_000.0010001])
def test_a_timer_is_never_early(delay: float) -> None:
    """Whatever the rounding."""

    async def main() -> bool:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(1 / 7)
        due = loop.time() + delay
        await asyncio.sleep(delay)
        return loop.time() >= due - 1e-9

    assert run(main())


def test_what_asyncio_offers_works() -> None:
    """Tasks, groups, timeouts, events."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        loop.call_later(2, event.set)
        async with asyncio.TaskGroup() as group:
            group.create_task(event.wait())
            group.create_task(asyncio.sleep(3))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4):
                await asyncio.sleep(60)
        done, pending = await asyncio.wait(
            [asyncio.create_task(asyncio.sleep(seconds)) for seconds in (1, 100)], timeout=5
        )
        assert (len(done), len(pending)) == (1, 1)
        return loop.time()

    assert run(main()) == 12.0


def test_a_deadlock_is_told() -> None:
    """Somebody waits for what nobody will do; what it had to put away it does."""
    put_away: list[str] = []

    async def main() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            put_away.append("main")

    with pytest.raises(DeadlockError, match="after 0 s everybody waits"):
        run(main())
    assert put_away == ["main"]


def test_a_failure_that_nobody_hears_is_raised() -> None:
    """Of a callback: a simulation must not go on as if nothing had happened."""

    def fail() -> None:
        raise ValueError("lost")

    async def main() -> None:
        asyncio.get_running_loop().call_later(1, fail)
        await asyncio.sleep(2)

    with pytest.raises(RuntimeError) as raised:
        run(main())
    assert isinstance(raised.value.__cause__, ValueError)


def test_what_is_left_is_cancelled() -> None:
    """Tasks that outlive the main one."""
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(10**6)
        finally:
            ended.append("left")

    async def main() -> "asyncio.Task[None]":
        task = asyncio.create_task(forever())
        await asyncio.sleep(1)
        return task

    assert run(main()).cancelled()
    assert ended == ["left"]
