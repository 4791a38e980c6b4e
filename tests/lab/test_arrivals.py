"""Open-loop arrivals, drawn and read."""

import dataclasses
from itertools import pairwise

import pytest

from envoy_tokenpools.errors import ConfigError
from envoy_tokenpools.lab.arrivals import arrivals, traced_arrivals
from envoy_tokenpools.lab.scenario import Scenario
from envoy_tokenpools.lab.scenario_file import shipped_scenarios

MIXED = shipped_scenarios("mixed")[0]


def with_load(scenario: Scenario, **changes: object) -> Scenario:
    """The scenario with its first load alone, changed."""
    load = dataclasses.replace(scenario.loads[0], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(scenario, loads=(load,))


def test_the_same_seed_gives_the_same_arrivals() -> None:
    """In order of time, all within the run; another seed gives others."""
    drawn = list(arrivals(MIXED))
    assert drawn == list(arrivals(MIXED))
    assert drawn != list(arrivals(dataclasses.replace(MIXED, seed=2)))
    assert all(one.at_ms <= other.at_ms for one, other in pairwise(drawn))
    assert 0 < drawn[0].at_ms < drawn[-1].at_ms < MIXED.duration_ms
    assert {one.load.entitlement for one in drawn} == {"chat", "documents", "batch"}


def test_rates_hold_over_a_long_time() -> None:
    """As many requests as the rate says, give or take four standard deviations."""
    day = with_load(dataclasses.replace(MIXED, duration_ms=3_600_000), stop_ms=3_600_000)
    expected = MIXED.loads[0].rate * 3_600
    assert abs(len(list(arrivals(day))) - expected) < 4 * expected**0.5


def test_a_curve_moves_arrivals_and_phases_bound_them() -> None:
    """Nothing where the curve is zero, nothing before the start or after the stop."""
    bent = with_load(MIXED, curve=(0.0, 1.0), start_ms=0, stop_ms=100_000)
    times = [arrival.at_ms for arrival in arrivals(bent)]
    assert times
    assert min(times) >= MIXED.duration_ms / 2
    assert max(times) < 100_000
    assert list(arrivals(with_load(MIXED, curve=(0.0,)))) == []


def test_a_shortened_scenario_draws_the_same_requests_sooner() -> None:
    """Their lengths stay, their times shrink."""
    written, short = list(arrivals(MIXED)), list(arrivals(MIXED.scaled(0.1)))
    assert len(short) == pytest.approx(len(written), abs=2)
    assert short[5].at_ms == pytest.approx(written[5].at_ms / 10)
    assert short[5].prompt_tokens == written[5].prompt_tokens


def test_a_trace_is_sorted_scaled_and_cut() -> None:
    """Seconds of the trace are shortened with the run; what comes after its end is left out."""
    lines = [
        '{"time": 2.5, "entitlement": "batch", "prompt_tokens": 7, "output_tokens": 9, "more": 1}',
        "",
        '{"time": 1, "entitlement": "chat", "prompt_tokens": 5, "output_tokens": 6}',
        '{"time": 121, "entitlement": "chat", "prompt_tokens": 5, "output_tokens": 6}',
    ]
    read = traced_arrivals(MIXED.scaled(0.5), lines)
    assert [(one.at_ms, one.load.entitlement, one.prompt_tokens, one.output_tokens) for one in read] == [
        (500, "chat", 5, 6),
        (1_250, "batch", 7, 9),
    ]  # fmt: skip


def test_every_faulty_line_of_a_trace_is_told_by_number() -> None:
    """No JSON, a missing field, nobody's entitlement, lengths and times that cannot be."""
    good = '{"time": 1, "entitlement": "chat", "prompt_tokens": 5, "output_tokens": 6}'
    lines = [
        good,
        "nonsense",
        '{"time": 1}',
        good.replace("chat", "ghost"),
        good.replace('"time": 1', '"time": -1'),
        good.replace('"prompt_tokens": 5', '"prompt_tokens": 0'),
    ]
    with pytest.raises(ConfigError) as caught:
        traced_arrivals(MIXED, lines)
    assert [fault.path for fault in caught.value.faults] == [f"line {n}" for n in range(2, 7)]
