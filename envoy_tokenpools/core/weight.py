"""
The priority of an entitlement, and the two averages that move it: debt and burst.

Sources: paper section 3.3, equations 1 to 3. Where we differ, the docstring says so.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from envoy_tokenpools.core.pool import Entitlement, EntitlementState, Gains, ServiceClass
from envoy_tokenpools.core.resources import Resources

DEBT_FACTOR_FLOOR = 0.2
"""Unclamped, the paper's debt factor is zero at debt -0.25 and negative below."""

EWMA_PERIOD_MS = 5_000
"""The time over which an average keeps the share gamma of its value."""


@dataclass(frozen=True, slots=True)
class Factors:
    """
    What a weight is the product of.

    Attributes:
        service_class: the class's own weight.
        slo: at most 1; the looser the target, the less.
        burst: at most 1; the more above the baseline, the less.
        debt: 1 without debt, above it for who is owed, below it for who has credit.
    """

    service_class: float
    slo: float
    burst: float
    debt: float


def weight(
    service_class: ServiceClass,
    *,
    slo_target_ms: int | None,
    mean_slo_ms: float | None,
    burst: float,
    debt: float,
    gains: Gains,
) -> float:
    """
    The weight of an entitlement (paper equation 1), always positive.

        class_weight / (1 + slo_gain * slo / mean_slo) / (1 + burst_gain * burst)
            * max(0.2, 1 + debt_gain * debt)

    The floor is ours. An entitlement without a target, or a pool without any, stands at the mean.
    """
    slo_ratio = 1.0 if slo_target_ms is None or not mean_slo_ms else slo_target_ms / mean_slo_ms
    debt_factor = max(DEBT_FACTOR_FLOOR, 1.0 + gains.debt * debt)
    return (
        service_class.class_weight
        / (1.0 + gains.slo * slo_ratio)
        / (1.0 + gains.burst * burst)
        * debt_factor
    )


def weight_factors(
    service_class: ServiceClass,
    *,
    slo_target_ms: int | None,
    mean_slo_ms: float | None,
    burst: float,
    debt: float,
    gains: Gains,
) -> Factors:
    """The factors of `weight`: by how much it changes as one part after the other is taken into account."""

    def partial(burst: float, debt: float) -> float:
        return weight(
            service_class,
            slo_target_ms=slo_target_ms,
            mean_slo_ms=mean_slo_ms,
            burst=burst,
            debt=debt,
            gains=gains,
        )

    by_class = service_class.class_weight
    by_slo, by_burst, whole = partial(0.0, 0.0), partial(burst, 0.0), partial(burst, debt)
    return Factors(by_class, by_slo / by_class, by_burst / by_slo, whole / by_burst)


def mean_slo_ms(entitlements: Iterable[Entitlement]) -> float | None:
    """The plain mean of the SLO targets of bound entitlements (paper section 5.3); None without any."""
    targets = [
        entitlement.slo_target_ms
        for entitlement in entitlements
        if entitlement.state is EntitlementState.BOUND and entitlement.slo_target_ms is not None
    ]
    return sum(targets) / len(targets) if targets else None


def ewma(previous: float, sample: float, *, gamma: float, elapsed_ms: int) -> float:
    """
    One step of an exponentially weighted average (paper equation 2) over real time.

    `gamma` is what remains of `previous` after `EWMA_PERIOD_MS`, so a late tick or another tick length draws the
    same curve.
    """
    kept = float(gamma ** (elapsed_ms / EWMA_PERIOD_MS))
    return kept * previous + (1.0 - kept) * sample


def service_gap(*, baseline: float, demanded: float, delivered: float) -> float:
    """
    How far a tenant got less than it asked for, up to its baseline; within [-1, 1].

        (min(baseline, demanded) - delivered) / baseline        in tokens per second

    The paper (equation 2's g) compares with the baseline alone, so that a sleeping tenant would grow rich; here an idle
    tenant's gap is 0. Negative means that it received more than its baseline.
    """
    if baseline <= 0:
        return 0.0
    return max(-1.0, min(1.0, (min(baseline, demanded) - delivered) / baseline))


def next_debt(debt: float, gap: float, *, gamma: float, elapsed_ms: int) -> float:
    """The debt after a tick with `gap` (paper equation 2), within [-1, 1]. Elastic entitlements only."""
    return max(-1.0, min(1.0, ewma(debt, gap, gamma=gamma, elapsed_ms=elapsed_ms)))


def burst_sample(baseline: Resources, used: Resources) -> float:
    """
    How far use is above the baseline, summed over the three resources (paper equation 3).

    A resource without a baseline adds nothing.
    """
    return (
        _excess(used.tokens_per_second, baseline.tokens_per_second)
        + _excess(used.kv_bytes, baseline.kv_bytes)
        + _excess(used.concurrency, baseline.concurrency)
    )


def _excess(used: int, base: int) -> float:
    return max(0.0, used / base - 1.0) if base else 0.0
