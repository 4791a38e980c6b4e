"""
The JSON document of `/state`. Field names are the interface: `top`, the page and operators' scripts read them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.observer import EntitlementReport, PoolReport

Document = Mapping[str, object]


def state_document(version: str, reports: Sequence[PoolReport]) -> Document:
    """All pools with their entitlements; integers in tokens, bytes and sequences. Holds no secrets."""
    return {"version": version, "pools": [_pool(report) for report in reports]}


def read_reports(body: bytes) -> list[PoolReport]:
    """
    The reports that the document in `body`, as JSON, was made of.

    Raises:
        msgspec.MsgspecError: it is no such document.
    """
    document = msgspec.json.decode(body, type=_Pools)
    return [msgspec.convert(_fields(pool), PoolReport) for pool in document.pools]


class _Pools(msgspec.Struct):
    pools: list[dict[str, Any]]


def _fields(pool: Mapping[str, Any]) -> Mapping[str, object]:
    in_use = pool.get("in_use", {})
    return {
        **pool,
        **in_use,
        "reserved_tokens": in_use.get("tokens_reserved"),
        "reserved_kv_bytes": in_use.get("kv_bytes"),
    }


def _pool(report: PoolReport) -> Document:
    return {
        "name": report.name,
        "models": report.models,
        "mode": report.mode.value,
        "degraded": report.degraded,
        "capacity": _resources(report.capacity),
        "usable": _resources(report.usable),
        "in_use": {
            "in_flight": report.in_flight,
            "concurrency": report.concurrency,
            "tokens_reserved": report.reserved_tokens,
            "kv_bytes": report.reserved_kv_bytes,
        },
        "waiting": report.waiting,
        "oldest_wait_ms": report.oldest_wait_ms,
        "prompt_ratios": dict(report.prompt_ratios),
        "entitlements": [_entitlement(entitlement) for entitlement in report.entitlements],
    }


def _entitlement(report: EntitlementReport) -> Document:
    return {
        "name": report.name,
        "service_class": report.service_class.value,
        "state": report.state.value,
        "in_flight": report.in_flight,
        "concurrency": report.concurrency,
        "reserved_tokens": report.reserved_tokens,
        "reserved_kv_bytes": report.reserved_kv_bytes,
        "waiting": report.waiting,
        "baseline": _resources(report.baseline),
        "allocation": _resources(report.allocation),
        "weight": report.weight,
        "debt": report.debt,
        "burst": report.burst,
    }


def _resources(amount: Resources) -> Document:
    return {
        "tokens_per_second": amount.tokens_per_second,
        "kv_bytes": amount.kv_bytes,
        "concurrency": amount.concurrency,
    }
