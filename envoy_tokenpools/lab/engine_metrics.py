"""
The simulated engine's /metrics, under vLLM's names, types and labels.
"""

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from envoy_tokenpools.lab.engine import Engine

CONTENT_TYPE = CONTENT_TYPE_LATEST

BLOCK_TOKENS = 16
"""Tokens of one KV cache block, as vLLM's default on a GPU."""

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_FINISHED_REASONS = ("stop", "length", "abort", "error")


class EngineMetrics:
    """
    Counters of one engine, on a registry of their own.

    Attributes:
        prompt_tokens: prompts of the sequences that were processed.
        generation_tokens: tokens that came out.
        first_token_seconds: from the arrival of a sequence to its first token.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        """
        Register the metrics.

        Args:
            engine: its gauges are read at each scrape.
            model: value of the label `model_name`.
        """
        self._registry = CollectorRegistry()
        self._labels = {"engine": "0", "model_name": model}
        self._read_at_scrape(engine)
        self.prompt_tokens = self._counter("prompt_tokens", "Number of prefill tokens processed.")
        self.generation_tokens = self._counter(
            "generation_tokens", "Number of generation tokens processed."
        )
        self._counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self._success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        for reason in _FINISHED_REASONS:
            self._success.labels(**self._labels, finished_reason=reason)
        self.first_token_seconds = Histogram(
            "vllm:time_to_first_token_seconds",
            "Histogram of time to first token in seconds.",
            [*self._labels],
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        ).labels(**self._labels)

    def ended(self, reason: str) -> None:
        """Count a sequence's end: stop, length or abort."""
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def exposition(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self._registry)

    def _read_at_scrape(self, engine: Engine) -> None:
        running = self._gauge("num_requests_running", "Number of requests in execution batches.")
        running.set_function(lambda: engine.running)
        waiting = self._gauge("num_requests_waiting", "Number of requests waiting.")
        waiting.set_function(lambda: engine.waiting)
        kv_usage = self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        kv_usage.set_function(lambda: engine.kv_tokens_in_use / engine.shape.kv_tokens)
        shape = {
            "block_size": str(BLOCK_TOKENS),
            "num_gpu_blocks": str(engine.shape.kv_tokens // BLOCK_TOKENS),
        }
        Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            [*shape, "engine"],
            registry=self._registry,
        ).labels(**shape, engine="0").set(1)

    def _gauge(self, name: str, documentation: str) -> Gauge:
        gauge = Gauge(f"vllm:{name}", documentation, [*self._labels], registry=self._registry)
        return gauge.labels(**self._labels)

    def _counter(self, name: str, documentation: str) -> Counter:
        counter = Counter(f"vllm:{name}", documentation, [*self._labels], registry=self._registry)
        return counter.labels(**self._labels)
