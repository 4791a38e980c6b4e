"""
Quantities (`144KiB`, `1.5k`) and durations (`500ms`, `2s`) of the configuration.

Messages never repeat what was written: a value in the wrong place may be a secret.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

# Counters are Lua numbers in a shared store, so doubles: above this they lose units.
MAX_QUANTITY: Final = 2**53 - 1

_DECIMAL: Final = {"": 1, "k": 1_000, "M": 1_000**2, "G": 1_000**3}
_BINARY: Final = {"Ki": 1_024, "Mi": 1_024**2, "Gi": 1_024**3, "Ti": 1_024**4}
_DURATION_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}

# The digits are bounded so that no text makes a number of unbounded size.
_NUMBER: Final = r"(?P<number>[0-9]{1,20}(?:\.[0-9]{1,20})?)"
_QUANTITY: Final = re.compile(_NUMBER + r"(?P<suffix>[kMG]|[KMGT]i)?(?P<byte>B)?")
_DURATION: Final = re.compile(_NUMBER + r"(?P<unit>ms|s|m|h)")


def parse_quantity(value: object, *, in_bytes: bool = False) -> int:
    """
    Read a whole, non-negative quantity.

    Args:
        value: a number, or text with one of the suffixes k, M, G (powers of 1000) or
            Ki, Mi, Gi, Ti (powers of 1024).
        in_bytes: whether a final `B` is allowed.

    Raises:
        ValueError: not a quantity, not whole, negative, or above `MAX_QUANTITY`.
    """
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        if match is None or (match["byte"] and not in_bytes):
            example = "144KiB, 16GiB or 2GB" if in_bytes else "240, 1.5k or 2M"
            raise ValueError(f"must be a quantity such as {example}")
        amount = Fraction(match["number"]) * (_DECIMAL | _BINARY)[match["suffix"] or ""]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if not -MAX_QUANTITY <= value <= MAX_QUANTITY:  # false for NaN too
            raise ValueError(f"must be a finite number, at most {MAX_QUANTITY}")
        amount = Fraction(value)
    else:
        raise ValueError("must be a number or a quantity with a suffix")  # noqa: TRY004
    return _whole(amount)


def parse_duration_ms(value: object) -> int:
    """
    Read a duration in whole milliseconds: text with a unit (ms, s, m, h), or a plain 0.

    Raises:
        ValueError: not a duration, without a unit, not whole milliseconds, or too long.
    """
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if match is None:
            raise ValueError("must be a duration such as 500ms, 2s, 5m or 1h")
        return _whole(Fraction(match["number"]) * _DURATION_MS[match["unit"]])
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value == 0:
            return 0
        raise ValueError("needs a unit: 500ms, 2s, 5m or 1h")
    raise ValueError("must be a duration such as 500ms, 2s, 5m or 1h")


def format_bytes(amount: int) -> str:
    """The shortest exact text of `amount` bytes that `parse_quantity` reads back."""
    for suffix, size in reversed(_BINARY.items()):
        if amount and amount % size == 0:
            return f"{amount // size}{suffix}B"
    return f"{amount}B"


def format_duration_ms(duration_ms: int) -> str:
    """The shortest exact text of a duration that `parse_duration_ms` reads back."""
    for unit, size in reversed(_DURATION_MS.items()):
        if duration_ms and duration_ms % size == 0:
            return f"{duration_ms // size}{unit}"
    return f"{duration_ms}ms"


@dataclass(frozen=True, slots=True)
class QuantityRange:
    """Reads a quantity and keeps it within bounds (both included)."""

    minimum: int
    maximum: int = MAX_QUANTITY
    in_bytes: bool = False

    def __call__(self, value: object) -> int:
        """Raises ValueError like `parse_quantity`, and outside the bounds."""
        amount = parse_quantity(value, in_bytes=self.in_bytes)
        if amount < self.minimum:
            raise ValueError(f"must be at least {self._text(self.minimum)}")
        if amount > self.maximum:
            raise ValueError(f"must be at most {self._text(self.maximum)}")
        return amount

    def _text(self, amount: int) -> str:
        return format_bytes(amount) if self.in_bytes else str(amount)


@dataclass(frozen=True, slots=True)
class DurationRange:
    """Reads a duration and keeps it within bounds (both included)."""

    minimum_ms: int
    maximum_ms: int

    def __call__(self, value: object) -> int:
        """Raises ValueError like `parse_duration_ms`, and outside the bounds."""
        duration_ms = parse_duration_ms(value)
        if not self.minimum_ms <= duration_ms <= self.maximum_ms:
            low, high = format_duration_ms(self.minimum_ms), format_duration_ms(self.maximum_ms)
            raise ValueError(f"must be between {low} and {high}")
        return duration_ms


def _whole(amount: Fraction) -> int:
    """The integer that `amount` is; ValueError when it is none, negative or too large."""
    if amount < 0:
        raise ValueError("must not be negative")
    if amount.denominator != 1:
        raise ValueError("must come to a whole number")
    if amount > MAX_QUANTITY:
        raise ValueError(f"must be at most {MAX_QUANTITY}")
    return amount.numerator
