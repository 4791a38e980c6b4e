"""Reading scenarios from YAML: what may be left out, and faults that say where they are."""

from pathlib import Path

import pytest

from envoy_tokenpools.config import credential_digest
from envoy_tokenpools.core.pool import Mode, Reclaim, ServiceClass
from envoy_tokenpools.errors import ConfigError
from envoy_tokenpools.lab.lengths import Fixed, LogNormal, Uniform
from envoy_tokenpools.lab.scenario import Role
from envoy_tokenpools.lab.scenario_file import (
    load_scenarios,
    read_scenarios,
    runs_named,
    shipped_scenarios,
)

POOL = """
name: small
duration: 10s
engine: {slots: 4, tokens_per_second: 100, prefill_tokens_per_second: 1000}
pool:
  name: tiny
  models: [tiny]
  capacity: {tokens_per_second: 1k, kv_cache: 1GiB, concurrency: 4}
  kv_bytes_per_token: 1KiB
  entitlements:
    - name: chat
      class: guaranteed
      baseline: {tokens_per_second: 100, kv_cache: 1MiB, concurrency: 2}
    - {name: batch, class: spot}
"""
LOADS = """
loads:
  - {entitlement: chat, clients: 2, prompt: 10, output: 20}
  - {entitlement: batch, rate: 1.5, prompt: {uniform: [5, 50]}, output: {lognormal: {median: 20, sigma: 1, most: 99}}}
"""


def faults_of(text: str) -> list[str]:
    """The faults of a document, as they are printed."""
    with pytest.raises(ConfigError) as caught:
        load_scenarios(text)
    return [str(fault) for fault in caught.value.faults]


def test_a_small_document_is_one_run() -> None:
    """What is not said has a plain default; who has no key gets one that its clients use."""
    (scenario,) = load_scenarios(POOL + LOADS)
    chat, batch = scenario.loads
    assert (scenario.run, scenario.role, scenario.enforces) == ("run", Role.SHOWN, True)
    assert (chat.clients, chat.rate, chat.retries) == (2, 0.0, None)
    assert (batch.clients, batch.rate, batch.retries) == (0, 1.5, 2)
    assert (chat.start_ms, chat.stop_ms) == (0, 10_000)
    assert (chat.prompt, chat.output) == (Fixed(10), Fixed(20))
    assert (batch.prompt, batch.output) == (Uniform(5, 50), LogNormal(20, 1, 99))
    assert {credential_digest(load.key) for load in scenario.loads} == set(scenario.config.keys)


def test_runs_replace_fields_of_pool_entitlements_and_clients() -> None:
    """Each run is the document with its own fields in place; what it does not name stays."""
    plain, other = load_scenarios(
        POOL
        + LOADS
        + """
runs:
  - name: plain
  - name: other
    role: control
    pool: {mode: shadow}
    entitlements: {batch: {reclaim: evict}}
    clients: {chat: 7}
"""
    )
    assert (plain.pool.mode, other.pool.mode) == (Mode.ENFORCE, Mode.SHADOW)
    assert plain.pool.entitlements["batch"].reclaim is Reclaim.THROTTLE
    assert other.pool.entitlements["batch"].reclaim is Reclaim.EVICT
    assert [scenario.loads[0].clients for scenario in (plain, other)] == [2, 7]
    assert other.pool.entitlements["chat"] == plain.pool.entitlements["chat"]


def test_copies_make_many_tenants_of_one() -> None:
    """Each copy has its own name, key and load."""
    text = POOL.replace("{name: batch, class: spot}", "{name: batch, class: spot, copies: 3}")
    (scenario,) = load_scenarios(text + LOADS)
    names = ["batch-1", "batch-2", "batch-3"]
    assert list(scenario.pool.entitlements) == ["chat", *names]
    assert [load.entitlement for load in scenario.loads] == ["chat", *names]
    assert len({load.key for load in scenario.loads}) == 4
    assert len(scenario.config.keys) == 4


def test_every_fault_is_told_with_its_place() -> None:
    """A reader who made five mistakes hears of all five."""
    assert faults_of(
        "name: x\nduration: 5\nnonsense: 1\n"
        "engine: {slots: 0, tokens_per_second: 1, prefill_tokens_per_second: 1}\n"
        "pool: {}\nloads: [{entitlement: a, prompt: {uniform: [5, 2]}, output: -1, clients: 1, rate: 1.0}]"
    ) == [
        "duration: needs a unit: 500ms, 2s, 5m or 1h",
        "engine.slots: must be at least 1",
        "loads[0].rate: exactly one of clients and rate is required",
        "loads[0].prompt: must have the shorter length first",
        "loads[0].output: must not be negative",
        "nonsense: unknown field",
    ]


def test_fields_that_contradict_each_other_are_faults() -> None:
    """Names that nobody has, times outside the run, an order that is none."""
    text = POOL + (
        "loads:\n"
        "  - {entitlement: nobody, clients: 1, prompt: 1, output: 1}\n"
        "  - {entitlement: chat, clients: 1, prompt: 1, output: 1, start: 5s, stop: 4s}\n"
        "  - {entitlement: batch, rate: 1.0, prompt: 1, output: 1, stop: 11s}\n"
        "changes: [{at: 2s, slots: 1}, {at: 1s, slots: 2}]\n"
        "runs:\n"
        "  - {name: a, entitlements: {ghost: {}}}\n"
        "  - {name: a, clients: {batch: 3}}\n"
    )
    assert faults_of(text) == [
        "loads[0].entitlement: is no entitlement of the pool",
        "loads[1].stop: must be after start and within the duration",
        "loads[2].stop: must be after start and within the duration",
        "changes: must be in order of time",
        "runs: must have different names",
        "runs[0].entitlements.ghost: is no entitlement of the pool",
        "runs[1].clients.batch: has no closed loop",
    ]


def test_faults_of_the_pool_are_those_of_a_configuration() -> None:
    """The path leads into the scenario's own pool, and names the run whose fields made it."""
    assert faults_of(POOL.replace("class: spot", "class: gold") + LOADS)[0].startswith(
        "pool.entitlements[1].class: "
    )
    runs = "runs: [{name: a}, {name: b, pool: {headroom: 2.0}}]"
    assert faults_of(POOL + LOADS + runs)[0].startswith("runs[1] pool.headroom: ")


@pytest.mark.parametrize("prompt", ["{}", "{uniform: [1]}", "{normal: 3}", "[1, 2]", "0"])
def test_lengths_are_numbers_or_distributions(prompt: str) -> None:
    """Anything else is a fault of that field."""
    faults = faults_of(POOL + LOADS.replace("prompt: 10", f"prompt: {prompt}"))
    assert all(fault.startswith("loads[0].prompt") for fault in faults)


def test_files_that_cannot_be_read_are_faults(tmp_path: Path) -> None:
    """A missing file, and one that is no text."""
    with pytest.raises(ConfigError, match="cannot be read"):
        read_scenarios(tmp_path / "absent.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_scenarios(binary)
    good = tmp_path / "good.yaml"
    good.write_text(POOL + LOADS, "utf-8")
    assert read_scenarios(good) == load_scenarios(POOL + LOADS)


def test_runs_are_chosen_by_name_in_the_order_asked_for() -> None:
    """None named is all of them; an unknown one is a fault that lists the known ones."""
    scenarios = shipped_scenarios("protection")
    assert runs_named(scenarios, []) == scenarios
    assert [one.run for one in runs_named(scenarios, ["alone", "evict"])] == ["alone", "evict"]
    with pytest.raises(ConfigError, match="none named 'x', only evict, "):
        runs_named(scenarios, ["x"])


def test_the_shipped_scenarios_cover_each_way_to_reclaim() -> None:
    """Spot that is evicted, spot that is throttled, and preemptible neighbours."""
    spot = {one.run: one.pool.entitlements["spot-b"] for one in shipped_scenarios("protection")}
    assert spot["evict"].reclaim is Reclaim.EVICT
    assert spot["throttle"].reclaim is Reclaim.THROTTLE
    assert spot["preemptible"].service_class is ServiceClass.PREEMPTIBLE
    assert spot["wait"].max_wait_ms > 0
