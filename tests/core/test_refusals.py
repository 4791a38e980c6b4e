"""Who may not pass whom: the log of refusals against the rule spelled out naively."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.core.refusals import RefusalLog

NAMES = st.sampled_from("abcd")
WEIGHTS = st.sampled_from([0.1, 1.0, 20.3, 93.8])
EVENTS = st.lists(st.none() | st.tuples(NAMES, WEIGHTS, st.booleans()), max_size=25)


@given(EVENTS, NAMES, WEIGHTS)
def test_the_log_answers_as_the_rule_says(
    events: list[tuple[str, float, bool] | None], name: str, weight: float
) -> None:
    """Blocked by another refused inside its share, or of higher weight, in this tick or the last."""
    log = RefusalLog()
    ticks: list[list[tuple[str, float, bool]]] = [[]]
    for event in events:
        if event is None:
            log.roll()
            ticks.append([])
        else:
            log.add(event[0], event[1], inside_share=event[2])
            ticks[-1].append(event)
    recent = [event for tick in ticks[-2:] for event in tick if event[0] != name]
    blocked = any(inside or other > weight for _, other, inside in recent)
    assert log.blocks(name, weight) is blocked


@pytest.mark.parametrize(
    ("refused", "weight", "blocked"),
    [
        (("b", 50.0, False), 20.0, True),
        (("b", 20.0, False), 20.0, False),
        (("b", 10.0, False), 20.0, False),
        (("b", 10.0, True), 20.0, True),
        (("a", 99.0, True), 20.0, False),
    ],
)
def test_a_single_refusal(
    refused: tuple[str, float, bool], weight: float, *, blocked: bool
) -> None:
    """Equal weights do not block each other, nor does anybody block itself."""
    log = RefusalLog()
    log.add(refused[0], refused[1], inside_share=refused[2])
    assert log.blocks("a", weight) is blocked


def test_refusals_are_forgotten_after_the_next_tick() -> None:
    """The current and the last tick count."""
    log = RefusalLog()
    log.add("b", 50.0, inside_share=True)
    log.roll()
    assert log.blocks("a", 1.0)
    log.roll()
    assert not log.blocks("a", 1.0)


def test_an_empty_log_blocks_nobody() -> None:
    """Not even the lightest."""
    assert not RefusalLog().blocks("a", 1e-5)
