"""
A configuration in a few lines, for people who check it.
"""

from collections import Counter
from collections.abc import Iterator

from envoy_tokenpools.config.quantity import format_bytes, format_duration_ms
from envoy_tokenpools.config.settings import Config
from envoy_tokenpools.core.pool import Entitlement, EntitlementState, Limits, Pool
from envoy_tokenpools.core.resources import Resources


def describe(config: Config) -> str:
    """Pools, capacities, entitlements and warnings as text, one fact a line; no secrets."""
    refs = Counter(ref for refs in config.keys.values() for ref in refs)
    keys_of = {(ref.pool, ref.entitlement): count for ref, count in refs.items()}
    lines: list[str] = []
    for pool in config.pools.values():
        lines += _pool_lines(pool, is_default=pool.name == config.default_pool)
        lines += [
            f"    {_entitlement_line(entitlement, keys_of.get((pool.name, entitlement.name), 0))}"
            for entitlement in pool.entitlements.values()
        ]
    lines += [f"warning: {warning}" for warning in config.warnings]
    return "\n".join(lines)


def _pool_lines(pool: Pool, *, is_default: bool) -> Iterator[str]:
    yield f"pool {pool.name} ({pool.mode.value}{', default' if is_default else ''})"
    yield f"  models: {', '.join(pool.models)}"
    yield (
        f"  capacity: {_resources_text(pool.capacity)}, {pool.kv_capacity_tokens} tokens of "
        f"context at {format_bytes(pool.kv_bytes_per_token)}"
    )
    yield f"  tokenizer: {pool.tokenizer}"
    yield "  entitlements:"


def _entitlement_line(entitlement: Entitlement, keys: int) -> str:
    parts = [entitlement.service_class.value]
    if entitlement.service_class.has_baseline:
        parts.append(f"baseline {_resources_text(entitlement.baseline)}")
    if entitlement.limits != Limits():
        parts.append(f"at most {_limits_text(entitlement.limits)}")
    if entitlement.slo_target_ms is not None:
        parts.append(f"first token in {format_duration_ms(entitlement.slo_target_ms)}")
    if entitlement.state is not EntitlementState.BOUND:
        parts.append(entitlement.state.value)
    parts.append("1 key" if keys == 1 else f"{keys} keys")
    return f"{entitlement.name}: {'; '.join(parts)}"


def _resources_text(amount: Resources) -> str:
    return _limits_text(Limits(amount.tokens_per_second, amount.kv_bytes, amount.concurrency))


def _limits_text(limits: Limits) -> str:
    parts = []
    if limits.tokens_per_second is not None:
        parts.append(f"{limits.tokens_per_second} tokens/s")
    if limits.kv_bytes is not None:
        parts.append(f"{format_bytes(limits.kv_bytes)} KV cache")
    if limits.concurrency is not None:
        parts.append(f"{limits.concurrency} sequences")
    return ", ".join(parts)
