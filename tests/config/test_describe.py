"""Behaviour of the summary of a configuration."""

from envoy_tokenpools.config import describe, load_config

TEXT = """
default_pool: b
pools:
  - name: a
    models: [a-1, a-2]
    capacity: {tokens_per_second: 100, kv_cache: 1GiB, concurrency: 8}
    replicas: 2
    kv_bytes_per_token: 128KiB
    entitlements:
      - name: gold
        class: guaranteed
        slo_target: 200ms
        baseline: {tokens_per_second: 50, kv_cache: 512MiB, concurrency: 4}
        limits: {concurrency: 6}
        keys: [{plain: hunter2}, {plain: hunter3}]
      - {name: later, class: spot, state: Pending, keys: [{plain: hunter4}]}
  - name: b
    models: [b]
    capacity: {tokens_per_second: 1, kv_cache: 1000, concurrency: 1}
    kv_bytes_per_token: 10
    tokenizer: cl100k_base
    mode: shadow
    entitlements: [{name: all, class: spot}]
"""


def test_a_summary_has_every_pool_entitlement_and_warning() -> None:
    """The summary shows what was understood, and no secret."""
    plain = "a key in plain text; use sha256 or env beyond trials"
    assert describe(load_config(TEXT, env={})).splitlines() == [
        "pool a (enforce)",
        "  models: a-1, a-2",
        "  capacity: 200 tokens/s, 2GiB KV cache, 16 sequences, 16384 tokens of context at 128KiB",
        "  tokenizer: o200k_base",
        "  entitlements:",
        (
            "    gold: guaranteed; baseline 50 tokens/s, 512MiB KV cache, 4 sequences; "
            "at most 6 sequences; first token in 200ms; 2 keys"
        ),
        "    later: spot; Pending; 1 key",
        "pool b (shadow, default)",
        "  models: b",
        "  capacity: 1 tokens/s, 1000B KV cache, 1 sequences, 100 tokens of context at 10B",
        "  tokenizer: cl100k_base",
        "  entitlements:",
        "    all: spot; 0 keys",
        f"warning: pools[0].entitlements[0].keys[0].plain: {plain}",
        f"warning: pools[0].entitlements[0].keys[1].plain: {plain}",
        f"warning: pools[0].entitlements[1].keys[0].plain: {plain}",
        "warning: pools[1].entitlements[0]: has no keys: no request can be identified as its own",
    ]
