"""
The Prometheus metrics: an `Observer` that counts events, and gauges made of the pools' reports at each scrape.

Rules of this file: every metric is in `FAMILIES`, with what it is and when to look at it; everything is on a registry
of its own; no label value comes from a client. Names of pools and entitlements are the configuration's, all others are
of closed sets, and the few plain strings among these go through `_BoundedWords`.
"""

import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from envoy_tokenpools import __version__
from envoy_tokenpools.core.admission import Reason
from envoy_tokenpools.observer import (
    Decided,
    EntitlementReport,
    FirstToken,
    Outcome,
    PoolReport,
    Settled,
    Waited,
)
from envoy_tokenpools.openai.usage import UsageSource

_OPENMETRICS = "application/openmetrics-text"

OTHER = "other"
"""Label value of all words beyond the bound."""

MAX_WORDS = 32
"""Distinct words of one label beside those known beforehand; some twenty error codes exist."""

_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}")

_DECISION_BUCKETS = (
    *(0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Seconds. A decision takes less than a millisecond; counting a prompt of megabytes takes longer."""

RELOADED = {True: "success", False: "failure"}
"""Label value of a reload, by whether it succeeded."""

_RATIO_BUCKETS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Seconds: OpenTelemetry's buckets for `gen_ai.server.time_to_first_token`, and vLLM's above 10 s."""


_WAIT_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0),
)
"""Seconds, up to what a client still waits for."""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its name as Prometheus knows it, its labels, and its help text."""

    name: str
    labels: tuple[str, ...]
    documentation: str


REQUESTS = Family(
    "tokenpools_requests_total",
    ("pool", "entitlement", "service_class", "outcome", "reason"),
    "Requests by outcome: admitted, shed, rejected, evicted, bypassed. Look first when clients report 429: the reason"
    " says what was short. `admitted` with a reason is shadow mode: enforced, it would have been shed;"
    " or `store_unavailable`: decided by this replica alone."
    " `bypassed` are requests to paths that no pool meters.",
)
COMPLETIONS = Family(
    "tokenpools_completions_total",
    ("pool", "entitlement", "ending"),
    "Admitted requests by how they ended. Look when admitted work does not finish: a rise of `backend_error` is the"
    " backend's, `client_gone` are clients' timeouts, `expired` are leases whose replica died.",
)
TOKENS = Family(
    "tokenpools_tokens_total",
    ("pool", "entitlement", "kind", "source"),
    "Tokens: `estimated_prompt` of every request decided, `reserved` of those admitted, `prompt` and `completion` as"
    " charged. Look for who uses the pool. `reserved` far above prompt and completion: lower the output estimates."
    " Source other than `reported`: the backend sends no usage, so charges are our own count or the estimate.",
)
DECISION_SECONDS = Family(
    "tokenpools_decision_seconds",
    ("pool",),
    "Time that a decision took, counting the prompt's tokens included. Look when latency grows in front of the backend:"
    " a rise is large prompts, a slow store or a busy processor. Waiting for capacity is not part of it.",
)
WAIT_SECONDS = Family(
    "tokenpools_wait_seconds",
    ("pool", "service_class", "result"),
    "Time that requests waited for capacity (max_wait), by how it ended: admitted, shed, gone (the client left)."
    " Look whether waiting is worth it: waits that mostly end shed or gone want more capacity, or a shorter max_wait.",
)
ESTIMATE_ERROR_RATIO = Family(
    "tokenpools_estimate_error_ratio",
    ("pool",),
    "Prompt tokens that the backend reported, divided by our estimate. Look when token limits bind too early or too"
    " late: it should settle near 1; if it does not, set the pool's tokenizer to the model's.",
)
TIME_TO_FIRST_TOKEN_SECONDS = Family(
    "tokenpools_time_to_first_token_seconds",
    ("pool", "service_class"),
    "Time from an admitted request's arrival to its first generated text. Look whether a class keeps its SLO: a rise"
    " while nothing is shed means that the pool's configured capacity is above what the backend can do.",
)
STORE_ERRORS = Family(
    "tokenpools_store_errors_total",
    ("kind",),
    "Failed calls to the state store, by operation. Look at once when it rises: requests are then decided by"
    " on_store_error; check that the store is up, reachable and fast enough.",
)
CONFIG_RELOADS = Family(
    "tokenpools_config_reloads_total",
    ("result",),
    "Reloads of the configuration: success or failure. Look after a change: a failure leaves the old configuration in"
    " force; the log names every fault.",
)
CAPACITY = Family(
    "tokenpools_capacity",
    ("pool", "resource"),
    "Configured capacity of the pool: tokens_per_second, kv_bytes, concurrency. Look to set use against it; a step is a"
    " change of replicas or of the configuration.",
)
DEGRADED = Family(
    "tokenpools_degraded",
    ("pool",),
    "1 while the pool cannot hold all the baselines that it promised, else 0. Look when guaranteed tenants are shed:"
    " add capacity or lower baselines.",
)


def _per_entitlement(name: str, documentation: str) -> Family:
    return Family(f"tokenpools_{name}", ("pool", "entitlement"), documentation)


_ENTITLEMENT_GAUGES: Mapping[Family, Callable[[EntitlementReport], float]] = {
    _per_entitlement(
        "in_flight",
        "Admitted requests that have not ended. Look for who holds the pool now. Above 0 without traffic: leases that"
        " wait for their expiry.",
    ): lambda report: report.in_flight,
    _per_entitlement(
        "reserved_tokens",
        "Tokens reserved by requests in flight. Look when the reason is token_rate_limit: large reservations come from"
        " large max_tokens.",
    ): lambda report: report.reserved_tokens,
    _per_entitlement(
        "reserved_kv_bytes",
        "KV cache bytes reserved by requests in flight. Look when the reason is kv_cache_limit, or when the backend"
        " preempts: then kv_bytes_per_token is set too low.",
    ): lambda report: report.reserved_kv_bytes,
    _per_entitlement(
        "waiting",
        "Requests that wait for capacity instead of being shed (max_wait). Look when first tokens are late: a lasting"
        " queue wants more capacity or a shorter max_wait.",
    ): lambda report: report.waiting,
    _per_entitlement(
        "allocation_tokens_per_second",
        "Rate that the entitlement may use until the next tick. Look when it is shed: below its baseline while it"
        " demands more, the pool is short.",
    ): lambda report: report.allocation.tokens_per_second,
    _per_entitlement(
        "weight",
        "Priority from class, SLO, burst and debt; the higher is served first. Look when the reason is low_priority,"
        " and compare within the pool.",
    ): lambda report: report.weight,
    _per_entitlement(
        "debt",
        "How far an elastic entitlement has been under-served, -1 to 1; negative is credit. Look at fairness: lastingly"
        " near 1, its baseline is more than the pool can give.",
    ): lambda report: report.debt,
    _per_entitlement(
        "burst",
        "How far an entitlement has been above its baseline, summed over the resources; 0 is within it. Look at who"
        " takes the surplus: lastingly high, its baseline is too small.",
    ): lambda report: report.burst,
}

FAMILIES: tuple[Family, ...] = (
    *(REQUESTS, COMPLETIONS, TOKENS, STORE_ERRORS, CONFIG_RELOADS),
    *(DECISION_SECONDS, WAIT_SECONDS, ESTIMATE_ERROR_RATIO, TIME_TO_FIRST_TOKEN_SECONDS),
    *(CAPACITY, DEGRADED, *_ENTITLEMENT_GAUGES),
)
"""All of them, beside `tokenpools_build_info` and the usual metrics of the process and of Python."""


class PrometheusObserver:
    """
    Counts what it is told, and renders it together with the pools' gauges.

    Events come from one thread; `render` may run in another.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = _Children(new_counter(self._registry, REQUESTS))
        self._completions = _Children(new_counter(self._registry, COMPLETIONS))
        self._tokens = _Children(new_counter(self._registry, TOKENS))
        self._store_errors = _Children(new_counter(self._registry, STORE_ERRORS))
        self._reloads = _Children(new_counter(self._registry, CONFIG_RELOADS))
        self._decision_seconds = _Children(
            _histogram(self._registry, DECISION_SECONDS, _DECISION_BUCKETS)
        )
        self._wait_seconds = _Children(_histogram(self._registry, WAIT_SECONDS, _WAIT_BUCKETS))
        self._estimate_error = _Children(
            _histogram(self._registry, ESTIMATE_ERROR_RATIO, _RATIO_BUCKETS)
        )
        self._first_token_seconds = _Children(
            _histogram(self._registry, TIME_TO_FIRST_TOKEN_SECONDS, _FIRST_TOKEN_BUCKETS)
        )
        known = (reason.value for reason in Reason)
        self._reasons = _BoundedWords("", Outcome.EVICTED.value, *known)
        self._operations = _BoundedWords()
        tell_build(self._registry)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        # A failure is an alert: its series must exist before, or the first one is no increase.
        for result in RELOADED.values():
            self._reloads[(result,)].inc(0)

    def decided(self, event: Decided) -> None:
        """Count a request by outcome, with its tokens and the time that the decision took."""
        pool, entitlement = event.pool, event.entitlement
        outcome = event.outcome
        self._requests[
            pool, entitlement, event.service_class, outcome, self._reasons[event.reason]
        ].inc()
        if outcome is Outcome.EVICTED:
            return  # the same request was counted in full when it was admitted
        if pool:  # else there was nothing to decide
            self._decision_seconds[(pool,)].observe(event.decision_us / 1e6)
        if event.estimated_prompt_tokens > 0:
            self._tokens[pool, entitlement, "estimated_prompt", None].inc(
                event.estimated_prompt_tokens
            )
        if event.reserved_tokens > 0:
            self._tokens[pool, entitlement, "reserved", None].inc(event.reserved_tokens)

    def settled(self, event: Settled) -> None:
        """Count an ending, the tokens charged, and how far off the estimate was."""
        pool, entitlement = event.pool, event.entitlement
        prompt_tokens, estimated = event.prompt_tokens, event.estimated_prompt_tokens
        self._completions[pool, entitlement, event.ending].inc()
        if prompt_tokens > 0:
            self._tokens[pool, entitlement, "prompt", event.prompt_source].inc(prompt_tokens)
        if event.completion_tokens > 0:
            self._tokens[pool, entitlement, "completion", event.completion_source].inc(
                event.completion_tokens
            )
        if event.prompt_source is UsageSource.REPORTED and estimated > 0:
            self._estimate_error[(pool,)].observe(prompt_tokens / estimated)

    def first_token(self, event: FirstToken) -> None:
        """Take the time to the first token."""
        series = self._first_token_seconds[event.pool, event.service_class]
        series.observe(event.elapsed_ms / 1e3)

    def waited(self, event: Waited) -> None:
        """Take the time that a request waited."""
        series = self._wait_seconds[event.pool, event.service_class, event.end]
        series.observe(event.waited_ms / 1e3)

    def store_failed(self, operation: str) -> None:
        """Count a failed call to the store."""
        self._store_errors[(self._operations[operation],)].inc()

    def config_reloaded(self, *, succeeded: bool) -> None:
        """Count a reload."""
        self._reloads[(RELOADED[succeeded],)].inc()

    def render(self, reports: Sequence[PoolReport] = (), accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type; see `rendered`."""
        return rendered(self._registry, reports, accept)


class Collecting(Protocol):
    """Whatever gives families of metrics."""

    def collect(self) -> Iterable[Metric]:
        """All families."""
        ...


def rendered(
    counted: Collecting, reports: Sequence[PoolReport], accept: str = ""
) -> tuple[bytes, str]:
    """
    The exposition of what is counted and of the gauges of `reports`, and its content type.

    It is OpenMetrics if the `Accept` header names it, else text. The header as it came is not given to
    prometheus_client, which repeats parts of it in the answer and fails on a version that is no number.
    """
    encode, content_type = choose_encoder(_OPENMETRICS if _OPENMETRICS in accept else "")
    return encode(_Scrape(counted, reports)), content_type


_Label = str | enum.Enum | None
_MetricT = TypeVar("_MetricT", Counter, Histogram)


class _Children(dict[tuple[_Label, ...], _MetricT], Generic[_MetricT]):
    """
    The labelled series of one metric, made when first asked for.

    Asking a metric for its child each time costs more than to count; here it is one lookup. None is the empty label.
    """

    def __init__(self, parent: _MetricT) -> None:
        super().__init__()
        self._parent: _MetricT = parent

    def __missing__(self, key: tuple[_Label, ...]) -> _MetricT:
        texts = (label.value if isinstance(label, enum.Enum) else label or "" for label in key)
        child: _MetricT = self._parent.labels(*texts)
        self[key] = child
        return child


class _BoundedWords(dict[str, str]):
    """
    Maps a word to its label value: itself if known or among the first `MAX_WORDS`, else `OTHER`.

    What is no plain word, such as a model name or a path, is `OTHER` too.
    """

    def __init__(self, *known: str) -> None:
        super().__init__({word: word for word in (*known, OTHER)})
        self._most = len(self) + MAX_WORDS

    def __missing__(self, word: str) -> str:
        if len(self) >= self._most or not _WORD.fullmatch(word):
            return OTHER
        self[word] = word
        return word


class _Scrape:
    """
    What is counted, and the gauges of `reports`: an entitlement that is gone leaves no gauge behind.

    Without the `_created` series, which would double the number of counters; prometheus_client can leave them out only
    for the whole process, which is not ours to decide.
    """

    def __init__(self, counted: Collecting, reports: Sequence[PoolReport]) -> None:
        self._counted = counted
        self._reports = reports

    def collect(self) -> Iterable[Metric]:
        """All families."""
        for metric in self._counted.collect():
            metric.samples = [
                sample for sample in metric.samples if not sample.name.endswith("_created")
            ]
            yield metric
        yield from self._pool_gauges()
        for family, read in _ENTITLEMENT_GAUGES.items():
            gauge = _gauge(family)
            for pool in self._reports:
                for entitlement in pool.entitlements:
                    gauge.add_metric((pool.name, entitlement.name), read(entitlement))
            yield gauge

    def _pool_gauges(self) -> Iterable[Metric]:
        capacity, degraded = _gauge(CAPACITY), _gauge(DEGRADED)
        for pool in self._reports:
            capacity.add_metric((pool.name, "tokens_per_second"), pool.capacity.tokens_per_second)
            capacity.add_metric((pool.name, "kv_bytes"), pool.capacity.kv_bytes)
            capacity.add_metric((pool.name, "concurrency"), pool.capacity.concurrency)
            degraded.add_metric((pool.name,), float(pool.degraded))
        return capacity, degraded


def new_counter(registry: CollectorRegistry, family: Family) -> Counter:
    """The counter of a family."""
    return Counter(family.name, family.documentation, family.labels, registry=registry)


def tell_build(registry: CollectorRegistry) -> None:
    """Give the version away."""
    Info(
        "tokenpools_build", "The version that runs. Look after a roll-out.", registry=registry
    ).info({"version": __version__})


def _histogram(
    registry: CollectorRegistry, family: Family, buckets: tuple[float, ...]
) -> Histogram:
    return Histogram(
        family.name, family.documentation, family.labels, registry=registry, buckets=buckets
    )


def _gauge(family: Family) -> GaugeMetricFamily:
    return GaugeMetricFamily(family.name, family.documentation, labels=family.labels)
