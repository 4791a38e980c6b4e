"""Scenarios: what a run is made of, and how it is shortened."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.core.pool import Mode
from envoy_tokenpools.lab.lengths import Fixed
from envoy_tokenpools.lab.scenario import Load, Scenario
from envoy_tokenpools.lab.scenario_file import shipped_scenarios

FAIR_SHARE = shipped_scenarios("fair-share")[0]
PROTECTION = {scenario.run: scenario for scenario in shipped_scenarios("protection")}


def test_capacity_follows_the_backends_slots() -> None:
    """With half of the slots the pool has half of each resource; everything else stays."""
    full, half = FAIR_SHARE.pool, FAIR_SHARE.config_for(8).pools[FAIR_SHARE.pool.name]
    assert half.capacity.concurrency * 2 == full.capacity.concurrency
    assert half.capacity.tokens_per_second * 2 == full.capacity.tokens_per_second
    assert half.capacity.kv_bytes * 2 == full.capacity.kv_bytes
    assert dataclasses.replace(half, capacity=full.capacity) == full


def test_slots_change_when_the_schedule_says() -> None:
    """From the very millisecond of a change its slots count."""
    assert [FAIR_SHARE.slots_at(at) for at in (0, 29_999, 30_000, 119_999, 120_000)] == [
        *(16, 16, 8, 8, 16)
    ]


def test_a_run_asks_for_another_model_when_told() -> None:
    """A backend that serves another model is asked for that one, by clients and in the pool."""
    asked = FAIR_SHARE.asking_for("tiny")
    assert asked.model == "tiny"
    assert asked.config.pool_of_model == {"tiny": asked.pool.name}


def test_shortening_keeps_what_a_request_costs_and_how_many_there_are() -> None:
    """Times shrink and rates grow together, so their product stays."""
    short = FAIR_SHARE.scaled(0.2)
    assert short.duration_ms == FAIR_SHARE.duration_ms // 5
    assert short.engine.tokens_per_second == 5 * FAIR_SHARE.engine.tokens_per_second
    assert short.engine.slots == FAIR_SHARE.engine.slots
    assert short.engine.kv_tokens == FAIR_SHARE.engine.kv_tokens
    assert [change.at_ms for change in short.changes] == [6_000, 24_000]
    assert [load.start_ms for load in short.loads] == [0, 0, 42_000]
    assert [(load.prompt, load.output, load.clients) for load in short.loads] == [
        (load.prompt, load.output, load.clients) for load in FAIR_SHARE.loads
    ]
    assert short.pool.tick_ms == 1_000
    assert short.pool.window_ms == 2_000
    for name, entitlement in short.pool.entitlements.items():
        written = FAIR_SHARE.pool.entitlements[name]
        assert entitlement.baseline.concurrency == written.baseline.concurrency
        assert entitlement.baseline.kv_bytes == written.baseline.kv_bytes
        assert entitlement.baseline.tokens_per_second == 5 * written.baseline.tokens_per_second
        assert entitlement.slo_target_ms == (written.slo_target_ms or 0) // 5
        assert entitlement.max_wait_ms == written.max_wait_ms // 5
    assert short.time_scale == 0.2


def test_a_faster_backend_serves_more_in_the_same_time() -> None:
    """Rates of engine, capacity and baselines grow together; times and sequences stay."""
    fast = FAIR_SHARE.at_speed(10 * FAIR_SHARE.engine.tokens_per_second)
    assert fast.engine.tokens_per_second == 10 * FAIR_SHARE.engine.tokens_per_second
    assert fast.engine.prefill_us(560_000) * 10 == FAIR_SHARE.engine.prefill_us(560_000)
    assert fast.pool.capacity.tokens_per_second == 10 * FAIR_SHARE.pool.capacity.tokens_per_second
    assert fast.pool.capacity.concurrency == FAIR_SHARE.pool.capacity.concurrency
    assert (fast.duration_ms, fast.loads, fast.pool.tick_ms, fast.pool.gains) == (
        FAIR_SHARE.duration_ms,
        FAIR_SHARE.loads,
        FAIR_SHARE.pool.tick_ms,
        FAIR_SHARE.pool.gains,
    )
    for name, one in fast.pool.entitlements.items():
        written = FAIR_SHARE.pool.entitlements[name].baseline
        assert one.baseline.tokens_per_second == 10 * written.tokens_per_second
        assert one.baseline.concurrency == written.concurrency


def test_averages_forget_as_much_per_request_however_short_the_run() -> None:
    """An average decays over the shortened run as far as over the written one."""
    short = FAIR_SHARE.scaled(0.5)
    assert short.pool.gains.gamma**1 == pytest.approx(FAIR_SHARE.pool.gains.gamma**2)


def test_ticks_windows_and_ramps_stay_within_what_a_configuration_allows() -> None:
    """However short the run, a tick and a window take a second, and a ramp is at most all at once."""
    tiny = FAIR_SHARE.scaled(0.01).pool
    assert (tiny.tick_ms, tiny.window_ms, tiny.ramp_per_second) == (1_000, 1_000, 1.0)


@given(st.floats(0.05, 20.0))
def test_scaling_back_gives_the_same_duration(factor: float) -> None:
    """Stretching what was shortened comes back to within a rounding of each time."""
    back = FAIR_SHARE.scaled(factor).scaled(1 / factor)
    assert back.duration_ms == pytest.approx(FAIR_SHARE.duration_ms, abs=1 + 1 / factor)
    assert back.time_scale == pytest.approx(1)


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_a_time_scale_is_positive(factor: float) -> None:
    """Nothing else has a meaning."""
    with pytest.raises(ValueError, match="positive"):
        FAIR_SHARE.scaled(factor)


def test_a_curve_bends_the_rate_over_the_run() -> None:
    """Each of its factors holds for an equal part of the run, the last one to the end."""
    load = Load("a", "key", Fixed(1), Fixed(1), rate=2.0, curve=(1.0, 0.0, 0.5))
    assert [load.rate_at(at_ms, 900) for at_ms in (0, 299, 300, 600, 899, 900)] == [
        *(2.0, 2.0, 0.0, 1.0, 1.0, 1.0)
    ]
    assert dataclasses.replace(load, curve=()).rate_at(500, 900) == 2.0


def test_runs_without_admission_differ_in_nothing_else() -> None:
    """The control of each experiment is its main run in shadow mode, clients apart."""

    def bare(scenario: Scenario) -> object:
        pool = dataclasses.replace(scenario.pool, mode=Mode.SHADOW, entitlements={})
        return pool, scenario.engine, scenario.duration_ms, scenario.changes

    for name in ("protection", "fair-share", "mixed"):
        runs = {scenario.run: scenario for scenario in shipped_scenarios(name)}
        control = runs["without"]
        main = next(iter(runs.values()))
        assert not control.enforces
        assert main.enforces
        assert bare(main) == bare(control)
        assert main.loads == control.loads


def test_the_papers_first_experiment_is_calibrated() -> None:
    """A request of 64 and 64 tokens takes 8.5 s; 22 clients want 16 slots; 50 leave a queue of 34."""
    main = PROTECTION["evict"]
    assert main.engine.generation_us(64) / 1e6 == pytest.approx(8.5, abs=0.1)
    alone_ms = (main.engine.prefill_us(64) + main.engine.generation_us(1)) / 1_000
    assert alone_ms == pytest.approx(250, abs=15)
    assert sum(load.clients for load in main.loads) == 22
    assert sum(load.clients for load in PROTECTION["crowd"].loads) - main.engine.slots == 34
