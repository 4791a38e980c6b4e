"""Counts and rates of one entitlement's clients."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.clock import ManualClock
from envoy_tokenpools.lab.tally import Tally, percentile


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 20.0), (0.51, 30.0), (0.99, 40.0), (1.0, 40.0), (0.01, 10.0)]
)
def test_percentiles_are_nearest_rank(share: float, expected: float) -> None:
    """Always one of the samples."""
    assert percentile([40.0, 10.0, 30.0, 20.0], share) == expected


def test_no_samples_have_no_percentile() -> None:
    """None, not zero: nothing was seen."""
    assert percentile([], 0.5) is None
    assert Tally(ManualClock()).first_token_ms(0.99) is None


@pytest.mark.parametrize("share", [0.0, 1.01, -1.0])
def test_a_share_outside_its_range_is_an_error(share: float) -> None:
    """99 for 0.99 is a likely slip."""
    with pytest.raises(ValueError, match="share"):
        percentile([1.0], share)


@given(
    samples=st.lists(st.floats(0, 1e6), min_size=1),
    share=st.floats(0, 1, exclude_min=True),
)
def test_a_percentile_is_the_smallest_sample_that_covers_the_share(
    samples: list[float], share: float
) -> None:
    """At least `share` of all are not above it, and less than `share` are below it."""
    found = percentile(samples, share)
    assert found is not None
    assert sum(sample <= found for sample in samples) >= share * len(samples)
    assert sum(sample < found for sample in samples) < share * len(samples)


def test_a_live_rate_looks_at_the_last_whole_seconds() -> None:
    """A tenant that gets nothing any more has a rate of 0 soon, whatever it had before."""
    clock = ManualClock(5_000)
    tally = Tally(clock, started_ms=5_000)
    assert tally.tokens_per_second == 0
    clock.advance(500)
    tally.received(50)
    assert tally.tokens_per_second == 100
    clock.advance(600)
    tally.received(1_000)
    assert tally.tokens_per_second == 50, "the running second is left out"
    clock.advance(900)
    assert tally.tokens_per_second == 525
    clock.advance(10_000)
    assert tally.tokens_per_second == 0


def test_the_rate_of_an_ended_run_is_its_average() -> None:
    """And the time stands still."""
    clock = ManualClock()
    tally = Tally(clock)
    tally.received(100)
    clock.advance(4_000)
    tally.ended_ms = 4_000
    clock.advance(4_000)
    assert (tally.tokens_per_second, tally.elapsed_ms) == (25, 4_000)


def test_a_correction_takes_tokens_back() -> None:
    """Usage may be less than what the chunks suggested."""
    tally = Tally(ManualClock())
    tally.received(5)
    tally.received(-2)
    assert tally.tokens == 3


def test_first_tokens_can_be_read_from_a_phase_on() -> None:
    """Experiments compare phases."""
    clock = ManualClock()
    tally = Tally(clock)
    tally.saw_first_token(900.0)
    clock.advance(1_000)
    tally.saw_first_token(50.0)
    assert tally.first_token_ms(1.0) == 900.0
    assert tally.first_token_ms(1.0, since_ms=1_000) == 50.0
