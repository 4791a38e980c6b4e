"""The words of an admission: closed sets that metrics, headers and the README repeat."""

from envoy_tokenpools.core.admission import Reason, Resource


def test_the_reasons_are_a_small_closed_set() -> None:
    """They are metric labels: a new one is a decision, not an accident."""
    assert {reason.value for reason in Reason} == {
        "concurrency_limit",
        "kv_cache_limit",
        "token_rate_limit",
        "pool_contended",
        "low_priority",
    }


def test_the_resources_are_three() -> None:
    """Of a pool there is nothing else to be short of."""
    assert {resource.value for resource in Resource} == {"tokens", "kv_cache", "concurrency"}
