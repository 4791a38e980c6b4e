"""The vector of the three resources."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.core.resources import Resources

AMOUNTS = st.builds(Resources, *[st.integers(0, 10**15)] * 3)


@pytest.mark.parametrize("parts", [(-1, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_resources_are_never_negative(parts: tuple[int, int, int]) -> None:
    """A negative amount of any resource is a programmer's error and says so."""
    with pytest.raises(ValueError, match="never negative"):
        Resources(*parts)


@given(AMOUNTS, AMOUNTS)
def test_amounts_add_up_resource_by_resource(one: Resources, other: Resources) -> None:
    """Sums are commutative, NONE changes nothing, and each part is within the sum."""
    total = one + other
    assert total == other + one
    assert one + Resources.NONE == one
    assert one.within(total)
    assert total.concurrency - one.concurrency == other.concurrency


@given(AMOUNTS, st.integers(0, 20))
def test_replicas_multiply(one: Resources, replicas: int) -> None:
    """So many replicas hold so many times as much."""
    assert one.times(replicas) == sum([one] * replicas, start=Resources.NONE)


@pytest.mark.parametrize("more", [Resources(2, 1, 1), Resources(1, 2, 1), Resources(1, 1, 2)])
def test_within_means_every_resource(more: Resources) -> None:
    """One resource too many is not within."""
    one = Resources(1, 1, 1)
    assert one.within(more)
    assert not more.within(one)
    assert one.within(one)
