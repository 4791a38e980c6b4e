"""Behaviour of a configuration with faults."""

import pytest

from envoy_tokenpools.config import credential_digest, load_config
from envoy_tokenpools.errors import ConfigError
from tests.config.documents import ENTITLEMENT, SHA, SPOT, entitlements, faults_of, pools

NAME_RULE = "must be 1 to 63 letters, digits, '.', '_' or '-', with a letter or digit at both ends"
MODEL_RULE = "must be 1 to 256 printable characters, no blanks around"
UNIT_RULE = "needs a unit: 500ms, 2s, 5m or 1h"
ONE_KV_RULE = "exactly one of kv_bytes_per_token and model_shape is required"
UNKNOWN_SCHEME = (
    "unknown scheme; known: memory://, redis://, rediss://, redis+sentinel://, redis+cluster://,"
    " unix://"
)
CAPACITY = {"tokens_per_second": 100, "kv_cache": "1GiB", "concurrency": 4}
SHAPE = {"layers": 36, "kv_heads": 8, "head_dim": 128, "bytes_per_value": 2}


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ({"name": ""}, [f"name: {NAME_RULE}"]),
        ({"name": "a b"}, [f"name: {NAME_RULE}"]),
        ({"name": "a}b"}, [f"name: {NAME_RULE}"]),
        ({"name": "-a"}, [f"name: {NAME_RULE}"]),
        ({"name": "a\n"}, [f"name: {NAME_RULE}"]),
        ({"name": "a" * 64}, [f"name: {NAME_RULE}"]),
        ({"name": 7}, ["name: must be text (put it in quotes)"]),
        ({"name": None}, ["name: must be text (put it in quotes)"]),
        ({"models": []}, ["models: must have at least one item"]),
        ({"models": "small"}, ["models: must be a list"]),
        ({"models": ["a", ""]}, [f"models[1]: {MODEL_RULE}"]),
        ({"models": [" a"]}, [f"models[0]: {MODEL_RULE}"]),
        ({"models": ["a\nb"]}, [f"models[0]: {MODEL_RULE}"]),
        ({"models": ["a" * 257]}, [f"models[0]: {MODEL_RULE}"]),
        ({"capacity": 5}, ["capacity: must be a mapping of fields"]),
        (
            {"capacity": {"tokens_per_second": 100, "kv_cash": "1GiB"}},
            [
                "capacity.kv_cache: is required",
                "capacity.concurrency: is required",
                "capacity.kv_cash: unknown field",
            ],
        ),
        ({"capacity": CAPACITY | {"concurrency": 0}}, ["capacity.concurrency: must be at least 1"]),
        (
            {"capacity": CAPACITY | {"tokens_per_second": "100B"}},
            ["capacity.tokens_per_second: must be a quantity such as 240, 1.5k or 2M"],
        ),
        (
            {"capacity": CAPACITY | {"kv_cache": "lots"}},
            ["capacity.kv_cache: must be a quantity such as 144KiB, 16GiB or 2GB"],
        ),
        (
            {"capacity": CAPACITY | {"kv_cache": "8191Ti"}, "replicas": 2},
            ["replicas: must keep every capacity at or below 9007199254740991"],
        ),
        ({"replicas": 0}, ["replicas: must be at least 1"]),
        ({"replicas": True}, ["replicas: must be a number or a quantity with a suffix"]),
        ({"kv_bytes_per_token": None}, [f"kv_bytes_per_token: {ONE_KV_RULE}"]),
        ({"model_shape": SHAPE}, [f"kv_bytes_per_token: {ONE_KV_RULE}"]),
        ({"kv_bytes_per_token": 0}, ["kv_bytes_per_token: must be at least 1B"]),
        (
            {"kv_bytes_per_token": "2GiB"},
            ["kv_bytes_per_token: 2GiB is more than the pool's whole kv_cache"],
        ),
        (
            {"kv_bytes_per_token": None, "model_shape": {"layers": 1, "bytes_per_value": 0}},
            [
                "model_shape.kv_heads: is required",
                "model_shape.head_dim: is required",
                "model_shape.bytes_per_value: must be greater than 0",
            ],
        ),
        (
            {"kv_bytes_per_token": None, "model_shape": SHAPE | {"bytes_per_value": 0.3}},
            [
                (
                    "model_shape.bytes_per_value: must come to whole bytes per token, "
                    "at most 9007199254740991"
                )
            ],
        ),
        ({"tokenizer": "gpt2"}, ["tokenizer: must be 'cl100k_base' or 'o200k_base'"]),
        ({"default_max_tokens": 0}, ["default_max_tokens: must be at least 1"]),
        ({"image_tokens": -1}, ["image_tokens: must not be negative"]),
        ({"audio_tokens": 1.5}, ["audio_tokens: must come to a whole number"]),
        ({"output_estimate": "p99"}, ["output_estimate: must be 'p95' or 'max_tokens'"]),
        ({"mode": "off"}, ["mode: must be 'enforce' or 'shadow'"]),
        ({"window": 10}, [f"window: {UNIT_RULE}"]),
        ({"window": 0}, ["window: must be between 1s and 1h"]),
        ({"tick": "31s"}, ["tick: must be between 1s and 30s"]),
        ({"tick": "999ms"}, ["tick: must be between 1s and 30s"]),
        ({"headroom": 1.1}, ["headroom: must be less than or equal to 1"]),
        ({"headroom": float("nan")}, ["headroom: must be a finite number"]),
        ({"headroom": "50%"}, ["headroom: must be a number"]),
        ({"headroom": True}, ["headroom: must be a number"]),
        ({"ramp_per_second": 0}, ["ramp_per_second: must be greater than 0"]),
        ({"max_waiting": -1}, ["max_waiting: must not be negative"]),
        ({"gains": {"gamma": 1}}, ["gains.gamma: must be less than 1"]),
        ({"gains": {"slo": -1}}, ["gains.slo: must be greater than or equal to 0"]),
        ({"gains": {"debt": float("inf")}}, ["gains.debt: must be a finite number"]),
        ({"entitlements": []}, ["entitlements: must have at least one item"]),
        ({"entitlements": {}}, ["entitlements: must be a list"]),
        ({"entitlements": [3]}, ["entitlements[0]: must be a mapping of fields"]),
        ({"burst_limit": 3}, ["burst_limit: unknown field"]),
        (
            {"a\nb c" * 20: 3},
            [r"'a\nb ca\nb ca\nb ca\nb ca\nb ca\nb ca\nb ca\nb c': unknown field"],
        ),
    ],
)
def test_faults_of_a_pool(change: dict[str, object], faults: list[str]) -> None:
    """Each fault is told with its path, and nothing else with it."""
    assert faults_of(pools(change)) == [f"pools[0].{fault}" for fault in faults]


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ({"name": "x/y"}, [f"name: {NAME_RULE}"]),
        (
            {"class": "gold"},
            ["class: must be 'dedicated', 'guaranteed', 'elastic', 'spot' or 'preemptible'"],
        ),
        ({"slo_target": 200}, [f"slo_target: {UNIT_RULE}"]),
        ({"slo_target": "0s"}, ["slo_target: must be between 1ms and 1h"]),
        ({"baseline": None}, ["baseline: is required for class guaranteed"]),
        ({"baseline": None, "class": "dedicated"}, ["baseline: is required for class dedicated"]),
        ({"baseline": None, "class": "elastic"}, ["baseline: is required for class elastic"]),
        ({"class": "spot"}, ["baseline: is not for class spot"]),
        ({"class": "preemptible"}, ["baseline: is not for class preemptible"]),
        (
            {"baseline": {"tokens_per_second": 5, "kv_cache": "1.5"}},
            [
                "baseline.kv_cache: must come to a whole number",
                "baseline.concurrency: is required",
            ],
        ),
        (
            {"limits": {"tokens_per_second": 99, "kv_cache": "1GiB", "concurrency": 3}},
            ["limits: must not be below the baseline: tokens_per_second, concurrency"],
        ),
        ({"limits": {"tokens": 5}}, ["limits.tokens: unknown field"]),
        ({"limits": None}, ["limits: must be a mapping of fields"]),
        ({"lend": "yes"}, ["lend: must be true or false"]),
        ({"lend": True, "class": "elastic"}, ["lend: is for class guaranteed only"]),
        ({"lend": False, "class": "dedicated"}, ["lend: is for class guaranteed only"]),
        ({"state": "bound"}, ["state: must be 'Pending', 'Bound', 'Degraded' or 'Expired'"]),
        ({"keys": "k"}, ["keys: must be a list"]),
        ({"patience": "2s"}, ["patience: unknown field"]),
        ({"max_wait": 2}, [f"max_wait: {UNIT_RULE}"]),
        ({"max_wait": "10m"}, ["max_wait: must be between 0ms and 5m"]),
        ({"reclaim": "evict"}, ["reclaim: is for classes spot and preemptible only"]),
        (
            {"reclaim": "kill", "class": "spot", "baseline": None},
            ["reclaim: must be 'throttle' or 'evict'"],
        ),
    ],
)
def test_faults_of_an_entitlement(change: dict[str, object], faults: list[str]) -> None:
    """Each fault is told with its path, and nothing else with it."""
    expected = [f"pools[0].entitlements[0].{fault}" for fault in faults]
    assert faults_of(entitlements(change)) == expected


KEY_RULE = (
    ": must be exactly one of {sha256: ...}, {env: ...}, {plain: ...}, {claim: ...}, "
    "{principal: ...} and {anonymous: true}"
)


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        ({}, KEY_RULE),
        ("hunter2", KEY_RULE),
        ({"hunter2": 1}, KEY_RULE),
        ({"plain": "hunter2", "env": "hunter2"}, KEY_RULE),
        ({"plain": None}, KEY_RULE),
        ({"sha256": "hunter2"}, ".sha256: must be 64 hexadecimal digits, the key's SHA-256"),
        ({"sha256": SHA + "0"}, ".sha256: must be 64 hexadecimal digits, the key's SHA-256"),
        ({"sha256": 12}, ".sha256: must be text (put it in quotes)"),
        ({"env": "sk-hunter2"}, ".env: must be the name of an environment variable"),
        ({"env": "hunter2"}, ".env: the environment variable it names is not set"),
        ({"env": "EMPTY"}, ".env: the environment variable it names is empty"),
        (
            {"env": "LINE"},
            ".env: the environment variable it names begins or ends with blanks or a line break",
        ),
        ({"plain": ""}, ".plain: the key is empty"),
        ({"plain": " hunter2"}, ".plain: the key begins or ends with blanks or a line break"),
    ],
)
def test_faults_of_a_key(key: object, fault: str) -> None:
    """A key that cannot be used is a fault, and what was written is never repeated."""
    root = entitlements({"keys": [{"sha256": SHA}, key]})
    faults = faults_of(root, {"EMPTY": "", "LINE": "hunter2\n"})
    assert faults == [f"pools[0].entitlements[0].keys[1]{fault}"]


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ({"pools": []}, ["pools: must have at least one item"]),
        ({"pools": None}, ["pools: must be a list"]),
        ({"pool": []}, ["pool: unknown field"]),
        ({"default_pool": "large"}, ["default_pool: no pool has this name"]),
        ({"state": "etcd://:hunter2@db"}, [f"state: {UNKNOWN_SCHEME}"]),
        ({"state": "hunter2"}, [f"state: {UNKNOWN_SCHEME}"]),
        ({"state": "redis://:hunter2@"}, ["state: the host is missing"]),
        ({"state": {"env": "MISSING"}}, ["state.env: the environment has no variable MISSING"]),
        ({"state": {"plain": "x"}}, ["state: must be a URL or {env: NAME}"]),
        ({"state": "memory://hunter2"}, ["state: must be exactly memory://"]),
        ({"state": 5}, ["state: must be text (put it in quotes)"]),
        ({"server": {"max_body": "1B"}}, ["server.max_body: must be at least 1KiB"]),
        ({"server": {"max_body": "2GiB"}}, ["server.max_body: must be at most 1GiB"]),
        ({"server": {"lease_ttl": "1s"}}, ["server.lease_ttl: must be between 5s and 1h"]),
        ({"server": {"drain": 5}}, [f"server.drain: {UNIT_RULE}"]),
        ({"server": {"port": 5}}, ["server.port: unknown field"]),
    ],
)
def test_faults_of_the_root(change: dict[str, object], faults: list[str]) -> None:
    """Each fault is told with its path; of a store's URL only the scheme is repeated."""
    assert faults_of(pools({}) | change) == faults


def test_names_are_unique() -> None:
    """Pools, models and the entitlements of a pool have names of their own."""
    twin = {"keys": [{"sha256": "e" * 64}], "class": "elastic"}
    root = pools(
        {"models": ["a", "b", "a"]},
        {"models": ["c", "b"]},
        {"name": "other", "models": ["d"], "entitlements": [ENTITLEMENT, ENTITLEMENT | twin]},
    )
    assert faults_of(root) == [
        "pools[2].entitlements[1].name: the name is taken by pools[2].entitlements[0].name",
        "pools[1].name: the name is taken by pools[0].name",
        "pools[0].models[2]: the model is taken by pools[0].models[0]",
        "pools[1].models[1]: the model is taken by pools[0].models[1]",
    ]


def test_a_key_identifies_one_entitlement_of_a_pool() -> None:
    """The same key twice in a pool is a fault, however it is written."""
    sha = credential_digest("k").hex().upper()
    root = pools(
        {
            "entitlements": [
                ENTITLEMENT | {"keys": [{"plain": "k"}, {"env": "K"}]},
                SPOT | {"keys": [{"sha256": sha}]},
            ]
        }
    )
    where = "pools[0].entitlements[0].keys[0]"
    assert faults_of(root, {"K": "k"}) == [
        f"pools[0].entitlements[0].keys[1]: the same key as {where}",
        f"pools[0].entitlements[1].keys[0]: the same key as {where}",
    ]


def test_reserved_baselines_fit_the_capacity() -> None:
    """Reserved baselines above what all replicas hold are a fault per resource."""
    baseline = {"tokens_per_second": 101, "kv_cache": "1GiB", "concurrency": 4}
    twice = [
        ENTITLEMENT,
        ENTITLEMENT
        | {
            "name": "own",
            "class": "dedicated",
            "baseline": baseline,
            "keys": [{"sha256": "e" * 64}],
        },
    ]
    root = pools({"entitlements": twice, "replicas": 2})
    assert faults_of(root) == [
        (
            "pools[0].capacity.tokens_per_second: reserved baselines come to 201, "
            "more than the 200 of all replicas"
        )
    ]
    assert faults_of(pools({"entitlements": twice}))[1:] == [
        (
            "pools[0].capacity.kv_cache: reserved baselines come to 2GiB, "
            "more than the 1GiB of all replicas"
        ),
        (
            "pools[0].capacity.concurrency: reserved baselines come to 8, "
            "more than the 4 of all replicas"
        ),
    ]


EVERYTHING_WRONG = """
state: etcd://:hunter2@db
default_pool: nowhere
extra: 1
server: {max_body: 1, drain: soon}
pools:
  - name: p
    name: q
    models: [a, a, 3]
    capacity: {tokens_per_second: 10, kv_cache: 1GiB, concurrency: 1}
    tick: 31s
    entitlements:
      - {name: x, class: spot, lend: true, baseline: {tokens_per_second: 5}, slo_target: 5}
      - {name: x, class: elastic, lend: true, keys: [{plain: hunter2}, {plain: hunter2}]}
      - name: y
        class: guaranteed
        state: Bound
        baseline: {tokens_per_second: 11, kv_cache: 1, concurrency: 1}
        slo_target: 5
        limits: {tokens_per_second: 1}
  - {name: p, models: [], entitlements: []}
  - hunter2
"""


def test_all_faults_are_told_at_once() -> None:
    """No fault hides another one, not even in the same mapping."""
    with pytest.raises(ConfigError) as raised:
        load_config(EVERYTHING_WRONG, env={})
    assert sorted(str(raised.value).splitlines()) == sorted(
        [
            "pools[0].name: is given twice (line 8)",
            "extra: unknown field",
            "server.max_body: must be at least 1KiB",
            "server.drain: must be a duration such as 500ms, 2s, 5m or 1h",
            f"state: {UNKNOWN_SCHEME}",
            "default_pool: no pool has this name",
            "pools[0].models[2]: must be text (put it in quotes)",
            "pools[0].models[1]: the model is taken by pools[0].models[0]",
            f"pools[0].kv_bytes_per_token: {ONE_KV_RULE}",
            "pools[0].tick: must be between 1s and 30s",
            "pools[0].entitlements[0].baseline.kv_cache: is required",
            "pools[0].entitlements[0].baseline.concurrency: is required",
            "pools[0].entitlements[0].lend: is for class guaranteed only",
            f"pools[0].entitlements[0].slo_target: {UNIT_RULE}",
            "pools[0].entitlements[1].name: the name is taken by pools[0].entitlements[0].name",
            "pools[0].entitlements[1].baseline: is required for class elastic",
            "pools[0].entitlements[1].lend: is for class guaranteed only",
            "pools[0].entitlements[1].keys[1]: the same key as pools[0].entitlements[1].keys[0]",
            f"pools[0].entitlements[2].slo_target: {UNIT_RULE}",
            "pools[0].entitlements[2].limits: must not be below the baseline: tokens_per_second",
            (
                "pools[0].capacity.tokens_per_second: reserved baselines come to 11, "
                "more than the 10 of all replicas"
            ),
            "pools[1].name: the name is taken by pools[0].name",
            "pools[1].models: must have at least one item",
            "pools[1].capacity: is required",
            f"pools[1].kv_bytes_per_token: {ONE_KV_RULE}",
            "pools[1].entitlements: must have at least one item",
            "pools[2]: must be a mapping of fields",
        ]
    )
    assert "hunter2" not in repr(raised.value.faults)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "the configuration is empty"),
        ("# only a comment\n", "the configuration is empty"),
        ("- pools", "must be a mapping of fields"),
        ("{}", "pools: is required"),
        (
            "pools: [",
            (
                "line 1, column 9: not valid YAML: while parsing a flow node, "
                "expected the node content, but found '<stream end>'"
            ),
        ),
    ],
)
def test_documents_that_are_no_configuration(text: str, fault: str) -> None:
    """An empty document, a list and a syntax error are one fault each."""
    with pytest.raises(ConfigError) as raised:
        load_config(text, env={})
    assert [str(fault) for fault in raised.value.faults] == [fault]
