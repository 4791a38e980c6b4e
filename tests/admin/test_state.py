"""The document of /state, field by field: it is an interface."""

from envoy_tokenpools.admin.state import state_document
from tests.support.reports import QWEN


def test_the_document_has_every_field_of_the_report_under_its_name() -> None:
    """Pools with their resources and entitlements; enums by their values."""
    assert state_document("1.2.3", [QWEN]) == {
        "version": "1.2.3",
        "pools": [
            {
                "name": "qwen",
                "models": ("Qwen/Qwen3-8B", "qwen3-8b"),
                "mode": "enforce",
                "degraded": True,
                "capacity": {"tokens_per_second": 240, "kv_bytes": 16_000, "concurrency": 16},
                "usable": {"tokens_per_second": 200, "kv_bytes": 14_000, "concurrency": 14},
                "in_use": {
                    "in_flight": 4,
                    "concurrency": 5,
                    "tokens_reserved": 700,
                    "kv_bytes": 3_100,
                },
                "waiting": 1,
                "oldest_wait_ms": 1_700,
                "prompt_ratios": {"Qwen/Qwen3-8B": 1.08},
                "entitlements": [
                    {
                        "name": "search",
                        "service_class": "guaranteed",
                        "state": "Bound",
                        "in_flight": 2,
                        "concurrency": 3,
                        "reserved_tokens": 360,
                        "reserved_kv_bytes": 1_500,
                        "waiting": 1,
                        "baseline": {"tokens_per_second": 90, "kv_bytes": 2_000, "concurrency": 6},
                        "allocation": {
                            "tokens_per_second": 95,
                            "kv_bytes": 2_500,
                            "concurrency": 7,
                        },
                        "weight": 333.25,
                        "debt": -0.25,
                        "burst": 0.5,
                    }
                ],
            }
        ],
    }


def test_no_pools_is_an_empty_list() -> None:
    """A reader need not tell absent from empty."""
    assert state_document("1.2.3", []) == {"version": "1.2.3", "pools": []}
