"""Metrics that were told events, and what a scrape of them gives, as values."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import parser
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser

from envoy_tokenpools.metrics import PrometheusObserver
from envoy_tokenpools.observer import Decided, FirstToken, Observer, PoolReport, Settled, Waited

parse_text: Callable[[str], Iterable[Metric]] = parser.text_string_to_metric_families
parse_openmetrics: Callable[[str], Iterable[Metric]] = (
    openmetrics_parser.text_string_to_metric_families
)

Event = Decided | Settled | FirstToken | Waited

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def samples(metrics: PrometheusObserver, reports: Sequence[PoolReport] = ()) -> Samples:
    """All samples that a scrape gives, by name and labels that are not empty."""
    text = metrics.render(reports)[0].decode()
    return {
        (sample.name, frozenset((key, value) for key, value in sample.labels.items() if value)): (
            sample.value
        )
        for family in parse_text(text)
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float | None:
    """One sample; None if it is not there."""
    return found.get((name, frozenset(labels.items())))


def observed(*events: Event) -> PrometheusObserver:
    """Metrics that were told `events`."""
    metrics = PrometheusObserver()
    tell(metrics, events)
    return metrics


def tell(observer: Observer, events: Iterable[Event]) -> None:
    """Hand each event to its method."""
    for event in events:
        match event:
            case Decided():
                observer.decided(event)
            case Settled():
                observer.settled(event)
            case FirstToken():
                observer.first_token(event)
            case Waited():
                observer.waited(event)
