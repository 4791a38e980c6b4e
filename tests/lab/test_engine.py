"""The engine on virtual time: no clock, no waiting."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envoy_tokenpools.lab.engine import (
    Engine,
    EngineShape,
    Event,
    Finished,
    Started,
    Ticket,
    Token,
)

SHAPE = EngineShape(slots=2, tokens_per_second=20, prefill_tokens_per_second=1_000)


def run_until_idle(engine: Engine) -> list[Event]:
    """Advance from event to event until nothing is due."""
    events: list[Event] = []
    while (next_ms := engine.next_event_ms()) is not None:
        told = engine.advance(next_ms)
        assert told, "an announced event must come"
        events += told
    return events


def submitted(engine: Engine, prompt: int, output: int, now_ms: int = 0) -> Ticket:
    """A sequence that the queue must accept."""
    ticket = engine.submit(prompt_tokens=prompt, output_tokens=output, now_ms=now_ms)
    assert ticket is not None
    return ticket


def test_one_sequence_is_prefilled_then_generates_a_token_per_interval() -> None:
    """Ten tokens a second per slot: 50 ms of prefill, then a token each 100 ms."""
    engine = Engine(SHAPE)
    ticket = submitted(engine, 50, 3)
    assert run_until_idle(engine) == [
        Started(ticket, 0),
        Token(ticket, 150, 1),
        Token(ticket, 250, 2),
        Token(ticket, 350, 3),
        Finished(ticket, 350, 3),
    ]
    assert engine.running == engine.waiting == engine.kv_tokens_in_use == 0


def test_the_queue_is_first_in_first_out_and_starts_when_a_slot_is_freed() -> None:
    """The third sequence starts when the first ends, though `advance` is called much later."""
    engine = Engine(SHAPE)
    first, second, third = (submitted(engine, 0, tokens) for tokens in (1, 5, 1))
    assert (engine.running, engine.waiting) == (2, 1)
    starts = [event for event in engine.advance(10_000) if isinstance(event, Started)]
    assert starts == [Started(first, 0), Started(second, 0), Started(third, 100)]


def test_abort_frees_the_slot_at_once() -> None:
    """The waiting sequence starts at that moment, and the aborted one is not heard of again."""
    engine = Engine(EngineShape(slots=1, tokens_per_second=10, prefill_tokens_per_second=1_000))
    running, waiting = submitted(engine, 0, 1_000), submitted(engine, 0, 1)
    engine.advance(450)
    assert engine.abort(running, 480)
    assert (engine.running, engine.waiting) == (1, 0)
    assert run_until_idle(engine) == [
        Started(waiting, 480),
        Token(waiting, 580, 1),
        Finished(waiting, 580, 1),
    ]


def test_abort_takes_back_what_was_not_told_yet() -> None:
    """Events of an aborted sequence that nobody fetched are dropped."""
    engine = Engine(SHAPE)
    ticket = submitted(engine, 0, 5)
    assert engine.abort(ticket, 250)
    assert engine.advance(10_000) == []


def test_a_waiting_sequence_can_be_aborted() -> None:
    """It leaves the queue, and those behind it keep their order."""
    engine = Engine(EngineShape(slots=1, tokens_per_second=10, prefill_tokens_per_second=1_000))
    _, second, third = (submitted(engine, 0, 1) for _ in range(3))
    assert engine.abort(second, 0)
    assert engine.waiting == 1
    started = [event.ticket for event in run_until_idle(engine) if isinstance(event, Started)]
    assert second not in started
    assert started[-1] == third


def test_abort_after_the_end_is_refused() -> None:
    """A sequence that finished before the abort stays finished and is still told."""
    engine = Engine(SHAPE)
    ticket = submitted(engine, 0, 1)
    assert not engine.abort(ticket, 100)
    assert Finished(ticket, 100, 1) in engine.advance(100)


def test_a_full_queue_refuses() -> None:
    """With one waiting place, the fourth sequence gets no ticket and leaves no trace."""
    engine = Engine(
        EngineShape(2, tokens_per_second=20, prefill_tokens_per_second=1_000, max_waiting=1)
    )
    for _ in range(3):
        submitted(engine, 0, 1)
    assert engine.submit(prompt_tokens=0, output_tokens=1, now_ms=0) is None
    assert (engine.running, engine.waiting) == (2, 1)


def test_a_queue_without_places_still_fills_the_slots() -> None:
    """`max_waiting` 0 means: start at once or be refused."""
    engine = Engine(
        EngineShape(2, tokens_per_second=20, prefill_tokens_per_second=1_000, max_waiting=0)
    )
    submitted(engine, 0, 1)
    submitted(engine, 0, 1)
    assert engine.submit(prompt_tokens=0, output_tokens=1, now_ms=50) is None
    submitted(engine, 0, 1, now_ms=100)


def test_the_kv_cache_holds_sequences_back() -> None:
    """Slots are free, but the context of both does not fit at the same time."""
    shape = EngineShape(4, 40, prefill_tokens_per_second=1_000, kv_tokens=100)
    engine = Engine(shape)
    submitted(engine, 50, 10)
    second = submitted(engine, 40, 10)
    assert (engine.running, engine.waiting) == (1, 1)
    assert Started(second, 1_050) in run_until_idle(engine)


def test_what_never_fits_the_kv_cache_is_an_error() -> None:
    """It would hold up the queue for ever."""
    engine = Engine(EngineShape(1, 1, 1, kv_tokens=100))
    with pytest.raises(ValueError, match="never fit"):
        engine.submit(prompt_tokens=60, output_tokens=41, now_ms=0)


def test_negative_numbers_are_errors() -> None:
    """Of tokens and of slots."""
    engine = Engine(SHAPE)
    with pytest.raises(ValueError, match="never negative"):
        engine.submit(prompt_tokens=1, output_tokens=-1, now_ms=0)
    with pytest.raises(ValueError, match="never negative"):
        engine.resize(-1, 0)


def test_kv_in_use_grows_with_the_context() -> None:
    """The prompt counts from the start, each generated token when it is out."""
    engine = Engine(SHAPE)
    submitted(engine, 50, 3)
    assert engine.kv_tokens_in_use == 50
    engine.advance(250)
    assert engine.kv_tokens_in_use == 52


def test_no_output_tokens_ends_after_prefill() -> None:
    """An embedding has a prompt and no tokens."""
    engine = Engine(SHAPE)
    ticket = submitted(engine, 100, 0)
    assert run_until_idle(engine) == [Started(ticket, 0), Finished(ticket, 100, 0)]


def test_an_outage_lets_running_sequences_finish_and_keeps_the_pace_of_each() -> None:
    """Two slots become one: nobody is killed, the third waits for both, the rate per slot stays."""
    engine = Engine(SHAPE)
    _, _, third = (submitted(engine, 0, tokens) for tokens in (1, 2, 1))
    engine.resize(1, 50)
    assert (engine.slots, engine.running) == (1, 2)
    assert [event for event in run_until_idle(engine) if event.ticket == third] == [
        Started(third, 200),
        Token(third, 300, 1),
        Finished(third, 300, 1),
    ]


def test_restored_slots_start_those_who_wait() -> None:
    """The end of an outage is a start for the queue."""
    engine = Engine(SHAPE)
    engine.resize(0, 0)
    ticket = submitted(engine, 0, 1)
    assert engine.next_event_ms() is None
    engine.resize(2, 5_000)
    assert engine.advance(5_000) == [Started(ticket, 5_000)]


def test_milestones_tell_the_first_and_the_last_token_at_the_same_times() -> None:
    """A simulator that skips the tokens between sees the same starts, first tokens and ends."""
    every, milestones = Engine(SHAPE), Engine(SHAPE, every_token=False)
    for engine in (every, milestones):
        for prompt, output in ((10, 7), (20, 1), (30, 4)):
            submitted(engine, prompt, output)
    told = run_until_idle(every)
    lengths = {event.ticket: event.generated for event in told if isinstance(event, Finished)}
    assert run_until_idle(milestones) == [
        event
        for event in told
        if not isinstance(event, Token) or event.generated in (1, lengths[event.ticket])
    ]


def test_milestones_know_the_kv_in_use_between_them() -> None:
    """What a sequence generated is computed from the time, not from the events."""
    engine = Engine(SHAPE, every_token=False)
    submitted(engine, 50, 10)
    engine.advance(450)
    assert engine.kv_tokens_in_use == 54


def test_time_never_goes_backwards() -> None:
    """A driver that mixes up its clock is told so."""
    engine = Engine(SHAPE)
    engine.advance(10)
    with pytest.raises(ValueError, match="backwards"):
        engine.advance(9)


@pytest.mark.parametrize(
    "shape",
    [
        {"slots": 0},
        {"tokens_per_second": 0},
        {"prefill_tokens_per_second": 0},
        {"kv_tokens": 0},
        {"max_waiting": -1},
    ],
)
def test_impossible_shapes_are_refused(shape: dict[str, int]) -> None:
    """An engine without slots or speed is a mistake."""
    whole = {"slots": 1, "tokens_per_second": 1, "prefill_tokens_per_second": 1} | shape
    with pytest.raises(ValueError, match=r"at least 1|never negative"):
        EngineShape(**whole)


operations = st.lists(
    st.tuples(
        st.integers(0, 300),  # ms since the operation before
        st.one_of(
            st.tuples(st.just("submit"), st.integers(0, 200), st.integers(0, 30)),
            st.tuples(st.just("abort"), st.integers(1, 40), st.just(0)),
            st.tuples(st.just("advance"), st.just(0), st.just(0)),
            st.tuples(st.just("resize"), st.integers(1, 4), st.just(0)),
        ),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(
    operations=operations,
    slots=st.integers(1, 4),
    rate=st.integers(1, 5_000),
    max_waiting=st.one_of(st.none(), st.integers(0, 5)),
    every_token=st.booleans(),
)
def test_every_ticket_ends_and_slots_hold(
    *,
    operations: list[tuple[int, tuple[str, int, int]]],
    slots: int,
    rate: int,
    max_waiting: int | None,
    every_token: bool,
) -> None:
    """Whatever is done: slots, queue and KV cache hold, and each ticket ends exactly once."""
    engine = Engine(
        EngineShape(slots, rate, 1_000, max_waiting=max_waiting, kv_tokens=500),
        every_token=every_token,
    )
    lengths: dict[Ticket, int] = {}
    aborted: set[Ticket] = set()
    told: list[Event] = []
    now_ms = 0
    most_slots = slots
    for pause_ms, (verb, first, second) in operations:
        now_ms += pause_ms
        if verb == "submit":
            ticket = engine.submit(prompt_tokens=first, output_tokens=second, now_ms=now_ms)
            if ticket is not None:
                lengths[ticket] = second
        elif verb == "abort":
            if engine.abort(Ticket(first), now_ms):
                aborted.add(Ticket(first))
        elif verb == "resize":
            engine.resize(first, now_ms)
            most_slots = max(most_slots, first)
        else:
            told += engine.advance(now_ms)
        assert engine.running <= most_slots
        assert engine.kv_tokens_in_use <= 500
        assert max_waiting is None or engine.waiting <= max_waiting
    told += run_until_idle(engine)

    assert (engine.running, engine.waiting, engine.kv_tokens_in_use) == (0, 0, 0)
    ends = Counter(event.ticket for event in told if isinstance(event, Finished))
    assert ends == Counter(lengths.keys() - aborted)
    assert all(
        event.generated == lengths[event.ticket] for event in told if isinstance(event, Finished)
    )
    assert [event.at_ms for event in told] == sorted(event.at_ms for event in told)


@settings(deadline=None)
@given(
    slots=st.integers(1, 16),
    rate=st.integers(1, 100_000),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=40),
)
def test_the_total_rate_is_never_exceeded(slots: int, rate: int, lengths: list[int]) -> None:
    """However many wait, the engine generates at most `tokens_per_second`."""
    engine = Engine(EngineShape(slots, rate, 1_000_000))
    for tokens in lengths:
        submitted(engine, 0, tokens)
    last_ms = max(event.at_ms for event in run_until_idle(engine))
    assert sum(lengths) * 1_000 <= rate * last_ms


@given(tokens=st.integers(1, 10_000), slots=st.integers(1, 64), rate=st.integers(1, 100_000))
def test_generation_time_and_its_inverse_agree(tokens: int, slots: int, rate: int) -> None:
    """The token is out exactly at its time, not a microsecond before."""
    shape = EngineShape(slots, rate, 1)
    at_us = shape.generation_us(tokens)
    assert shape.tokens_after(at_us) >= tokens
    assert shape.tokens_after(at_us - 1) < tokens
