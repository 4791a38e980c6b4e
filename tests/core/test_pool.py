"""What a pool's declarations imply: class rules, ceilings, capacities in tokens."""

import pytest

from envoy_tokenpools.core.pool import Entitlement, Limits, ServiceClass
from envoy_tokenpools.core.resources import Resources
from tests.support.pools import entitlement, pool

DEDICATED, GUARANTEED, ELASTIC, SPOT, PREEMPTIBLE = ServiceClass

BASELINE = Resources(tokens_per_second=90, kv_bytes=2_000, concurrency=6)


def test_the_class_weights_are_the_paper_s() -> None:
    """Table 1: 1000, 1000, 100, 1 and 0.1."""
    assert [one.class_weight for one in ServiceClass] == [1000, 1000, 100, 1, 0.1]


def test_the_classes_differ_as_the_table_says() -> None:
    """Reserved: dedicated and guaranteed. No baseline: spot, preemptible. No burst: guaranteed."""
    assert [one for one in ServiceClass if one.is_reserved] == [DEDICATED, GUARANTEED]
    assert [one for one in ServiceClass if not one.has_baseline] == [SPOT, PREEMPTIBLE]
    assert [one for one in ServiceClass if not one.may_burst] == [GUARANTEED]


@pytest.mark.parametrize("service_class", [DEDICATED, ELASTIC, SPOT, PREEMPTIBLE])
def test_a_class_that_may_burst_is_held_by_its_limits_only(service_class: ServiceClass) -> None:
    """A baseline is no ceiling for them."""
    assert entitlement("a", service_class, BASELINE).ceilings == Limits()
    limits = Limits(tokens_per_second=5, kv_bytes=6, concurrency=7)
    assert entitlement("a", service_class, BASELINE, limits=limits).ceilings == limits


@pytest.mark.parametrize(
    ("limits", "ceilings"),
    [
        (Limits(), Limits(90, 2_000, 6)),
        (Limits(tokens_per_second=50, kv_bytes=None, concurrency=9), Limits(50, 2_000, 6)),
        (Limits(tokens_per_second=None, kv_bytes=1, concurrency=0), Limits(90, 1, 0)),
    ],
)
def test_a_guaranteed_baseline_is_a_ceiling_by_itself(limits: Limits, ceilings: Limits) -> None:
    """The lower of limit and baseline holds, resource by resource."""
    assert entitlement("a", GUARANTEED, BASELINE, limits=limits).ceilings == ceilings


@pytest.mark.parametrize(
    ("service_class", "lend", "lends"),
    [
        (DEDICATED, True, False),
        (DEDICATED, False, False),
        (GUARANTEED, True, True),
        (GUARANTEED, False, False),
        (ELASTIC, True, True),
    ],
)
def test_a_dedicated_baseline_is_never_lent(
    service_class: ServiceClass, *, lend: bool, lends: bool
) -> None:
    """Whatever `lend` says; a guaranteed one follows it."""
    assert entitlement("a", service_class, BASELINE, lend=lend).lends is lends


def test_an_entitlement_is_bound_and_lends_unless_told_otherwise() -> None:
    """The defaults of the design."""
    plain = Entitlement("a", GUARANTEED)
    assert plain.lends
    assert plain.state.value == "Bound"
    assert plain.baseline == Resources.NONE


def test_capacities_in_tokens_are_whole() -> None:
    """KV bytes hold whole tokens; the token bucket is a window deep."""
    one = pool(Resources(tokens_per_second=240, kv_bytes=10_999, concurrency=16))
    assert one.kv_capacity_tokens == 10
    assert one.window_tokens == 2_400
