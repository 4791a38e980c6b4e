"""The token bucket: exact in thousandths, whatever happens to its rate."""

from hypothesis import assume, given
from hypothesis import strategies as st

from envoy_tokenpools.core.bucket import TokenBucket

RATES = st.integers(0, 10_000)
WINDOWS = st.integers(1, 60_000)
COSTS = st.integers(1, 1_000_000)

BUCKETS = st.builds(TokenBucket, rate=RATES, window_ms=WINDOWS, used_milli=st.integers(0, 10**9))


def bucket(rate: int = 100, window_ms: int = 10_000, used: int = 0) -> TokenBucket:
    """A bucket of 1,000 tokens of which `used` are used."""
    return TokenBucket(rate, window_ms, used * 1_000)


def test_what_fits_exactly_is_admitted_and_one_more_is_not() -> None:
    """A cost equal to what remains fits."""
    assert bucket(used=400).fits(600)
    assert not bucket(used=400).fits(601)


def test_an_untouched_bucket_admits_more_than_it_holds() -> None:
    """No refusal while nothing is used: the bucket is then short until it drains."""
    one = bucket()
    assert one.fits(5_000)
    one.take(5_000)
    assert one.remaining == 0
    assert not one.fits(1)
    assert one.wait_ms(1) == 40_010
    one.drain(40_010)
    assert one.fits(1)


def test_a_bucket_without_depth_admits_nothing() -> None:
    """A rate of zero is a closed door, not an untouched bucket."""
    assert not bucket(rate=0).fits(1)
    assert bucket(rate=0).wait_ms(1) is None


def test_what_was_taken_drains_at_the_rate() -> None:
    """A hundred per second: 250 of 1,000 are back after 2.5 s, all after 10 s, never more."""
    one = bucket(used=1_000)
    one.drain(2_500)
    assert (one.remaining, one.used_milli) == (250, 750_000)
    one.drain(60_000)
    assert (one.remaining, one.used_milli) == (1_000, 0)


def test_a_clock_that_steps_back_changes_nothing() -> None:
    """Neither the level nor the time from which it drains."""
    one = bucket(used=1_000)
    one.drain(5_000)
    one.drain(1_000)
    assert one.used_milli == 500_000
    one.drain(6_000)
    assert one.used_milli == 400_000


def test_giving_back_never_makes_more_than_there_was() -> None:
    """What has drained already cannot be given back a second time."""
    one = bucket(used=100)
    one.take(-300)
    assert one.used_milli == 0


@given(BUCKETS, st.lists(st.integers(-1_000_000, 1_000_000) | st.none(), max_size=20), RATES)
def test_never_negative(one: TokenBucket, steps: list[int | None], rate: int) -> None:
    """Whatever is taken, given back, drained or changed."""
    now_ms = 0
    for tokens in steps:
        if tokens is None:
            now_ms += 777
            one.set_rate(rate, one.window_ms, now_ms)
        else:
            one.take(tokens)
        assert one.used_milli >= 0
        assert one.remaining >= 0
        assert (one.wait_ms(1) or 0) >= 0


@given(BUCKETS, RATES, WINDOWS, st.integers(0, 100_000), st.integers(0, 100_000))
def test_a_change_of_rate_invents_and_loses_nothing(
    one: TokenBucket, rate: int, window_ms: int, before_ms: int, after_ms: int
) -> None:
    """The time before the change drains at the old rate, the time after it at the new one."""
    used, old_rate = one.used_milli, one.rate
    one.set_rate(rate, window_ms, before_ms)
    at_change = max(0, used - old_rate * before_ms)
    assert one.used_milli == at_change
    assert one.depth_milli == rate * window_ms
    one.drain(before_ms + after_ms)
    assert one.used_milli == max(0, at_change - rate * after_ms)


@given(BUCKETS, st.lists(st.integers(0, 50_000), max_size=10))
def test_draining_in_steps_is_draining_at_once(one: TokenBucket, times: list[int]) -> None:
    """Nothing is lost to rounding, however often the bucket is looked at."""
    twin = TokenBucket(one.rate, one.window_ms, one.used_milli)
    for now_ms in sorted(times):
        one.drain(now_ms)
    twin.drain(max(times, default=0))
    assert one == twin


@given(BUCKETS, COSTS)
def test_the_wait_is_the_first_millisecond_at_which_it_fits(one: TokenBucket, tokens: int) -> None:
    """Not a millisecond early, not a millisecond late; None only where no time would do."""
    wait_ms = one.wait_ms(tokens)
    if wait_ms is None:
        assert one.rate == 0
        return
    assert one.fits(tokens) is (wait_ms == 0)
    if wait_ms > 1:
        one.drain(wait_ms - 1)
        assert not one.fits(tokens)
    one.drain(wait_ms)
    assert one.fits(tokens)


@given(
    st.integers(1, 1_000), WINDOWS, st.lists(st.tuples(COSTS, st.integers(0, 5_000)), max_size=40)
)
def test_what_is_admitted_over_a_time_is_bounded(
    rate: int, window_ms: int, arrivals: list[tuple[int, int]]
) -> None:
    """Rate times time, the depth, and one cost deeper than the bucket: never more."""
    one = TokenBucket(rate, window_ms)
    now_ms, admitted, deepest = 0, 0, 0
    for tokens, pause_ms in arrivals:
        now_ms += pause_ms
        one.drain(now_ms)
        if one.fits(tokens):
            one.take(tokens)
            admitted += tokens
            deepest = max(deepest, tokens)
    assert admitted * 1_000 <= rate * (now_ms + window_ms) + deepest * 1_000


@given(BUCKETS, COSTS, COSTS)
def test_a_smaller_cost_fits_where_a_greater_one_does(
    one: TokenBucket, tokens: int, more: int
) -> None:
    """And never waits longer."""
    assume(one.rate > 0)
    small, great = sorted((tokens, more))
    assert one.fits(small) or not one.fits(great)
    assert (one.wait_ms(small) or 0) <= (one.wait_ms(great) or 0)
