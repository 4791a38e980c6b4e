"""What debt brings about, simulated: even shares, no gain by sleeping or asking often, nobody starves."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from envoy_tokenpools.lab.record import RunRecord
from envoy_tokenpools.lab.scenario import Scenario
from envoy_tokenpools.lab.scenario_file import load_scenarios
from envoy_tokenpools.lab.simulation import simulate

TENANTS = 12
SLOT_MS = 8_250
"""How long a request holds a sequence on average."""

SLO_TARGETS = ("200ms", "500ms", "1s", "2s", "3s", "5s", "8s", "10s", "15s", "20s", "25s", "30s")


def scenario(
    *,
    fairness: str = "backlog",
    targets: tuple[str, ...] = ("5s",) * TENANTS,
    tokens_per_second: int = 300,
    slots: int = 16,
    baselines: tuple[int, ...] = (30,) * TENANTS,
    loads: Mapping[int, str] | None = None,
    seconds: int = 600,
) -> Scenario:
    """Twelve elastic tenants with two clients each on a pool that two thirds of them would fill."""
    usual = "clients: 2, prompt: {uniform: [16, 88]}, output: {uniform: [16, 88]}"
    entitlements = "".join(
        f"    - {{name: t{number}, class: elastic, slo_target: {target}, max_wait: 0s, baseline: "
        f"{{tokens_per_second: {baselines[number]}, kv_cache: 1GiB, concurrency: {slots // 8}}}}}\n"
        for number, target in enumerate(targets)
    )
    sent = "".join(
        f"  - {{entitlement: t{number}, {(loads or {}).get(number, usual)}}}\n"
        for number in range(TENANTS)
    )
    (one,) = load_scenarios(
        f"""
name: fairness
duration: {seconds}s
engine: {{slots: {slots}, tokens_per_second: {slots * 15 // 2}, prefill_tokens_per_second: 560}}
pool:
  name: p
  models: [m]
  capacity: {{tokens_per_second: {tokens_per_second}, kv_cache: 16GiB, concurrency: {slots}}}
  kv_bytes_per_token: 144KiB
  fairness: {fairness}
  entitlements:
{entitlements}loads:
{sent}"""
    )
    return one


def shares(scenario: Scenario, record: RunRecord, *, since_ms: int = 60_000) -> list[float]:
    """Tokens that each tenant got by its baseline, as a multiple of the mean; without the start of the run."""
    got = dict.fromkeys(scenario.pool.entitlements, 0)
    for attempt in record.attempts:
        if attempt.first_token_ms is not None and attempt.first_token_ms >= since_ms:
            got[attempt.entitlement] += attempt.prompt_tokens + attempt.output_tokens
    entitlements = scenario.pool.entitlements
    ratios = [got[name] / entitlements[name].baseline.tokens_per_second for name in got]
    mean = sum(ratios) / len(ratios)
    return [ratio / mean for ratio in ratios]


def jain(parts: list[float]) -> float:
    """Jain's index: 1 is even, 1/n is all for one."""
    return sum(parts) ** 2 / len(parts) / sum(part * part for part in parts)


def run(scenario: Scenario, *, since_ms: int = 60_000) -> list[float]:
    """The shares of a simulated run."""
    return shares(scenario, simulate(scenario), since_ms=since_ms)


def test_equals_get_equal_shares() -> None:
    """At one and a half times the capacity, for ten minutes; and hardly any slot is idle meanwhile."""
    even = scenario()
    record = simulate(even)
    parts = shares(even, record)
    assert jain(parts) > 0.99
    assert min(parts) > 0.9
    busy = [sample.running for sample in record.samples[50:] if sample.running is not None]
    assert sum(busy) / len(busy) > 0.97 * 16


def test_urgency_gets_more_and_patience_does_not_starve() -> None:
    """Targets from 200 ms to 30 s, weights that differ by eight: the most patient gets more than half of the mean."""
    parts = run(scenario(targets=SLO_TARGETS))
    assert parts[0] > parts[-1]
    assert min(parts) > 0.5
    assert jain(parts) > 0.95


def test_counting_what_waits_is_fairer_than_counting_it_once() -> None:
    """By urgency, the mean of three runs each: that is why it is the default."""
    backlog, ewma = (
        sum(
            jain(run(replace(scenario(fairness=fairness, targets=SLO_TARGETS), seed=seed)))
            for seed in range(3)
        )
        / 3
        for fairness in ("backlog", "ewma")
    )
    assert backlog > ewma + 0.01


def test_long_requests_get_no_less_than_short_ones() -> None:
    """Three tenants ask for five times as much at once."""
    long = "clients: 2, prompt: {uniform: [160, 400]}, output: {uniform: [160, 400]}"
    parts = run(scenario(loads={0: long, 1: long, 2: long}, seconds=900))
    assert min(parts) > 0.8
    assert max(parts) < 1.25


def test_who_slept_gains_nothing() -> None:
    """It comes after five minutes, and gets what the others get from then on."""
    late = "clients: 2, prompt: {uniform: [16, 88]}, output: {uniform: [16, 88]}, start: 300s"
    parts = run(scenario(loads={0: late}), since_ms=310_000)
    assert parts[0] == pytest.approx(1.0, abs=0.15)


def test_asking_more_often_gains_little() -> None:
    """Eight clients instead of two, four times as much refused: at most a quarter more than the mean."""
    many = "clients: 8, prompt: {uniform: [16, 88]}, output: {uniform: [16, 88]}"
    parts = run(scenario(loads={0: many}))
    assert parts[0] < 1.3
    assert min(parts) > 0.85
