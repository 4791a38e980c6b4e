"""Weight, debt and burst: the paper's numbers, and the places where we differ from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.core.pool import Entitlement, EntitlementState, Gains, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.weight import (
    burst_sample,
    ewma,
    mean_slo_ms,
    next_debt,
    service_gap,
    weight,
    weight_factors,
)

DEDICATED, GUARANTEED, ELASTIC, SPOT, PREEMPTIBLE = ServiceClass
MEAN_SLO_MS = 15_250.0
GAINS = Gains()

DEBTS = st.floats(-1, 1)
RATES = st.floats(0, 1e9)


def paper_weight(
    slo_target_ms: int | None,
    *,
    service_class: ServiceClass = ELASTIC,
    mean: float | None = MEAN_SLO_MS,
    burst: float = 0.0,
    debt: float = 0.0,
) -> float:
    """The weight with the paper's gains."""
    return weight(
        service_class,
        slo_target_ms=slo_target_ms,
        mean_slo_ms=mean,
        burst=burst,
        debt=debt,
        gains=GAINS,
    )


@pytest.mark.parametrize(("slo_ms", "expected"), [(500, 93.8), (5_000, 60.4), (30_000, 20.3)])
def test_the_base_weights_of_experiment_2(slo_ms: int, expected: float) -> None:
    """Paper Table 2: copilot 93.8, reports 60.4, synth 20.3."""
    assert round(paper_weight(slo_ms), 1) == expected


@pytest.mark.parametrize(
    ("slo_ms", "debt", "expected"), [(30_000, 0.775, 83.0), (500, 0.607, 321.7)]
)
def test_the_weights_at_peak_debt_of_experiment_2(
    slo_ms: int, debt: float, expected: float
) -> None:
    """83.2 and 321.5 in the paper, which rounds the base weight first."""
    assert paper_weight(slo_ms, debt=debt) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("slo_ms", "mean"), [(None, MEAN_SLO_MS), (None, None), (700, None), (700, 700.0), (0, 0.0)]
)
def test_no_target_stands_at_the_mean(slo_ms: int | None, mean: float | None) -> None:
    """Without a target, or in a pool without any, the SLO factor is 1/3."""
    assert paper_weight(slo_ms, mean=mean) == pytest.approx(100 / 3)


@pytest.mark.parametrize("debt", [-0.2, -0.25, -0.5, -1.0])
def test_the_debt_factor_has_a_floor(debt: float) -> None:
    """Where the paper's factor reaches zero or turns negative, a fifth of the weight remains."""
    assert paper_weight(500, debt=debt) == pytest.approx(0.2 * paper_weight(500))


@given(st.sampled_from(ServiceClass), st.none() | st.integers(0, 10**7), RATES, DEBTS)
def test_a_weight_is_positive_and_finite(
    service_class: ServiceClass, slo_ms: int | None, burst: float, debt: float
) -> None:
    """Whatever the inputs, so that it can always be divided by."""
    value = paper_weight(slo_ms, service_class=service_class, burst=burst, debt=debt)
    assert 0 < value <= 5 * service_class.class_weight


@given(st.floats(0, 100), st.floats(0, 100), DEBTS, DEBTS)
def test_burst_lowers_and_debt_raises_the_weight(
    burst: float, other_burst: float, debt: float, other_debt: float
) -> None:
    """Both factors are monotone."""
    calm, wild = sorted((burst, other_burst))
    assert paper_weight(500, burst=calm) >= paper_weight(500, burst=wild)
    rich, poor = sorted((debt, other_debt))
    assert paper_weight(500, debt=rich) <= paper_weight(500, debt=poor)


def test_the_mean_slo_is_that_of_bound_entitlements_with_a_target() -> None:
    """The plain mean of 500 and 30,000 is 15,250; pending, degraded and untargeted ones do not count."""
    members = [
        Entitlement("copilot", ELASTIC, 500),
        Entitlement("synth", ELASTIC, 30_000),
        Entitlement("batch", SPOT),
        Entitlement("later", ELASTIC, 7, state=EntitlementState.PENDING),
        Entitlement("lost", ELASTIC, 9, state=EntitlementState.DEGRADED),
    ]
    assert mean_slo_ms(members) == MEAN_SLO_MS
    assert mean_slo_ms(members[2:]) is None


@given(DEBTS, DEBTS, st.integers(0, 100_000), st.integers(0, 100_000))
def test_an_average_over_two_parts_of_a_time_is_the_average_over_the_whole(
    previous: float, sample: float, first_ms: int, second_ms: int
) -> None:
    """So that a late tick, or another tick length, draws the same curve."""
    halfway = ewma(previous, sample, gamma=0.7, elapsed_ms=first_ms)
    parts = ewma(halfway, sample, gamma=0.7, elapsed_ms=second_ms)
    whole = ewma(previous, sample, gamma=0.7, elapsed_ms=first_ms + second_ms)
    assert parts == pytest.approx(whole, abs=1e-9)


def test_an_average_keeps_gamma_of_itself_over_five_seconds() -> None:
    """The paper's step: 0.7 of the old and 0.3 of the new."""
    assert ewma(1.0, 0.0, gamma=0.7, elapsed_ms=5_000) == pytest.approx(0.7)
    assert ewma(0.0, 1.0, gamma=0.7, elapsed_ms=5_000) == pytest.approx(0.3)
    assert ewma(0.4, 1.0, gamma=0.7, elapsed_ms=0) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("demanded", "delivered", "gap"),
    [
        (0, 0, 0.0),  # idle: the paper would say 1
        (100, 100, 0.0),
        (40, 40, 0.0),
        (200, 100, 0.0),  # no claim to more than the baseline
        (100, 25, 0.75),
        (40, 10, 0.3),
        (100, 0, 1.0),
        (150, 150, -0.5),
        (500, 500, -1.0),  # limited
    ],
)
def test_the_service_gap(demanded: float, delivered: float, gap: float) -> None:
    """Against a baseline of 100: what was asked for of it and did not come."""
    value = service_gap(baseline=100, demanded=demanded, delivered=delivered)
    assert value == pytest.approx(gap)


@given(RATES, RATES, RATES)
def test_the_service_gap_is_limited(baseline: float, demanded: float, delivered: float) -> None:
    """Within [-1, 1], and 0 without a baseline."""
    gap = service_gap(baseline=baseline, demanded=demanded, delivered=delivered)
    assert -1 <= gap <= 1
    assert baseline > 0 or gap == 0


@given(DEBTS, DEBTS, st.integers(0, 10**9))
def test_debt_stays_within_its_bounds(debt: float, gap: float, elapsed_ms: int) -> None:
    """An average never leaves the range of what it averages."""
    after = next_debt(debt, gap, gamma=0.7, elapsed_ms=elapsed_ms)
    low, high = sorted((debt, gap))
    assert max(-1, low - 1e-9) <= after <= min(1, high + 1e-9)


@pytest.mark.parametrize(
    ("used", "burst"),
    [
        (Resources(100, 1_000, 4), 0.0),
        (Resources(50, 0, 1), 0.0),
        (Resources(150, 0, 0), 0.5),
        (Resources(150, 3_000, 5), 0.5 + 2.0 + 0.25),
    ],
)
def test_burst_is_summed_over_the_resources_above_baseline(used: Resources, burst: float) -> None:
    """Paper equation 3; use below the baseline of one resource does not pay for another."""
    assert burst_sample(Resources(100, 1_000, 4), used) == pytest.approx(burst)


def test_no_baseline_no_burst() -> None:
    """Spot and preemptible have nothing to be above of; neither has a resource without a baseline."""
    assert burst_sample(Resources.NONE, Resources(9, 9, 9)) == 0.0
    assert burst_sample(Resources(10, 0, 0), Resources(15, 9, 9)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("slo_ms", "burst", "debt", "expected"),
    [
        (None, 0.0, 0.0, (100.0, 1 / 3, 1.0, 1.0)),
        (30_500, 0.0, 0.0, (100.0, 0.2, 1.0, 1.0)),
        (None, 0.6, 0.0, (100.0, 1 / 3, 0.625, 1.0)),
        (None, 0.0, 0.25, (100.0, 1 / 3, 1.0, 2.0)),
        (30_500, 1.0, -1.0, (100.0, 0.2, 0.5, 0.2)),
    ],
)
def test_each_factor_tells_one_thing(
    slo_ms: int | None, burst: float, debt: float, expected: tuple[float, ...]
) -> None:
    """Class, target, burst and debt, each as the formula has it."""
    found = weight_factors(
        ELASTIC,
        slo_target_ms=slo_ms,
        mean_slo_ms=MEAN_SLO_MS,
        burst=burst,
        debt=debt,
        gains=GAINS,
    )
    assert (found.service_class, found.slo, found.burst, found.debt) == pytest.approx(expected)


@given(
    st.sampled_from(ServiceClass),
    st.none() | st.integers(1, 3_600_000),
    st.none() | st.floats(1, 3_600_000),
    st.floats(0, 1_000),
    DEBTS,
)
def test_the_factors_multiply_to_the_weight(
    service_class: ServiceClass, slo_ms: int | None, mean: float | None, burst: float, debt: float
) -> None:
    """Whatever a weight is made of, the explanation of it adds up."""
    found = weight_factors(
        service_class,
        slo_target_ms=slo_ms,
        mean_slo_ms=mean,
        burst=burst,
        debt=debt,
        gains=GAINS,
    )
    product = found.service_class * found.slo * found.burst * found.debt
    whole = paper_weight(slo_ms, service_class=service_class, mean=mean, burst=burst, debt=debt)
    assert product == pytest.approx(whole, rel=1e-9)
