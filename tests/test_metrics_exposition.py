"""The exposition as a whole: it never grows with what clients send, and both formats can be parsed."""

import string
from dataclasses import replace

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools import __version__
from envoy_tokenpools.core.admission import Reason
from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.metrics import MAX_WORDS, PrometheusObserver
from envoy_tokenpools.observer import Decided, Outcome, Waited, WaitEnd
from tests.support.reports import QWEN
from tests.support.scrapes import observed, parse_openmetrics, parse_text, samples, value


def junk(index: int) -> str:
    """What a client might send: a model name, a path, markup, a plain word, something very long."""
    kinds = ("junk-{}", "/v1/x?i={}", 'a"b\\c\n{}', "word_{}", "{}" + "x" * 10_000)
    return kinds[index % len(kinds)].format(index)


def test_a_thousand_junk_words_grow_the_exposition_by_less_than_five_kilobytes() -> None:
    """Reasons and operations beyond the bound are one `other` series, and nothing is lost."""
    metrics = observed(Decided(Outcome.REJECTED, "model_not_found"))
    before = len(metrics.render()[0])
    for index in range(1_000):
        metrics.decided(Decided(Outcome.REJECTED, junk(index)))
        metrics.decided(Decided(Outcome.REJECTED, f"word_{index}"))
    after = len(metrics.render()[0])
    assert after - before < 5_000
    for index in range(1_000, 3_000):
        metrics.decided(Decided(Outcome.REJECTED, junk(index)))
        metrics.decided(Decided(Outcome.REJECTED, f"word_{index}"))
    assert len(metrics.render()[0]) - after < 50  # only digits of the counts

    found = samples(metrics)
    reasons = {
        dict(labels)["reason"]: count
        for (name, labels), count in found.items()
        if name == "tokenpools_requests_total"
    }
    assert len(reasons) <= MAX_WORDS + 1
    assert reasons["model_not_found"] == 1
    assert sum(reasons.values()) == 1 + 3_000 * 2
    assert reasons["other"] > 5_000


def test_junk_never_displaces_a_known_reason() -> None:
    """The reasons of admission and of eviction keep their series even when the bound was reached before."""
    metrics = observed(*(Decided(Outcome.SHED, f"word_{index}") for index in range(1_000)))
    for reason in Reason:
        metrics.decided(Decided(Outcome.SHED, reason.value))
    metrics.decided(Decided(Outcome.EVICTED, "evicted"))
    found = samples(metrics)
    assert value(found, "tokenpools_requests_total", outcome="evicted", reason="evicted") == 1
    for reason in Reason:
        assert value(found, "tokenpools_requests_total", outcome="shed", reason=reason.value) == 1


def test_junk_operations_are_bounded_too() -> None:
    """The kind of a store error is a plain string, so it is bounded as well."""
    metrics = PrometheusObserver()
    for index in range(1_000):
        metrics.store_failed(junk(index))
        metrics.store_failed(f"word_{index}")
    kinds = [labels for name, labels in samples(metrics) if name == "tokenpools_store_errors_total"]
    assert len(kinds) <= MAX_WORDS + 1


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_configured_name_comes_out_of_the_exposition_as_it_went_in(name: str) -> None:
    """Quotes, backslashes and newlines are escaped, in both formats."""
    metrics = observed(Decided(Outcome.ADMITTED, pool=name, entitlement="e"))
    reports = [replace(QWEN, name=name)]
    text = metrics.render(reports)[0].decode()
    openmetrics = metrics.render(reports, "application/openmetrics-text")[0].decode()
    for families in (parse_text(text), parse_openmetrics(openmetrics)):
        pools = {
            sample.labels["pool"]
            for family in families
            for sample in family.samples
            if "pool" in sample.labels
        }
        assert pools == {name}


def test_a_wait_is_a_histogram_that_both_formats_can_be_parsed_from() -> None:
    """Its buckets grow up to all that were counted, in the text as in OpenMetrics."""
    ends = [Waited("qwen", ServiceClass.SPOT, end, 40 * n) for end in WaitEnd for n in range(20)]
    metrics = observed(*ends)
    text = metrics.render()[0].decode()
    openmetrics = metrics.render(accept="application/openmetrics-text")[0].decode()
    for families in (parse_text(text), parse_openmetrics(openmetrics)):
        (family,) = (each for each in families if each.name == "tokenpools_wait_seconds")
        for end in WaitEnd:
            of_end = [each for each in family.samples if each.labels["result"] == end.value]
            buckets = [each.value for each in of_end if each.name.endswith("_bucket")]
            assert buckets == sorted(buckets)
            (count,) = (each.value for each in of_end if each.name.endswith("_count"))
            assert buckets[-1] == count == 20


def test_the_format_follows_the_accept_header() -> None:
    """Prometheus asks for OpenMetrics and gets it with its end mark; a browser gets text."""
    metrics = PrometheusObserver()
    asked = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3"
    body, content_type = metrics.render(accept=asked)
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert body.endswith(b"# EOF\n")
    body, content_type = metrics.render(accept="text/html,*/*;q=0.8")
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert b"# EOF" not in body


@given(
    st.sampled_from(["", "application/openmetrics-text", "text/plain"]),
    st.text(string.printable, max_size=40),
)
def test_no_accept_header_breaks_a_scrape_or_comes_back_in_the_answer(
    media: str, rest: str
) -> None:
    """Whatever follows, the content type is one of two constants."""
    _, content_type = PrometheusObserver().render(accept=f"{media};version={rest}")
    assert content_type in {
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
        "text/plain; version=0.0.4; charset=utf-8",
    }


def test_version_and_process_are_on_the_same_registry() -> None:
    """One scrape tells the version that runs, and memory and processor time of the process."""
    found = samples(PrometheusObserver())
    assert value(found, "tokenpools_build_info", version=__version__) == 1
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "python_info"} <= {
        name for name, _ in found
    }


def test_the_global_registry_stays_untouched_and_observers_do_not_mix() -> None:
    """Two observers in one process count apart, and neither is on the global registry."""
    first = observed(Decided(Outcome.ADMITTED, pool="qwen"))
    second = observed(Decided(Outcome.SHED, pool="qwen"))
    admitted = {"pool": "qwen", "outcome": "admitted"}
    assert value(samples(first), "tokenpools_requests_total", **admitted) == 1
    assert value(samples(second), "tokenpools_requests_total", **admitted) is None
    assert b"tokenpools" not in prometheus_client.generate_latest()


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text"])
def test_there_are_no_created_series(accept: str) -> None:
    """They would double the number of counters."""
    body, _ = observed(Decided(Outcome.ADMITTED, pool="qwen")).render(accept=accept)
    assert b"tokenpools_requests_total{" in body
    assert b"tokenpools_decision_seconds_sum{" in body
    assert b"_created" not in body
