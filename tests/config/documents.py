"""Documents for the tests of the configuration, built from plain values."""

import copy
from collections.abc import Mapping

import pytest
import yaml

from envoy_tokenpools.config import Config, load_config
from envoy_tokenpools.errors import ConfigError

SHA = "0123456789abcdef" * 4

ENTITLEMENT: dict[str, object] = {
    "name": "gold",
    "class": "guaranteed",
    "baseline": {"tokens_per_second": 100, "kv_cache": "1GiB", "concurrency": 4},
    "keys": [{"sha256": SHA}],
}
POOL: dict[str, object] = {
    "name": "small",
    "models": ["small"],
    "capacity": {"tokens_per_second": 100, "kv_cache": "1GiB", "concurrency": 4},
    "kv_bytes_per_token": "1KiB",
    "entitlements": [ENTITLEMENT],
}
SPOT = {"name": "spare", "class": "spot", "keys": [{"sha256": "f" * 64}]}


def load(root: Mapping[str, object], env: Mapping[str, str] | None = None) -> Config:
    """The configuration that a document of plain values makes."""
    return load_config(yaml.safe_dump(dict(root), sort_keys=False), env=env or {})


def faults_of(root: Mapping[str, object], env: Mapping[str, str] | None = None) -> list[str]:
    """Every fault of a document, as text."""
    with pytest.raises(ConfigError) as raised:
        load(root, env)
    return [str(fault) for fault in raised.value.faults]


def pools(*changes: Mapping[str, object]) -> dict[str, object]:
    """A document with one copy of `POOL` for each set of changed fields."""
    return {"pools": [copy.deepcopy(POOL) | dict(change) for change in changes]}


def entitlements(*changes: Mapping[str, object]) -> dict[str, object]:
    """A document with one pool and one copy of `ENTITLEMENT` for each set of changed fields."""
    return pools(
        {"entitlements": [copy.deepcopy(ENTITLEMENT) | dict(change) for change in changes]}
    )
