"""The ramp: a loss counts at once, what comes back becomes usable slowly."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.core.ramp import Ramp
from envoy_tokenpools.core.resources import Resources

WHOLE = Resources(tokens_per_second=240, kv_bytes=1_600, concurrency=16)
HALF = Resources(tokens_per_second=120, kv_bytes=800, concurrency=8)

AMOUNTS = st.builds(Resources, st.integers(0, 10**6), st.integers(0, 10**12), st.integers(0, 99))
TIMES = st.integers(0, 10_000)


def restoring(per_second: float = 0.25) -> Ramp:
    """Eight of sixteen sequences were lost; they are back at 10 s."""
    lost = Ramp.steady(WHOLE, per_second=per_second).toward(HALF, now_ms=0, per_second=per_second)
    return lost.toward(WHOLE, now_ms=10_000, per_second=per_second)


def test_a_pool_starts_with_all_of_its_capacity() -> None:
    """Nobody waits for a ramp at the start."""
    assert Ramp.steady(WHOLE, per_second=0.25).usable(0) == WHOLE


def test_a_loss_counts_at_once() -> None:
    """In the very millisecond."""
    lost = Ramp.steady(WHOLE, per_second=0.25).toward(HALF, now_ms=500, per_second=0.25)
    assert lost.usable(500) == HALF


@pytest.mark.parametrize(
    ("after_ms", "sequences"),
    [(0, 8), (499, 8), (500, 9), (1_000, 10), (2_000, 12), (3_999, 15), (4_000, 16), (60_000, 16)],
)
def test_a_quarter_of_what_came_back_is_usable_each_second(after_ms: int, sequences: int) -> None:
    """Eight sequences in four seconds, whole ones only."""
    assert restoring().usable(10_000 + after_ms).concurrency == sequences


def test_a_clock_before_the_change_uses_nothing_of_what_came_back() -> None:
    """A reading from before the restoration is no head start."""
    assert restoring().usable(9_000) == HALF


def test_a_second_loss_during_the_ramp_counts_from_what_was_usable() -> None:
    """Ten are usable when the pool falls to nine; back at sixteen it climbs from nine."""
    ramp = restoring().toward(Resources(240, 1_600, 9), now_ms=11_000, per_second=0.25)
    assert ramp.usable(11_000).concurrency == 9
    again = ramp.toward(WHOLE, now_ms=12_000, per_second=0.25)
    assert [again.usable(12_000 + ms).concurrency for ms in (0, 1_000, 4_000)] == [9, 10, 16]


def test_resources_ramp_apart() -> None:
    """What was lost of one resource is at its new level while another still climbs."""
    mixed = Resources(tokens_per_second=60, kv_bytes=1_600, concurrency=16)
    ramp = Ramp.steady(HALF, per_second=0.5).toward(mixed, now_ms=0, per_second=0.5)
    assert ramp.usable(1_000) == Resources(60, 1_200, 12)


def test_hearing_of_the_same_capacity_again_does_not_start_over() -> None:
    """A watcher that repeats itself every half second delays nothing."""
    ramp = restoring()
    for now_ms in range(10_500, 14_000, 500):
        ramp = ramp.toward(WHOLE, now_ms=now_ms, per_second=0.25)
    assert ramp.usable(14_000) == WHOLE


@given(AMOUNTS, AMOUNTS, st.floats(0.01, 10), st.lists(TIMES, min_size=2))
def test_usable_moves_one_way_between_start_and_target(
    start: Resources, target: Resources, per_second: float, times: list[int]
) -> None:
    """Never above the target, never falling while it waits for it."""
    ramp = Ramp(start, target, since_ms=0, per_second=per_second)
    usable = [ramp.usable(now_ms) for now_ms in sorted(times)]
    assert all(amount.within(target) for amount in usable)
    assert all(one.within(other) for one, other in pairwise(usable))
    assert ramp.usable(round(1_000 / per_second) + 1) == target
