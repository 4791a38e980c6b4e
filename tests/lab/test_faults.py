"""The fault header of the simulated backend."""

import pytest

from envoy_tokenpools.lab.faults import Fault


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        ("", Fault()),
        ("status=500", Fault(status=500)),
        ("reset-after=3", Fault(reset_after=3)),
        ("truncate-after=2; no-usage", Fault(truncate_after=2, no_usage=True)),
    ],
)
def test_headers_are_read(header: str, fault: Fault) -> None:
    """One fault, several, or none."""
    assert Fault.parse(header) == fault


@pytest.mark.parametrize("header", ["explode", "status=soon", "reset-after"])
def test_a_fault_that_does_not_exist_is_an_error(header: str) -> None:
    """A misspelt fault must not pass as a healthy answer."""
    with pytest.raises(ValueError, match=r"knows|invalid literal"):
        Fault.parse(header)


def test_an_answer_is_cut_at_the_stated_token_only() -> None:
    """No fault never cuts."""
    assert Fault(reset_after=3).cuts_after(3)
    assert not Fault(truncate_after=3).cuts_after(2)
    assert not any(Fault().cuts_after(tokens) for tokens in range(5))
