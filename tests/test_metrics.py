"""What Prometheus sees: names, types, labels and values."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.core.admission import Reason
from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.metrics import FAMILIES, PrometheusObserver
from envoy_tokenpools.observer import (
    Decided,
    Ending,
    EntitlementReport,
    FirstToken,
    Outcome,
    PoolReport,
    Settled,
    Waited,
    WaitEnd,
)
from envoy_tokenpools.openai.usage import UsageSource
from tests.support.reports import QWEN, SEARCH
from tests.support.scrapes import observed, parse_openmetrics, samples, value

TABLE = {
    "tokenpools_requests": (
        "counter",
        {"pool", "entitlement", "service_class", "outcome", "reason"},
    ),
    "tokenpools_completions": ("counter", {"pool", "entitlement", "ending"}),
    "tokenpools_tokens": ("counter", {"pool", "entitlement", "kind", "source"}),
    "tokenpools_store_errors": ("counter", {"kind"}),
    "tokenpools_config_reloads": ("counter", {"result"}),
    "tokenpools_decision_seconds": ("histogram", {"pool"}),
    "tokenpools_wait_seconds": ("histogram", {"pool", "service_class", "result"}),
    "tokenpools_estimate_error_ratio": ("histogram", {"pool"}),
    "tokenpools_time_to_first_token_seconds": ("histogram", {"pool", "service_class"}),
    "tokenpools_capacity": ("gauge", {"pool", "resource"}),
    "tokenpools_degraded": ("gauge", {"pool"}),
    "tokenpools_in_flight": ("gauge", {"pool", "entitlement"}),
    "tokenpools_reserved_tokens": ("gauge", {"pool", "entitlement"}),
    "tokenpools_reserved_kv_bytes": ("gauge", {"pool", "entitlement"}),
    "tokenpools_waiting": ("gauge", {"pool", "entitlement"}),
    "tokenpools_allocation_tokens_per_second": ("gauge", {"pool", "entitlement"}),
    "tokenpools_weight": ("gauge", {"pool", "entitlement"}),
    "tokenpools_debt": ("gauge", {"pool", "entitlement"}),
    "tokenpools_burst": ("gauge", {"pool", "entitlement"}),
    "tokenpools_build": ("info", {"version"}),
}
"""The table of the specification, under the names that OpenMetrics gives to families."""

ADMITTED = Decided(
    Outcome.ADMITTED,
    pool="qwen",
    entitlement="search",
    service_class=ServiceClass.GUARANTEED,
    estimated_prompt_tokens=100,
    reserved_tokens=180,
    decision_us=400,
)
SHED = Decided(
    Outcome.SHED,
    reason=Reason.POOL_CONTENDED.value,
    pool="qwen",
    entitlement="batch",
    service_class=ServiceClass.SPOT,
    estimated_prompt_tokens=50,
    decision_us=300,
)
SETTLED = Settled(
    pool="qwen",
    entitlement="search",
    service_class=ServiceClass.GUARANTEED,
    ending=Ending.COMPLETED,
    prompt_tokens=110,
    prompt_source=UsageSource.REPORTED,
    completion_tokens=60,
    completion_source=UsageSource.COUNTED,
    estimated_prompt_tokens=100,
    held_ms=900,
)


def pool(
    *entitlements: EntitlementReport, name: str = "qwen", degraded: bool = False
) -> PoolReport:
    """A pool of 240 tokens per second, 16,000 bytes and 16 sequences."""
    return replace(QWEN, name=name, degraded=degraded, entitlements=entitlements)


def test_names_types_and_labels_are_those_of_the_table() -> None:
    """After one event of each kind, families, types and label sets are exactly the table's."""
    metrics = observed(
        ADMITTED,
        SETTLED,
        FirstToken("qwen", ServiceClass.GUARANTEED, 120),
        Waited("qwen", ServiceClass.ELASTIC, WaitEnd.SHED, 2_000),
    )
    metrics.store_failed("reserve")
    body, _ = metrics.render([pool(SEARCH)], "application/openmetrics-text")
    found = {
        family.name: (
            family.type,
            {label for sample in family.samples for label in sample.labels} - {"le"},
        )
        for family in parse_openmetrics(body.decode())
        if family.name.startswith("tokenpools_")
    }
    assert found == TABLE


def test_the_published_list_of_families_is_complete_and_each_says_when_to_look() -> None:
    """`FAMILIES` has the table's names and labels, and each help text says when to look at it."""
    listed = {family.name.removesuffix("_total"): set(family.labels) for family in FAMILIES}
    assert listed == {
        name: labels for name, (_, labels) in TABLE.items() if name != "tokenpools_build"
    }
    assert len(FAMILIES) == len(listed)
    assert [family.name for family in FAMILIES if "Look" not in family.documentation] == []


def test_an_admitted_request_counts_with_its_tokens_and_decision_time() -> None:
    """Outcome, both token kinds and the time are there; no reason is no label value."""
    found = samples(observed(ADMITTED, ADMITTED))
    who = {"pool": "qwen", "entitlement": "search"}
    outcome = {"service_class": "guaranteed", "outcome": "admitted"}
    assert value(found, "tokenpools_requests_total", **who, **outcome) == 2
    assert value(found, "tokenpools_tokens_total", **who, kind="estimated_prompt") == 200
    assert value(found, "tokenpools_tokens_total", **who, kind="reserved") == 360
    assert value(found, "tokenpools_decision_seconds_sum", pool="qwen") == pytest.approx(0.0008)
    assert value(found, "tokenpools_decision_seconds_bucket", pool="qwen", le="0.0005") == 2
    assert value(found, "tokenpools_decision_seconds_bucket", pool="qwen", le="0.00025") == 0


def test_a_shed_request_counts_its_reason_and_its_demand_but_reserves_nothing() -> None:
    """The reason is the label; the prompt counts as demand; no reserved series comes up."""
    found = samples(observed(SHED))
    who = {"pool": "qwen", "entitlement": "batch"}
    outcome = {"service_class": "spot", "outcome": "shed", "reason": "pool_contended"}
    assert value(found, "tokenpools_requests_total", **who, **outcome) == 1
    assert value(found, "tokenpools_tokens_total", **who, kind="estimated_prompt") == 50
    assert value(found, "tokenpools_tokens_total", **who, kind="reserved") is None


def test_shadow_mode_shows_as_admitted_with_a_reason() -> None:
    """An admitted request that enforcement would have shed has a series of its own."""
    shadowed = Decided(Outcome.ADMITTED, "low_priority", "qwen", "batch", ServiceClass.SPOT)
    found = samples(observed(shadowed))
    labels = {
        "pool": "qwen",
        "entitlement": "batch",
        "service_class": "spot",
        "outcome": "admitted",
        "reason": "low_priority",
    }
    assert value(found, "tokenpools_requests_total", **labels) == 1


def test_a_request_without_pool_or_owner_has_empty_labels_and_no_token_series() -> None:
    """An unknown key is one series, whatever was sent."""
    found = samples(observed(Decided(Outcome.REJECTED, "invalid_api_key", decision_us=20)))
    outcome = {"outcome": "rejected", "reason": "invalid_api_key"}
    assert value(found, "tokenpools_requests_total", **outcome) == 1
    assert [name for name, _ in found if name == "tokenpools_tokens_total"] == []


def test_an_evicted_request_adds_no_second_decision_or_demand() -> None:
    """It was decided on and estimated once, when it was admitted."""
    evicted = Decided(
        Outcome.EVICTED, "evicted", "qwen", "search", ServiceClass.GUARANTEED, 100, 180
    )
    found = samples(observed(ADMITTED, evicted, replace(SETTLED, ending=Ending.EVICTED)))
    who = {"pool": "qwen", "entitlement": "search"}
    outcome = {"outcome": "evicted", "reason": "evicted", "service_class": "guaranteed"}
    assert value(found, "tokenpools_requests_total", **who, **outcome) == 1
    assert value(found, "tokenpools_completions_total", **who, ending="evicted") == 1
    assert value(found, "tokenpools_decision_seconds_count", pool="qwen") == 1
    assert value(found, "tokenpools_tokens_total", **who, kind="estimated_prompt") == 100
    assert value(found, "tokenpools_tokens_total", **who, kind="reserved") == 180


def test_a_settlement_counts_the_ending_and_tokens_by_source() -> None:
    """Prompt and completion each carry where their number comes from."""
    found = samples(observed(SETTLED))
    who = {"pool": "qwen", "entitlement": "search"}
    prompt = {"kind": "prompt", "source": "reported"}
    completion = {"kind": "completion", "source": "counted"}
    assert value(found, "tokenpools_completions_total", **who, ending="completed") == 1
    assert value(found, "tokenpools_tokens_total", **who, **prompt) == 110
    assert value(found, "tokenpools_tokens_total", **who, **completion) == 60


@pytest.mark.parametrize(
    ("source", "estimated", "expected"),
    [
        (UsageSource.REPORTED, 100, 1.1),
        (UsageSource.REPORTED, 0, None),
        (UsageSource.COUNTED, 100, None),
        (UsageSource.ESTIMATED, 100, None),
    ],
)
def test_the_estimation_error_is_taken_only_where_the_backend_reported(
    source: UsageSource, estimated: int, expected: float | None
) -> None:
    """Reported over estimated prompt; nothing to compare is no observation."""
    event = replace(SETTLED, prompt_source=source, estimated_prompt_tokens=estimated)
    found = samples(observed(event))
    assert value(found, "tokenpools_estimate_error_ratio_sum", pool="qwen") == (
        expected if expected is None else pytest.approx(expected)
    )


def test_a_wait_counts_by_how_it_ended() -> None:
    """In seconds, per class; one that was not worth it is a series of its own."""
    waits = [
        Waited("qwen", ServiceClass.ELASTIC, WaitEnd.ADMITTED, 40),
        Waited("qwen", ServiceClass.ELASTIC, WaitEnd.ADMITTED, 260),
        Waited("qwen", ServiceClass.ELASTIC, WaitEnd.SHED, 2_000),
        Waited("qwen", ServiceClass.GUARANTEED, WaitEnd.GONE, 700_000),
    ]
    found = samples(observed(*waits))
    name, elastic = "tokenpools_wait_seconds", {"pool": "qwen", "service_class": "elastic"}
    got = {**elastic, "result": "admitted"}
    assert value(found, f"{name}_sum", **got) == pytest.approx(0.3)
    assert value(found, f"{name}_bucket", **got, le="0.05") == 1
    assert value(found, f"{name}_bucket", **got, le="0.5") == 2
    assert value(found, f"{name}_count", **elastic, result="shed") == 1
    gone = {"pool": "qwen", "service_class": "guaranteed", "result": "gone"}
    assert value(found, f"{name}_bucket", **gone, le="300.0") == 0
    assert value(found, f"{name}_bucket", **gone, le="+Inf") == 1


def test_the_first_token_is_measured_per_class() -> None:
    """Milliseconds come out as seconds, in the class's own histogram."""
    found = samples(
        observed(
            FirstToken("qwen", ServiceClass.GUARANTEED, 150),
            FirstToken("qwen", ServiceClass.SPOT, 9_000),
        )
    )
    name = "tokenpools_time_to_first_token_seconds"
    guaranteed = {"pool": "qwen", "service_class": "guaranteed"}
    assert value(found, f"{name}_sum", **guaranteed) == pytest.approx(0.15)
    assert value(found, f"{name}_bucket", **guaranteed, le="0.25") == 1
    assert value(found, f"{name}_sum", pool="qwen", service_class="spot") == pytest.approx(9)


def test_reloads_and_store_errors_count_and_reloads_are_there_from_the_start() -> None:
    """An alert on the first failed reload needs its series to exist before."""
    metrics = PrometheusObserver()
    before = samples(metrics)
    assert value(before, "tokenpools_config_reloads_total", result="success") == 0
    assert value(before, "tokenpools_config_reloads_total", result="failure") == 0
    metrics.config_reloaded(succeeded=True)
    metrics.config_reloaded(succeeded=False)
    metrics.config_reloaded(succeeded=False)
    metrics.store_failed("settle")
    after = samples(metrics)
    assert value(after, "tokenpools_config_reloads_total", result="success") == 1
    assert value(after, "tokenpools_config_reloads_total", result="failure") == 2
    assert value(after, "tokenpools_store_errors_total", kind="settle") == 1


def test_gauges_are_what_the_report_says() -> None:
    """Every gauge of a pool and of an entitlement has the report's number."""
    found = samples(PrometheusObserver(), [pool(SEARCH, degraded=True)])
    expected = {
        "in_flight": 2,
        "reserved_tokens": 360,
        "reserved_kv_bytes": 1_500,
        "waiting": 1,
        "allocation_tokens_per_second": 95,
        "weight": 333.25,
        "debt": -0.25,
        "burst": 0.5,
    }
    assert {
        name: value(found, f"tokenpools_{name}", pool="qwen", entitlement="search")
        for name in expected
    } == expected
    assert value(found, "tokenpools_degraded", pool="qwen") == 1
    assert {
        resource: value(found, "tokenpools_capacity", pool="qwen", resource=resource)
        for resource in ("tokens_per_second", "kv_bytes", "concurrency")
    } == {"tokens_per_second": 240, "kv_bytes": 16_000, "concurrency": 16}


def test_an_entitlement_or_pool_that_is_gone_leaves_no_gauge() -> None:
    """Gauges are of the reports of this scrape alone."""
    metrics = PrometheusObserver()
    first = samples(metrics, [pool(SEARCH), pool(SEARCH, name="llama")])
    assert value(first, "tokenpools_weight", pool="llama", entitlement="search") == 333.25
    second = samples(metrics, [pool()])
    assert value(second, "tokenpools_degraded", pool="qwen") == 0
    assert [labels for name, labels in second if name == "tokenpools_weight"] == []
    assert [labels for _, labels in second if ("pool", "llama") in labels] == []


NAMES = st.sampled_from(["a", "b"])
COUNTS = st.integers(0, 1_000_000)
DECISIONS = st.builds(
    Decided,
    outcome=st.sampled_from([outcome for outcome in Outcome if outcome is not Outcome.EVICTED]),
    reason=st.sampled_from(["", *(reason.value for reason in Reason)]),
    pool=NAMES,
    entitlement=NAMES,
    service_class=st.sampled_from([None, *ServiceClass]),
    estimated_prompt_tokens=COUNTS,
    reserved_tokens=COUNTS,
    decision_us=COUNTS,
)
SETTLEMENTS = st.builds(
    Settled,
    pool=NAMES,
    entitlement=NAMES,
    service_class=st.sampled_from(ServiceClass),
    ending=st.sampled_from(Ending),
    prompt_tokens=COUNTS,
    prompt_source=st.sampled_from(UsageSource),
    completion_tokens=COUNTS,
    completion_source=st.sampled_from(UsageSource),
    estimated_prompt_tokens=COUNTS,
    held_ms=COUNTS,
)


@given(st.lists(DECISIONS, max_size=15), st.lists(SETTLEMENTS, max_size=15))
def test_no_event_is_lost_or_counted_twice(
    decisions: list[Decided], settlements: list[Settled]
) -> None:
    """Summed over all labels, the counters are the sums over the events."""
    totals: Counter[str] = Counter()
    for (name, labels), count in samples(observed(*decisions, *settlements)).items():
        kind = dict(labels).get("kind", "") if name == "tokenpools_tokens_total" else ""
        totals[f"{name}{kind and ':'}{kind}"] += int(count)
    tokens = "tokenpools_tokens_total"
    assert totals["tokenpools_requests_total"] == len(decisions)
    assert totals["tokenpools_decision_seconds_count"] == len(decisions)
    assert totals["tokenpools_completions_total"] == len(settlements)
    estimated = sum(event.estimated_prompt_tokens for event in decisions)
    assert totals[f"{tokens}:estimated_prompt"] == estimated
    assert totals[f"{tokens}:reserved"] == sum(event.reserved_tokens for event in decisions)
    assert totals[f"{tokens}:prompt"] == sum(event.prompt_tokens for event in settlements)
    assert totals[f"{tokens}:completion"] == sum(event.completion_tokens for event in settlements)
