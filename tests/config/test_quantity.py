"""Behaviour of quantities and durations."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.config.quantity import (
    MAX_QUANTITY,
    DurationRange,
    QuantityRange,
    format_bytes,
    format_duration_ms,
    parse_duration_ms,
    parse_quantity,
)

SUFFIXES = {
    "": 1,
    "k": 1_000,
    "M": 1_000_000,
    "G": 1_000_000_000,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}


@pytest.mark.parametrize(
    ("written", "amount"),
    [
        (240, 240),
        (0, 0),
        (1e3, 1_000),
        ("240", 240),
        ("1.5k", 1_500),
        ("0.5Ki", 512),
        ("0.001k", 1),
        ("2.50k", 2_500),
        (MAX_QUANTITY, MAX_QUANTITY),
        ("8191Ti", 8_191 * 2**40),
    ],
)
def test_quantities_are_read(written: object, amount: int) -> None:
    """Numbers and suffixed text come to whole amounts."""
    assert parse_quantity(written) == amount


@pytest.mark.parametrize(
    ("written", "amount"),
    [("144KiB", 147_456), ("16GiB", 2**34), ("2GB", 2 * 10**9), ("7B", 7), ("5Mi", 5 * 2**20)],
)
def test_bytes_may_say_so(written: str, amount: int) -> None:
    """A final B is allowed where bytes are meant, and only there."""
    assert parse_quantity(written, in_bytes=True) == amount
    if written.endswith("B"):
        with pytest.raises(ValueError, match=r"such as 240, 1\.5k or 2M"):
            parse_quantity(written)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (-1, "negative"),
        ("-1", "such as"),
        (1.5, "whole"),
        ("1.0001k", "whole"),
        (float("nan"), "finite"),
        (float("inf"), "finite"),
        (float("-inf"), "finite"),
        ("nan", "such as"),
        ("1e3", "such as"),
        (True, "a number or a quantity"),
        (None, "a number or a quantity"),
        ([1], "a number or a quantity"),
        (MAX_QUANTITY + 1, "at most"),
        (10**400, "at most"),
        ("8192Ti", "at most"),
        ("9" * 21, "such as"),
        ("", "such as"),
        ("1K", "such as"),
        ("1m", "such as"),
        ("16 Gi", "such as"),
        ("1_000", "such as"),
        (".5k", "such as"),
        ("5.k", "such as"),
        ("1k\n", "such as"),
        ("\u0661k", "such as"),  # a digit, but not an ASCII one
    ],
)
def test_other_values_are_refused_without_repeating_them(written: object, message: str) -> None:
    """Negative, fractional, endless, boolean, huge and misspelt amounts are faults."""
    with pytest.raises(ValueError, match=message):
        parse_quantity(written)


@given(st.integers(0, 2_000_000), st.sampled_from(sorted(SUFFIXES)))
def test_a_suffix_multiplies(count: int, suffix: str) -> None:
    """Text is its number times its suffix, or too large."""
    amount = count * SUFFIXES[suffix]
    if amount > MAX_QUANTITY:
        with pytest.raises(ValueError, match="at most"):
            parse_quantity(f"{count}{suffix}")
    else:
        assert parse_quantity(f"{count}{suffix}") == amount


@given(st.decimals(0, 9_999, places=4), st.sampled_from(sorted(SUFFIXES)))
def test_a_fraction_is_exact_or_refused(number: object, suffix: str) -> None:
    """A fraction is read only when it comes to a whole amount."""
    amount = Fraction(str(number)) * SUFFIXES[suffix]
    if amount.denominator == 1 and amount <= MAX_QUANTITY:
        assert parse_quantity(f"{number}{suffix}") == amount
    else:
        with pytest.raises(ValueError, match=r"whole|at most"):
            parse_quantity(f"{number}{suffix}")


@given(st.integers(0, MAX_QUANTITY))
def test_bytes_round_trip(amount: int) -> None:
    """What is shown is what would be read."""
    assert parse_quantity(format_bytes(amount), in_bytes=True) == amount


@pytest.mark.parametrize(
    ("written", "duration_ms"),
    [
        ("500ms", 500),
        ("2s", 2_000),
        ("1.5s", 1_500),
        ("5m", 300_000),
        ("1h", 3_600_000),
        (0, 0),
        ("0s", 0),
    ],
)
def test_durations_are_read(written: object, duration_ms: int) -> None:
    """Durations come to whole milliseconds; only 0 needs no unit."""
    assert parse_duration_ms(written) == duration_ms


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (500, "needs a unit"),
        (0.5, "needs a unit"),
        (float("nan"), "needs a unit"),
        ("500", "such as"),
        (True, "such as"),
        (False, "such as"),
        (None, "such as"),
        ("1m30s", "such as"),
        ("-1s", "such as"),
        ("1.5ms", "whole"),
        ("1d", "such as"),
        ("2 s", "such as"),
        ("9999999999999h", "at most"),
    ],
)
def test_other_durations_are_refused(written: object, message: str) -> None:
    """A number without a unit, a fraction of a millisecond and other text are faults."""
    with pytest.raises(ValueError, match=message):
        parse_duration_ms(written)


@given(st.integers(0, 10**9), st.sampled_from(sorted(UNITS)))
def test_durations_round_trip(count: int, unit: str) -> None:
    """A duration is its number times its unit, and is shown as it would be read."""
    duration_ms = parse_duration_ms(f"{count}{unit}")
    assert duration_ms == count * UNITS[unit]
    assert parse_duration_ms(format_duration_ms(duration_ms)) == duration_ms


@pytest.mark.parametrize(
    ("duration_ms", "shown"),
    [(0, "0ms"), (1, "1ms"), (1_500, "1500ms"), (90_000, "90s"), (7_200_000, "2h")],
)
def test_durations_are_shown_in_their_largest_whole_unit(duration_ms: int, shown: str) -> None:
    """The unit is the largest that needs no fraction."""
    assert format_duration_ms(duration_ms) == shown


def test_ranges_include_their_ends() -> None:
    """A range takes both of its ends and names the one that is passed."""
    amounts = QuantityRange(1_024, 4_096, in_bytes=True)
    assert [amounts("1Ki"), amounts("4KiB")] == [1_024, 4_096]
    with pytest.raises(ValueError, match="at least 1KiB"):
        amounts(1_023)
    with pytest.raises(ValueError, match="at most 4KiB"):
        amounts(4_097)
    with pytest.raises(ValueError, match=r"at least 1$"):
        QuantityRange(1)(0)
    times = DurationRange(1_000, 30_000)
    assert [times("1s"), times("30s")] == [1_000, 30_000]
    for outside in ("999ms", "30001ms", 0):
        with pytest.raises(ValueError, match="between 1s and 30s"):
            times(outside)
