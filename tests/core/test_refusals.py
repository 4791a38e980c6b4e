"""Who may not pass whom: the log of refusals against the rule spelled out naively."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.core.refusals import Precedence, RefusalLog

NAMES = st.sampled_from("abcd")
PRECEDENCES = st.tuples(st.integers(0, 3), st.sampled_from([0.1, 1.0, 20.3, 93.8]))
EVENTS = st.lists(st.none() | st.tuples(NAMES, PRECEDENCES, st.booleans()), max_size=25)


@given(EVENTS, NAMES, PRECEDENCES)
def test_the_log_answers_as_the_rule_says(
    events: list[tuple[str, Precedence, bool] | None], name: str, precedence: Precedence
) -> None:
    """Blocked by another refused inside its share, or of higher precedence, in this tick or the last."""
    log = RefusalLog()
    ticks: list[list[tuple[str, Precedence, bool]]] = [[]]
    for event in events:
        if event is None:
            log.roll()
            ticks.append([])
        else:
            log.add(event[0], event[1], inside_share=event[2])
            ticks[-1].append(event)
    recent = [event for tick in ticks[-2:] for event in tick if event[0] != name]
    blocked = any(inside or other > precedence for _, other, inside in recent)
    assert log.blocks(name, precedence) is blocked


@pytest.mark.parametrize(
    ("refused", "precedence", "blocked"),
    [
        (("b", (1, 50.0), False), (1, 20.0), True),
        (("b", (1, 20.0), False), (1, 20.0), False),
        (("b", (1, 10.0), False), (1, 20.0), False),
        (("b", (1, 10.0), True), (1, 20.0), True),
        (("a", (1, 99.0), True), (1, 20.0), False),
        (("b", (2, 0.310), False), (1, 0.333), True),
        (("b", (1, 0.333), False), (2, 0.310), False),
    ],
)
def test_a_single_refusal(
    refused: tuple[str, Precedence, bool], precedence: Precedence, *, blocked: bool
) -> None:
    """Equals do not block each other, nobody blocks itself, and class goes before weight."""
    log = RefusalLog()
    log.add(refused[0], refused[1], inside_share=refused[2])
    assert log.blocks("a", precedence) is blocked


def test_refusals_are_forgotten_after_the_next_tick() -> None:
    """The current and the last tick count."""
    log = RefusalLog()
    log.add("b", (1, 50.0), inside_share=True)
    log.roll()
    assert log.blocks("a", (1, 1.0))
    log.roll()
    assert not log.blocks("a", (1, 1.0))


def test_an_empty_log_blocks_nobody() -> None:
    """Not even the lightest."""
    assert not RefusalLog().blocks("a", (0, 1e-5))
