"""Behaviour of a configuration without faults."""

from pathlib import Path

import pytest

from envoy_tokenpools.config import (
    Config,
    EntitlementRef,
    ServerSettings,
    credential_digest,
    load_config,
    read_config,
)
from envoy_tokenpools.core.pool import (
    Entitlement,
    EntitlementState,
    Gains,
    Limits,
    Mode,
    OutputEstimate,
    Pool,
    Reclaim,
    ServiceClass,
)
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.errors import ConfigError
from tests.config.documents import ENTITLEMENT, SHA, SPOT, entitlements, load, pools

EXAMPLE = f"""
state: memory://
pools:
  - name: qwen3-8b
    models: [Qwen/Qwen3-8B, qwen3-8b]
    capacity: {{tokens_per_second: 240, kv_cache: 16GiB, concurrency: 16}}   # of one replica
    replicas: 1
    kv_bytes_per_token: 144KiB
    tokenizer: o200k_base
    default_max_tokens: 256
    mode: enforce
    entitlements:
      - name: search-prod
        class: guaranteed
        slo_target: 200ms
        baseline: {{tokens_per_second: 90, kv_cache: 2GiB, concurrency: 6}}
        keys: [{{sha256: "{SHA}"}}]            # of the bearer token
      - name: batch
        class: spot
        keys: [{{env: BATCH_KEY}}]
"""


def test_the_example_loads() -> None:
    """The documented example becomes exactly these objects."""
    config = load_config(EXAMPLE, env={"BATCH_KEY": "sk-batch"})
    search = Entitlement(
        name="search-prod",
        service_class=ServiceClass.GUARANTEED,
        slo_target_ms=200,
        baseline=Resources(90, 2 * 2**30, 6),
    )
    pool = Pool(
        name="qwen3-8b",
        models=("Qwen/Qwen3-8B", "qwen3-8b"),
        capacity=Resources(240, 16 * 2**30, 16),
        kv_bytes_per_token=144 * 1_024,
        entitlements={
            "search-prod": search,
            "batch": Entitlement(name="batch", service_class=ServiceClass.SPOT),
        },
    )
    assert config == Config(
        state="memory://",
        pools={"qwen3-8b": pool},
        pool_of_model={"Qwen/Qwen3-8B": "qwen3-8b", "qwen3-8b": "qwen3-8b"},
        default_pool=None,
        keys={
            bytes.fromhex(SHA): (EntitlementRef("qwen3-8b", "search-prod"),),
            credential_digest("sk-batch"): (EntitlementRef("qwen3-8b", "batch"),),
        },
    )


def test_defaults_are_those_of_the_core() -> None:
    """A field that is left out has the default of the core object, written down once."""
    root = pools({"entitlements": [SPOT]})
    pool = load(root).pools["small"]
    assert pool == Pool(
        name="small",
        models=("small",),
        capacity=Resources(100, 2**30, 4),
        kv_bytes_per_token=1_024,
        entitlements={"spare": Entitlement(name="spare", service_class=ServiceClass.SPOT)},
    )
    assert load(root).state == "memory://"
    assert load(root).server == ServerSettings()
    assert load(root | {"server": {}}).server == ServerSettings()


def test_every_field_reaches_the_core() -> None:
    """Each optional field changes the attribute it names."""
    root = pools(
        {
            "replicas": 3,
            "kv_bytes_per_token": None,
            "model_shape": {"layers": 36, "kv_heads": 8, "head_dim": 128, "bytes_per_value": 2},
            "tokenizer": "cl100k_base",
            "default_max_tokens": "1k",
            "image_tokens": 0,
            "audio_tokens": 7,
            "output_estimate": "max_tokens",
            "mode": "shadow",
            "window": "20s",
            "tick": "2s",
            "headroom": 0.5,
            "ramp_per_second": 1,
            "max_waiting": 9,
            "gains": {"slo": 1, "burst": 0.5, "debt": 8, "gamma": 0},
            "entitlements": [
                ENTITLEMENT
                | {
                    "limits": {"tokens_per_second": 100, "kv_cache": "2GiB", "concurrency": 5},
                    "lend": False,
                    "max_wait": "3s",
                    "state": "Degraded",
                }
            ],
        }
    )
    root |= {
        "default_pool": "small",
        "server": {"max_body": "1MiB", "lease_ttl": "2m", "drain": 0, "explain_last": 7},
    }
    config = load(root)
    assert config.pools["small"] == Pool(
        name="small",
        models=("small",),
        capacity=Resources(300, 3 * 2**30, 12),
        kv_bytes_per_token=147_456,
        tokenizer="cl100k_base",
        default_max_tokens=1_000,
        image_tokens=0,
        audio_tokens=7,
        output_estimate=OutputEstimate.MAX_TOKENS,
        mode=Mode.SHADOW,
        window_ms=20_000,
        tick_ms=2_000,
        headroom=0.5,
        ramp_per_second=1.0,
        max_waiting=9,
        gains=Gains(slo=1.0, burst=0.5, debt=8.0, gamma=0.0),
        entitlements={
            "gold": Entitlement(
                name="gold",
                service_class=ServiceClass.GUARANTEED,
                baseline=Resources(100, 2**30, 4),
                limits=Limits(100, 2 * 2**30, 5),
                lend=False,
                max_wait_ms=3_000,
                state=EntitlementState.DEGRADED,
            )
        },
    )
    assert config.default_pool == "small"
    assert config.server == ServerSettings(
        max_body_bytes=2**20, lease_ttl_ms=120_000, drain_ms=0, explain_last=7
    )


@pytest.mark.parametrize(
    ("change", "reclaim", "max_wait_ms"),
    [
        ({"class": "guaranteed"}, Reclaim.THROTTLE, 0),
        ({"class": "elastic"}, Reclaim.THROTTLE, 1_000),
        ({"class": "elastic", "slo_target": "500ms"}, Reclaim.THROTTLE, 125),
        ({"class": "elastic", "slo_target": "30s"}, Reclaim.THROTTLE, 1_000),
        ({"class": "elastic", "max_wait": "0s"}, Reclaim.THROTTLE, 0),
        ({"class": "spot", "baseline": None}, Reclaim.THROTTLE, 0),
        ({"class": "spot", "baseline": None, "reclaim": "evict"}, Reclaim.EVICT, 0),
        ({"class": "preemptible", "baseline": None}, Reclaim.EVICT, 0),
        ({"class": "preemptible", "baseline": None, "reclaim": "throttle"}, Reclaim.THROTTLE, 0),
    ],
)
def test_what_a_class_does_unless_told_otherwise(
    change: dict[str, object], reclaim: Reclaim, max_wait_ms: int
) -> None:
    """Preemptible requests are evicted, elastic ones wait for a quarter of their target and at most a second."""
    entitlement = load(entitlements(change)).pools["small"].entitlements["gold"]
    assert (entitlement.reclaim, entitlement.max_wait_ms) == (reclaim, max_wait_ms)


def test_a_key_may_serve_in_several_pools() -> None:
    """One key leads to one entitlement in each pool, in the order of the pools."""
    config = load(pools({}, {"name": "other", "models": ["other"]}))
    assert config.keys == {
        bytes.fromhex(SHA): (EntitlementRef("small", "gold"), EntitlementRef("other", "gold"))
    }


def test_only_bound_entitlements_claim_capacity() -> None:
    """A pending or expired entitlement's baseline takes no part in the sum."""
    waiting = {"name": "late", "state": "Pending", "keys": [{"sha256": "e" * 64}]}
    config = load(entitlements({}, waiting))
    assert config.warnings == ()
    assert config.pools["small"].entitlements["late"].state is EntitlementState.PENDING


def test_warnings() -> None:
    """Elastic overcommitment, plain keys and missing keys are told but allowed."""
    root = entitlements(
        {"keys": [{"plain": "hunter2"}]}, {"name": "soft", "class": "elastic", "keys": []}
    )
    config = load(root)
    assert [str(warning) for warning in config.warnings] == [
        (
            "pools[0].entitlements[0].keys[0].plain: "
            "a key in plain text; use sha256 or env beyond trials"
        ),
        "pools[0].entitlements[1]: has no keys: no request can be identified as its own",
        (
            "pools[0].capacity.tokens_per_second: baselines come to 200, "
            "more than the 100 of all replicas"
        ),
        "pools[0].capacity.kv_cache: baselines come to 2GiB, more than the 1GiB of all replicas",
        "pools[0].capacity.concurrency: baselines come to 8, more than the 4 of all replicas",
    ]
    assert config.keys[credential_digest("hunter2")] == (EntitlementRef("small", "gold"),)


def test_secrets_are_in_no_repr() -> None:
    """Neither keys nor their digests nor the store's URL show in a repr."""
    root = entitlements({"keys": [{"plain": "hunter2"}, {"sha256": SHA}, {"env": "K"}]})
    shown = repr(load(root, {"K": "correct-horse"}))
    secrets = ["hunter2", SHA, "correct-horse", "memory://"]
    secrets += [repr(bytes.fromhex(SHA)), repr(credential_digest("hunter2"))]
    assert [secret for secret in secrets if secret in shown] == []


def test_a_digest_is_the_sha256_of_the_text() -> None:
    """The digest is what `sha256sum` prints, and any text has one."""
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert credential_digest("abc").hex() == expected
    assert len({credential_digest(text) for text in ("é", "e", "\ud800", "")}) == 4


def test_files_are_read(tmp_path: Path) -> None:
    """A file is UTF-8, with or without a byte order mark."""
    path = tmp_path / "config.yaml"
    path.write_text(EXAMPLE, encoding="utf-8-sig")
    env = {"BATCH_KEY": "sk-batch"}
    assert read_config(path, env) == load_config(EXAMPLE, env=env)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a directory and other encodings are faults of the path."""
    path = tmp_path / "config.yaml"
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read: No such file"):
        read_config(path, {})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_config(tmp_path, {})
    path.write_bytes(b"state: memory://\n# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: is not UTF-8 \(byte 22\)"):
        read_config(path, {})
