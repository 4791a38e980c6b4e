"""Who may not pass whom: the log of refusals against the rule spelled out naively."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.core.refusals import MAX_AWAY, MAX_SPAN_MS, RETURN_MS, Precedence, RefusalLog

NAMES = st.sampled_from("abcd")
PRECEDENCES = st.tuples(st.integers(0, 3), st.sampled_from([0.1, 1.0, 20.3, 93.8]))
EVENTS = st.lists(
    st.tuples(
        st.integers(0, 3_000),
        NAMES,
        PRECEDENCES,
        st.booleans(),
        st.sampled_from([1, 100, 900, 10**7]),
    ),
    max_size=25,
)


@given(EVENTS, NAMES, PRECEDENCES, st.integers(0, 30_000))
def test_the_log_answers_as_the_rule_says(
    events: list[tuple[int, str, Precedence, bool, int]],
    name: str,
    precedence: Precedence,
    later_ms: int,
) -> None:
    """Blocked while another that was refused inside its share, or has higher precedence, may be away; later not."""
    log, now_ms = RefusalLog(), 0
    surely, perhaps = False, False
    refusals: list[tuple[int, int, str, Precedence, bool]] = []
    for passed_ms, who, theirs, inside, retry_after_ms in events:
        now_ms += passed_ms
        log.add(who, theirs, 7, inside_share=inside, retry_after_ms=retry_after_ms, now_ms=now_ms)
        away_ms = min(MAX_SPAN_MS, retry_after_ms * 5 // 4 + RETURN_MS)
        refusals.append((now_ms, away_ms, who, theirs, inside))
    now_ms += later_ms
    longest_ms = max((away_ms for _, away_ms, *_ in refusals), default=0)
    for at_ms, away_ms, who, theirs, inside in refusals:
        if who != name and (inside or theirs > precedence):
            surely = surely or now_ms < at_ms + away_ms
            perhaps = perhaps or now_ms < at_ms + 2 * longest_ms
    blocked = log.blocks(name, precedence, now_ms)
    assert blocked or not surely
    assert perhaps or not blocked


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
    log.add(refused[0], refused[1], 7, inside_share=refused[2], retry_after_ms=1, now_ms=0)
    assert log.blocks("a", precedence, 0) is blocked


def test_a_refusal_is_forgotten_when_its_client_should_be_back() -> None:
    """A second and a quarter, and a moment for the way; never as late as twice that."""
    log = RefusalLog()
    log.add("b", (1, 50.0), 7, inside_share=True, retry_after_ms=1_000, now_ms=500)
    assert log.blocks("a", (1, 1.0), 500 + 1_349)
    assert not log.blocks("a", (1, 1.0), 500 + 2 * 1_350)


def test_whoever_stays_away_for_long_blocks_nobody_meanwhile() -> None:
    """An hour's wait is no reason to let capacity idle for an hour."""
    log = RefusalLog()
    log.add("b", (1, 50.0), 7, inside_share=True, retry_after_ms=3_600_000, now_ms=0)
    assert log.blocks("a", (1, 1.0), MAX_SPAN_MS - 1)
    assert not log.blocks("a", (1, 1.0), 2 * MAX_SPAN_MS)


def test_what_was_made_good_is_forgotten() -> None:
    """Of one entitlement; the others block as before."""
    log = RefusalLog()
    for name, weight in (("b", 50.0), ("c", 20.0)):
        log.add(name, (1, weight), 7, inside_share=False, retry_after_ms=100, now_ms=0)
    log.admitted("b", 7, 0)
    assert log.blocks("a", (1, 10.0), 0)
    assert not log.blocks("a", (1, 30.0), 0)
    log.admitted("c", 7, 0)
    assert not log.blocks("a", (1, 10.0), 0)


def wants(log: RefusalLog, name: str, fingerprint: int, now_ms: int = 0) -> None:
    """A request is refused inside its share, and told to come back in a second."""
    log.add(name, (1, 1.0), fingerprint, inside_share=True, retry_after_ms=1_000, now_ms=now_ms)


def test_an_entitlement_blocks_until_the_last_of_its_requests_is_admitted() -> None:
    """Others of its own that were never refused, and those of others, do not count."""
    log = RefusalLog()
    wants(log, "b", 1)
    wants(log, "b", 2)
    for name, fingerprint in (("b", 1), ("b", 3), ("c", 2), ("b", 1)):
        log.admitted(name, fingerprint, 10)
        assert log.blocks("a", (1, 9.0), 10)
    log.admitted("b", 2, 10)
    assert not log.blocks("a", (1, 9.0), 10)


def test_whoever_has_given_up_is_not_waited_for() -> None:
    """A request that should have been back is away no more, and the admission of another makes all good."""
    log = RefusalLog()
    wants(log, "b", 1)
    wants(log, "b", 2, now_ms=900)
    log.admitted("b", 2, 1_349)
    assert log.blocks("a", (1, 9.0), 1_349)
    wants(log, "b", 3, now_ms=1_350)
    log.admitted("b", 3, 1_350)
    assert not log.blocks("a", (1, 9.0), 1_350)


def test_which_of_the_unknown_was_admitted_nobody_knows() -> None:
    """Requests without a fingerprint count until they should have been back."""
    log = RefusalLog()
    wants(log, "b", 0)
    log.admitted("b", 0, 1_000)
    assert log.blocks("a", (1, 9.0), 1_000)
    log.admitted("b", 0, 1_350)
    assert not log.blocks("a", (1, 9.0), 1_350)


def test_a_flood_of_refusals_takes_no_more_room_than_a_few() -> None:
    """The latest are remembered."""
    log = RefusalLog()
    for fingerprint in range(1, 10 * MAX_AWAY):
        wants(log, "b", fingerprint)
    assert len(log._away["b"]) == MAX_AWAY
    log.admitted("b", 1, 0)
    assert log.blocks("a", (1, 9.0), 0)


def test_an_empty_log_blocks_nobody() -> None:
    """Not even the lightest."""
    assert not RefusalLog().blocks("a", (0, 1e-5), 0)
