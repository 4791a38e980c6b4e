"""The way of a pool's operations to the server: in order, batched, one call at a time, and never sent twice as two."""

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envoy_tokenpools.errors import StoreError
from envoy_tokenpools.lab.virtual_loop import VirtualLoop
from envoy_tokenpools.store.redis import calls
from envoy_tokenpools.store.redis.calls import MAX_OPERATIONS, RETRY_MS, TRIAL_MS, Line

DEADLINE_MS = 50

SOON_MS = 2
"""How long the server takes when it is well."""

P = ParamSpec("P")


class ExactLoop(VirtualLoop):
    """Where no timer is early, not even by the last bit of a float: it would be asked for again, at the same time."""

    def _advance(self) -> None:
        super()._advance()
        due = max(each.when() for each in self._ready if isinstance(each, asyncio.TimerHandle))
        while self.time() < due:
            self._now_us += 1


def run_virtually(main: Coroutine[Any, Any, None]) -> None:
    """Run it on a loop where waiting takes no time, and waiting in vain is an error."""
    loop = ExactLoop()
    try:
        loop.run(main)
    finally:
        loop.close()


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is run so."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtually(test(*args, **kwargs))

    return run


@dataclass(frozen=True, slots=True)
class Turn:
    """
    What becomes of one sending.

    Attributes:
        after_ms: how long it takes.
        fails: with what, in place of a reply.
        is_done: whether the server carries the call out, though its reply may be lost.
        reply: in place of the right one.
    """

    after_ms: int = SOON_MS
    fails: StoreError | None = None
    is_done: bool = True
    reply: object = None


LOST = Turn(fails=StoreError("connection lost", transient=True), is_done=False)
REPLY_LOST = Turn(fails=StoreError("connection lost", transient=True))
BROKEN = Turn(fails=StoreError("the script failed", transient=False), is_done=False)
LATE = Turn(after_ms=DEADLINE_MS + 1)


@dataclass(slots=True)
class Sending:
    """One call as it was sent."""

    at_ms: int
    number: str
    operations: bytes

    @property
    def names(self) -> list[Any]:
        """What was asked, in order."""
        return [name for (name,) in msgspec.msgpack.decode(self.operations)]


@dataclass(slots=True)
class Script:
    """
    A server that does as it is told, and answers each operation by its name.

    Attributes:
        turns: what becomes of the next sendings; of those after them, `otherwise`.
        sent: every sending.
        done: what was carried out, each call once.
        most_at_once: calls that were on their way together.
    """

    turns: deque[Turn] = field(default_factory=deque)
    otherwise: Turn = field(default_factory=Turn)
    epoch: str = "1"
    sent: list[Sending] = field(default_factory=list)
    done: list[Any] = field(default_factory=list)
    most_at_once: int = 0
    _on_their_way: int = 0
    _last: str = ""

    async def __call__(self, number: str, operations: bytes) -> object:
        """Take a call."""
        sending = Sending(now_ms(), number, operations)
        self.sent.append(sending)
        turn = self.turns.popleft() if self.turns else self.otherwise
        self._on_their_way += 1
        self.most_at_once = max(self.most_at_once, self._on_their_way)
        try:
            await asyncio.sleep(turn.after_ms / 1_000)
        finally:
            self._on_their_way -= 1
        if turn.is_done and number != self._last:
            self._last = number
            self.done += sending.names
        if turn.fails is not None:
            raise turn.fails
        if turn.reply is not None:
            return turn.reply
        return msgspec.msgpack.encode((self.epoch, sending.names))

    @property
    def batches(self) -> list[list[Any]]:
        """What each sending asked."""
        return [sending.names for sending in self.sent]

    @property
    def times_ms(self) -> list[int]:
        """When each was sent."""
        return [sending.at_ms for sending in self.sent]


def now_ms() -> int:
    """Loop time."""
    return round(asyncio.get_running_loop().time() * 1_000)


def open_line(*turns: Turn, otherwise: Turn | None = None) -> tuple[Line, Script, list[int]]:
    """A line, its server, and when it was told that the books are new."""
    server = Script(deque(turns), otherwise or Turn())
    told: list[int] = []
    line = Line(server, deadline_ms=DEADLINE_MS, on_epoch=lambda: told.append(now_ms()))
    return line, server, told


def begin(*work: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Begin all of it, in this order; nobody has to wait for what fails."""
    tasks = [asyncio.ensure_future(each) for each in work]
    for task in tasks:
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return tasks


def keep(line: Line, name: object, within_s: float = 1.0) -> Coroutine[Any, Any, Any]:
    """An operation that is to be done whatever happens."""
    return line.ask((name,), within_s=within_s, is_kept=True)


async def error_of(work: "asyncio.Future[Any] | Coroutine[Any, Any, Any]") -> StoreError:
    """The error with which it must fail."""
    with pytest.raises(StoreError) as raised:
        await work
    return raised.value


async def settled(tasks: Sequence["asyncio.Future[Any]"]) -> list[Any]:
    """What became of each: an answer or an error."""
    return await asyncio.gather(*tasks, return_exceptions=True)


async def pass_ms(ms: float) -> None:
    """Let time pass."""
    await asyncio.sleep(ms / 1_000)


# Order, batches, one at a time


@in_virtual_time
async def test_an_operation_is_sent_at_once_when_nothing_is_on_its_way() -> None:
    """Alone: an idle replica is not held up."""
    line, server, _ = open_line()
    assert await line.decide(("a",)) == "a"
    await pass_ms(1_000)
    assert await line.ask(("b",), within_s=1) == "b"
    assert server.batches == [["a"], ["b"]]
    assert server.times_ms == [0, 1_000 + SOON_MS]


@in_virtual_time
async def test_while_a_call_is_on_its_way_the_next_operations_gather() -> None:
    """They go out together when it is back, in the order in which they were begun; each gets its own answer."""
    line, server, _ = open_line(Turn(10), Turn(10))
    first = begin(line.decide(("a",)))
    await pass_ms(1)
    others = begin(line.decide(("b",)), keep(line, "c"))
    await pass_ms(4)
    others += begin(line.ask(("d",), within_s=1), line.decide(("e",)))
    assert await settled(first + others) == ["a", "b", "c", "d", "e"]
    assert server.batches == [["a"], ["b", "c", "d", "e"]]
    assert server.times_ms == [0, 10]


@in_virtual_time
async def test_a_call_has_a_bounded_number_of_operations() -> None:
    """What is beyond goes with the next ones."""
    line, server, _ = open_line()
    names = list(range(2 * MAX_OPERATIONS + 1))
    assert await settled(begin(*(line.decide((name,)) for name in names))) == names
    assert [len(batch) for batch in server.batches] == [MAX_OPERATIONS, MAX_OPERATIONS, 1]
    assert server.done == names


@in_virtual_time
async def test_one_call_is_on_its_way_at_a_time() -> None:
    """However many ask, and whatever happens to the calls."""
    line, server, _ = open_line(LATE, LOST, REPLY_LOST, BROKEN, LATE)
    for number in range(40):
        begin(line.decide((number,)), keep(line, -number))
        await pass_ms(7)
    await line.close(10)
    assert server.most_at_once == 1


@in_virtual_time
async def test_calls_are_numbered_from_one() -> None:
    """No two have the same number."""
    line, server, _ = open_line()
    for name in "abc":
        await line.decide((name,))
    assert [sending.number for sending in server.sent] == ["1", "2", "3"]


# Sent again


@pytest.mark.parametrize(
    "failure", [LOST, REPLY_LOST, Turn(reply=b"\xc1"), Turn(reply=None, fails=LOST.fails)]
)
@in_virtual_time
async def test_a_call_that_failed_is_sent_again_as_it_was(failure: Turn) -> None:
    """Under its number, at once, and without what was asked meanwhile; nobody is told."""
    line, server, _ = open_line(failure)
    asked = begin(line.decide(("a",)), keep(line, "b"))
    await pass_ms(1)
    asked += begin(line.decide(("c",)))
    assert await settled(asked) == ["a", "b", "c"]
    first, second, third = server.sent
    assert (first.number, first.operations) == (second.number, second.operations)
    assert first.names == ["a", "b"]
    assert first.at_ms + SOON_MS == second.at_ms
    assert (third.number, third.names) == ("2", ["c"])
    assert server.done == ["a", "b", "c"]
    assert not line.is_troubled


@in_virtual_time
async def test_a_call_that_goes_on_failing_is_sent_less_and_less_often() -> None:
    """At once, after the first delay, after twice as long each time, and at least after the longest."""
    line, server, _ = open_line(otherwise=Turn(0, LOST.fails, is_done=False))
    asked = begin(keep(line, "a"))
    await pass_ms(3_000)
    server.otherwise = Turn()
    await settled(asked)
    await line.close(1)
    first_ms, longest_ms = RETRY_MS
    expected, delay_ms = [0, 0], first_ms
    while expected[-1] + delay_ms < 3_000 + longest_ms:
        expected.append(expected[-1] + delay_ms)
        delay_ms = min(2 * delay_ms, longest_ms)
    assert server.times_ms == expected[: len(server.sent)]
    assert server.times_ms[-1] >= 3_000
    assert {sending.number for sending in server.sent} == {"1"}


@in_virtual_time
async def test_the_next_trouble_begins_with_short_delays_again() -> None:
    """What the last one came to is forgotten."""
    line, server, _ = open_line(*[LOST] * 6)
    await keep(line, "a")
    began = now_ms()
    server.turns.extend([LOST] * 3)
    await keep(line, "b")
    first_ms = RETRY_MS[0]
    later = [each - began for each in server.times_ms[7:]]
    assert later == [0, SOON_MS, 2 * SOON_MS + first_ms, 3 * SOON_MS + 3 * first_ms]


@in_virtual_time
async def test_what_nobody_waits_for_any_more_is_not_sent_again() -> None:
    """A call that failed when all its callers were gone is given up, and the server is left alone."""
    line, server, _ = open_line(otherwise=Turn(10, LOST.fails, is_done=False))
    (asked,) = begin(line.decide(("a",)))
    error = await error_of(asked)
    assert (error.transient, error.uncertain) == (True, True)
    count = len(server.sent)
    await pass_ms(60_000)
    assert len(server.sent) <= count + 1
    assert server.times_ms[-1] <= DEADLINE_MS + RETRY_MS[0]


@in_virtual_time
async def test_whoever_left_stays_in_a_call_that_is_sent_again() -> None:
    """Under the same number there must be the same operations."""
    line, server, _ = open_line(Turn(10, LOST.fails, is_done=False))
    left, stays = begin(line.decide(("a",)), line.decide(("b",)))
    await pass_ms(1)
    left.cancel()
    assert await stays == "b"
    assert server.batches == [["a", "b"], ["a", "b"]]


# Trouble


@in_virtual_time
async def test_one_failure_is_no_trouble() -> None:
    """Connections break; the second failure in a row is trouble, until a call comes back in time."""
    line, server, _ = open_line(LOST, Turn(), LOST, LOST, LOST)
    assert await line.decide(("a",)) == "a"
    assert not line.is_troubled
    asked = begin(keep(line, "b"))
    await pass_ms(SOON_MS + 1)
    assert not line.is_troubled
    await pass_ms(SOON_MS)
    assert line.is_troubled
    await settled(asked)
    assert not line.is_troubled
    assert len(server.sent) == 6


@in_virtual_time
async def test_a_server_that_is_late_is_trouble() -> None:
    """From the moment on that a decision would have failed, and also when the answer has come."""
    line, _, _ = open_line(Turn(DEADLINE_MS + 10))
    asked = begin(line.ask(("a",), within_s=1))
    await pass_ms(DEADLINE_MS)
    assert not line.is_troubled
    await pass_ms(1)
    assert line.is_troubled
    assert await settled(asked) == ["a"]
    assert line.is_troubled
    await pass_ms(TRIAL_MS + 2 * SOON_MS)
    assert not line.is_troubled


@in_virtual_time
async def test_in_trouble_a_claim_fails_at_once() -> None:
    """It was not sent, and never will be; others wait for the server all the same."""
    line, server, _ = open_line(*[LOST] * 3)
    kept = begin(keep(line, "kept"))
    await pass_ms(2 * SOON_MS + 1)
    began = now_ms()
    error = await error_of(line.decide(("claim",)))
    assert now_ms() == began
    assert (error.transient, error.uncertain) == (True, False)
    assert await line.ask(("other",), within_s=1) == "other"
    assert await settled(kept) == ["kept"]
    assert server.done == ["kept", "other"]


@in_virtual_time
async def test_a_claim_that_expires_before_it_is_sent_is_never_sent() -> None:
    """Its caller is told on time, and that it certainly took nothing."""
    line, server, _ = open_line(otherwise=Turn(DEADLINE_MS - 5))
    others = begin(line.decide(("first",)))
    await pass_ms(1)
    others += begin(*(line.ask((n,), within_s=1) for n in range(MAX_OPERATIONS)))
    await pass_ms(1)
    began = now_ms()
    error = await error_of(line.decide(("claim",)))
    assert now_ms() - began == DEADLINE_MS
    assert (error.transient, error.uncertain) == (True, False)
    others += begin(line.ask(("last",), within_s=1))
    await settled(others)
    assert server.done == ["first", *range(MAX_OPERATIONS), "last"]


@in_virtual_time
async def test_a_claim_that_was_sent_may_have_been_carried_out() -> None:
    """Its caller is told on time, and that it is not known."""
    line, server, _ = open_line(Turn(DEADLINE_MS + 10))
    error = await error_of(line.decide(("claim",)))
    assert now_ms() == DEADLINE_MS
    assert (error.transient, error.uncertain) == (True, True)
    await line.close(1)
    assert server.done == ["claim"]


@in_virtual_time
async def test_each_has_its_own_time() -> None:
    """The one that asked first may wait longest, and the other way round."""
    line, _, _ = open_line(Turn(500), Turn(2_000))
    times = {"long": 1.0, "short": 0.1, "middle": 0.3}
    ended: dict[str, int] = {}

    async def ask(name: str) -> None:
        try:
            await line.ask((name,), within_s=times[name])
        except StoreError:
            ended[name] = now_ms()

    await line_is_busy(line)
    await asyncio.gather(*(ask(name) for name in times))
    assert ended == {"short": 100, "middle": 300, "long": 1_000}


async def line_is_busy(line: Line) -> None:
    """Send something that nobody here waits for."""
    begin(line.ask(("busy",), within_s=10))
    await asyncio.sleep(0)


@pytest.mark.parametrize("is_cancelled", [True, False])
@in_virtual_time
async def test_what_is_not_kept_is_forgotten_with_its_caller(*, is_cancelled: bool) -> None:
    """Cancelled or out of time before it was sent: it is never sent."""
    line, server, _ = open_line(Turn(200))
    await line_is_busy(line)
    (asked,) = begin(line.ask(("renew",), within_s=0.1))
    await pass_ms(50)
    if is_cancelled:
        asked.cancel()
    await settled([asked])
    await line.close(1)
    assert server.done == ["busy"]


# What is kept


@pytest.mark.parametrize("is_cancelled", [True, False])
@in_virtual_time
async def test_what_is_kept_is_delivered_when_the_server_is_back(*, is_cancelled: bool) -> None:
    """In order and once each, though none of the callers is there any more, and whatever was asked in between."""
    line, server, _ = open_line(otherwise=LOST)
    names = list(range(2 * MAX_OPERATIONS))
    asked = []
    for name in names:
        asked += begin(keep(line, name))
        begin(line.ask((-name - 1,), within_s=0.1))
        await pass_ms(1)
    if is_cancelled:
        for each in asked:
            each.cancel()
    await settled(asked)
    await pass_ms(5_000)
    assert server.done == []
    server.otherwise = Turn()
    await line.close(2)
    assert [name for name in server.done if name >= 0] == names
    assert len(server.done) == len(set(server.done))


@in_virtual_time
async def test_a_caller_of_what_is_kept_is_told_in_time() -> None:
    """That there was no answer; and that it may have been done."""
    line, server, _ = open_line(otherwise=LOST)
    error = await error_of(keep(line, "settle", within_s=0.3))
    assert now_ms() == 300
    assert (error.transient, error.uncertain) == (True, True)
    server.otherwise = Turn()
    await line.close(2)
    assert server.done == ["settle"]


@in_virtual_time
async def test_a_server_that_is_away_for_too_long_costs_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is kept is bounded: who comes last is kept, and who is given up is told."""
    monkeypatch.setattr(calls, "MAX_KEPT", 10)
    line, server, _ = open_line(otherwise=LOST)
    await asyncio.wait(begin(keep(line, "on its way")), timeout=0.1)
    asked = begin(*(keep(line, name) for name in range(15)))
    await pass_ms(1)
    assert [each.done() for each in asked] == [True] * 5 + [False] * 10
    assert (await error_of(asked[0])).transient
    server.otherwise = Turn()
    await line.close(2)
    assert server.done == ["on its way", *range(5, 15)]
    assert (await settled(asked))[5:] == list(range(5, 15))


@in_virtual_time
async def test_a_long_absence_is_bounded_work() -> None:
    """Twenty thousand settlements are kept, and delivered; one more is not."""
    line, server, _ = open_line(otherwise=LOST)
    await line_is_busy(line)
    count = calls.MAX_KEPT + 1
    asked = [line._ask((n,), 0.2, is_kept=True) for n in range(count)]
    assert [each.done() for each in asked[:2]] == [True, False]
    outcomes = await settled(asked)
    assert all(isinstance(each, StoreError) for each in outcomes)
    server.otherwise = Turn()
    await line.close(10)
    assert [name for name in server.done if name != "busy"] == list(range(1, count))


# A fault of the script


@in_virtual_time
async def test_a_fault_of_the_script_fails_its_call_once() -> None:
    """The same call would fail again: all of it fails, also what is kept, and the next one goes on."""
    line, server, _ = open_line(BROKEN)
    asked = begin(line.decide(("a",)), keep(line, "b"))
    await pass_ms(1)
    asked += begin(line.decide(("c",)))
    first, second, third = await settled(asked)
    for error in (first, second):
        assert isinstance(error, StoreError)
        assert not error.transient
    assert third == "c"
    assert [(sending.number, sending.names) for sending in server.sent] == [
        ("1", ["a", "b"]),
        ("2", ["c"]),
    ]
    assert not line.is_troubled


@in_virtual_time
async def test_a_fault_of_the_script_may_come_after_a_lost_connection() -> None:
    """Then it is no longer sent either."""
    line, server, _ = open_line(LOST, LOST, BROKEN)
    assert not (await error_of(keep(line, "a"))).transient
    assert await line.ask(("b",), within_s=1) == "b"
    assert len(server.sent) == 4


# Trials


@in_virtual_time
async def test_a_server_that_was_late_is_tried_until_it_is_not() -> None:
    """With calls that ask nothing, as nobody else may ask; then claims go out again."""
    line, server, _ = open_line(LATE, LATE, LATE)
    await settled(begin(line.decide(("a",))))
    await pass_ms(1)
    assert not (await error_of(line.decide(("b",)))).uncertain
    await pass_ms(1_000)
    assert server.batches == [["a"], [], [], []]
    late_ms = LATE.after_ms + TRIAL_MS
    assert server.times_ms == [0, late_ms, 2 * late_ms, 3 * late_ms]
    assert not line.is_troubled
    assert await line.decide(("c",)) == "c"


@in_virtual_time
async def test_what_is_asked_before_a_trial_goes_with_it() -> None:
    """It is as good a trial."""
    line, server, _ = open_line(LATE)
    await settled(begin(line.decide(("a",))))
    await pass_ms(5)
    assert await line.ask(("b",), within_s=1) == "b"
    assert server.batches == [["a"], ["b"]]
    assert server.times_ms[1] == LATE.after_ms + TRIAL_MS
    assert not line.is_troubled


@in_virtual_time
async def test_a_server_that_fails_its_trial_is_left_alone() -> None:
    """It is in trouble until something that somebody needs comes back."""
    line, server, _ = open_line(LATE, LOST)
    await settled(begin(line.decide(("a",))))
    await pass_ms(60_000)
    assert len(server.sent) == 2
    assert line.is_troubled
    assert await line.ask(("look",), within_s=1) == "look"
    assert not line.is_troubled


# The end


@in_virtual_time
async def test_closing_delivers_what_is_kept() -> None:
    """If the server is back in time; nobody has to wait for the answers."""
    line, server, _ = open_line(*[LOST] * 4)
    begin(*(keep(line, name) for name in range(100)))
    await pass_ms(1)
    await line.close(2)
    assert server.done == list(range(100))
    assert now_ms() < 2_000


@pytest.mark.parametrize("is_on_its_way", [True, False])
@in_virtual_time
async def test_closing_takes_no_longer_than_it_may(*, is_on_its_way: bool) -> None:
    """Whoever still waits is told then, wherever their operation is; nothing is sent any more."""
    line, server, _ = open_line(otherwise=Turn(10_000))
    if not is_on_its_way:
        await line_is_busy(line)
    asked = begin(keep(line, "kept", within_s=60), line.ask(("other",), within_s=60))
    await pass_ms(100)
    await line.close(2)
    assert now_ms() == 2_100
    _, waiting = await asyncio.wait(asked, timeout=1)
    assert not waiting
    assert all(isinstance(each, StoreError) for each in await settled(asked))
    await pass_ms(60_000)
    assert len(server.sent) == 1


@in_virtual_time
async def test_a_line_that_is_closed_takes_nothing() -> None:
    """Whoever comes late is told at once."""
    line, server, _ = open_line()
    await line.decide(("a",))
    await line.close(2)
    for late in (line.decide(("b",)), keep(line, "c"), line.ask(("d",), within_s=1)):
        assert not (await error_of(late)).transient
    assert now_ms() == SOON_MS
    assert server.done == ["a"]


@in_virtual_time
async def test_a_line_that_was_never_used_closes_at_once() -> None:
    """There is nothing to wait for."""
    line, server, _ = open_line()
    await line.close(2)
    assert (now_ms(), server.sent) == (0, [])


# Epochs


@in_virtual_time
async def test_books_that_were_opened_anew_are_told_once() -> None:
    """Not when they are seen first; and whoever asked has their answer by then."""
    server = Script()
    asked: list[asyncio.Task[Any]] = []
    told: list[tuple[str, int]] = []
    line = Line(
        server,
        deadline_ms=DEADLINE_MS,
        on_epoch=lambda: told.append((line.epoch, len(server.done))),
    )
    assert line.epoch == ""
    for epoch in ("1", "1", "2", "2", "2", "3"):
        server.epoch = epoch
        asked = begin(line.decide(("a",)), line.decide(("b",)))
        assert await settled(asked) == ["a", "b"]
        assert line.epoch == epoch
    assert told == [("2", 6), ("3", 12)]


# All at once

MOMENTS = st.sampled_from([0, 0, 1, 7, DEADLINE_MS, 400])

TURNS = st.sampled_from(
    [Turn(), Turn(0), LATE, LOST, REPLY_LOST, BROKEN, Turn(reply=b"x"), Turn(1_000, LOST.fails)]
)

ASKED = st.tuples(st.sampled_from(["decide", "ask", "keep"]), MOMENTS, st.booleans())


@settings(max_examples=200)
@given(st.lists(ASKED, max_size=80), st.lists(TURNS, max_size=40))
def test_whatever_happens_each_operation_is_done_once_or_not_at_all(
    asked: Sequence[tuple[str, int, bool]], turns: Sequence[Turn]
) -> None:
    """In order; what is kept and met no fault of the script is done; who was told that it was not sent is right."""

    async def run() -> None:
        line, server, _ = open_line(*turns)
        tasks: list[asyncio.Task[Any]] = []
        for name, (kind, pause_ms, leaves) in enumerate(asked):
            if kind == "decide":
                tasks += begin(line.decide((name,)))
            else:
                tasks += begin(line.ask((name,), within_s=0.2, is_kept=kind == "keep"))
            await pass_ms(pause_ms)
            if leaves:
                tasks[-1].cancel()
        outcomes = await settled(tasks)
        await line.close(120)
        assert server.done == sorted(set(server.done))
        assert server.most_at_once <= 1
        spoilt = {
            name
            for sending, turn in zip(server.sent, turns, strict=False)
            if turn is BROKEN
            for name in sending.names
        }
        for name, outcome in enumerate(outcomes):
            if not isinstance(outcome, BaseException):
                assert outcome == name
                assert name in server.done
            elif isinstance(outcome, StoreError) and not outcome.uncertain:
                assert name not in server.done or asked[name][0] == "keep"
            if asked[name][0] == "keep" and name not in spoilt:
                assert name in server.done or isinstance(outcome, asyncio.CancelledError)

    run_virtually(run())
