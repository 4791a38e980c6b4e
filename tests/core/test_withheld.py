"""What is kept free of idle guarantees, and for how long of what was just given back."""

from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.core.account import Account
from envoy_tokenpools.core.bucket import TokenBucket
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.withheld import MAX_REST_MS, REST_PART, Withheld
from tests.support.pools import cost, terms

WHOLE_PPM = 1_000_000


def account(name: str, sequences: int, ppm: int, kv_bytes: int = 0) -> Account:
    """One that holds nothing, of a guarantee."""
    guarantee = Resources(10, kv_bytes, sequences)
    return Account(terms(name, guarantee=guarantee, withheld_ppm=ppm), TokenBucket(0, 0))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9), st.sampled_from([0, 100_000, 333_333, WHOLE_PPM]), st.integers(0, 12)
        ),
        min_size=1,
        max_size=60,
    )
)
def test_sequences_are_rounded_up_once_for_all_others(members: list[tuple[int, int, int]]) -> None:
    """However many they are and whatever they hold: the sum of the parts of what idles, exactly, then rounded up."""
    withheld = Withheld()
    accounts = []
    for number, (sequences, ppm, in_use) in enumerate(members):
        one = account(f"a{number}", sequences, ppm)
        withheld.update(one)
        one.concurrency = in_use
        withheld.update(one)
        accounts.append(one)
    parts = [max(0, sequences - in_use) * ppm for sequences, ppm, in_use in members]
    for one, own in zip(accounts, parts, strict=True):
        assert withheld.sequences_from(one) == -(-(sum(parts) - own) // WHOLE_PPM)


def test_kv_bytes_are_rounded_up_one_by_one() -> None:
    """A byte more or less is nothing, and their product with millionths would be too large for exact sums."""
    withheld = Withheld()
    one, other = account("a", 0, 100_000, 15), account("b", 0, 100_000, 15)
    withheld.update(one)
    withheld.update(other)
    assert withheld.kv_bytes == 4
    assert withheld.kv_bytes_from(one) == 2


def test_what_was_given_back_rests_and_is_then_anybodys() -> None:
    """A part of the time that leases are held, up to a bound."""
    for hold_ms, rest_ms in ((1_000, 1_000 // REST_PART), (10**6, MAX_REST_MS)):
        withheld, one = Withheld(), account("a", 3, 0, 50)
        withheld.rest(one, cost(1, 2, 30), 0, hold_ms)
        withheld.update(one)
        assert (withheld.sequences_ppm, withheld.kv_bytes) == (2 * WHOLE_PPM, 30)
        withheld.end_rests(rest_ms - 1)
        assert withheld.kv_bytes == 30
        withheld.end_rests(rest_ms)
        assert (withheld.sequences_ppm, withheld.kv_bytes) == (0, 0)


def test_what_its_owner_has_taken_again_rests_no_more() -> None:
    """Nor does more rest than is idle."""
    withheld, one = Withheld(), account("a", 3, 0)
    withheld.rest(one, cost(1, 2), 0, 1_000)
    one.concurrency = 2
    withheld.update(one)
    assert withheld.sequences_ppm == WHOLE_PPM
    one.concurrency = 3
    withheld.update(one)
    assert withheld.sequences_ppm == 0


def test_what_is_never_lent_needs_no_rest() -> None:
    """It is kept free anyway."""
    withheld, one = Withheld(), account("a", 3, WHOLE_PPM)
    withheld.rest(one, cost(1, 2), 0, 1_000)
    assert one.resting_concurrency == 0
