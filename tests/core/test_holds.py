"""How long leases are held, and when the next is expected to end."""

import pytest

from envoy_tokenpools.core.admission import Lease
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.holds import DEFAULT_HOLD_MS, MAX_GUESSED_HOLD_MS, HoldTime
from envoy_tokenpools.core.resources import Resources

USABLE = Resources(tokens_per_second=240, kv_bytes=0, concurrency=16)


def leases(*admitted_at_ms: int, output_tokens: int = 0) -> dict[str, Lease]:
    """Leases that were taken at these times."""
    return {
        str(number): Lease(
            lease_id=str(number),
            entitlement="a",
            cost=Cost(1, output_tokens, 0, 1),
            within_share=False,
            within_guarantee=False,
            tokens_guaranteed=False,
            pool_ppm=1_000_000,
            admitted_at_ms=at_ms,
            expires_at_ms=at_ms + 60_000,
        )
        for number, at_ms in enumerate(admitted_at_ms)
    }


@pytest.mark.parametrize(
    ("now_ms", "ahead", "wait_ms"),
    [(0, 0, 8_000), (6_000, 0, 2_000), (6_000, 1, 2_000), (6_000, 3, 6_000), (9_000, 0, 2_000)],
)
def test_the_oldest_ends_first_and_the_others_at_even_distances(
    now_ms: int, ahead: int, wait_ms: int
) -> None:
    """Four leases of 8 s: the oldest when its time is over, one more every 2 s; one overdue may end at any time."""
    hold_time = HoldTime(mean_us=8_000_000)
    held = leases(0, 0, 0, 0)
    assert hold_time.wait_ms(held, USABLE, ahead, now_ms) == wait_ms


@pytest.mark.parametrize(
    ("output_tokens", "now_ms", "wait_ms"),
    [
        (0, 0, DEFAULT_HOLD_MS),
        (75, 0, 5_000),
        (75, 4_000, 1_250),
        (4_096, 0, MAX_GUESSED_HOLD_MS),
        (0, 20_000, 5_000),
    ],
)
def test_before_any_has_ended_it_is_guessed(output_tokens: int, now_ms: int, wait_ms: int) -> None:
    """By what the oldest reserves at its share of the pool's rate, within bounds, and by how long it has run."""
    held = leases(0, 0, 0, 0, output_tokens=output_tokens)
    assert HoldTime().wait_ms(held, USABLE, 0, now_ms) == wait_ms


def test_the_first_that_ends_tells_most() -> None:
    """Then each moves the mean by a tenth."""
    hold_time = HoldTime()
    hold_time.learn(8_000)
    assert hold_time.mean_us == 8_000_000
    hold_time.learn(9_000)
    assert hold_time.mean_us == 8_100_000


def test_where_nothing_is_held_somebody_else_holds_it() -> None:
    """An entitlement without leases in a full pool: it waits as long as leases last; the least is a millisecond."""
    assert HoldTime(mean_us=3_000_000).wait_ms({}, USABLE, 0, 0) == 3_000
    assert HoldTime(mean_us=100).wait_ms(leases(0), USABLE, 0, 10) == 1


def test_a_pool_without_a_rate_is_guessed_within_bounds() -> None:
    """An outage is no reason to fail."""
    none = Resources(0, 0, 0)
    assert HoldTime().wait_ms(leases(0, output_tokens=5), none, 0, 0) == DEFAULT_HOLD_MS
