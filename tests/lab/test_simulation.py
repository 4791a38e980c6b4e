"""Whole runs in virtual time: the same every time, with nothing left, and as the policies say."""

import pytest

from envoy_tokenpools.lab.checks import judge
from envoy_tokenpools.lab.record import Result, RunRecord
from envoy_tokenpools.lab.scenario import Scenario
from envoy_tokenpools.lab.scenario_file import shipped_scenarios
from envoy_tokenpools.lab.simulation import simulate

PROTECTION = {scenario.run: scenario for scenario in shipped_scenarios("protection")}


def results(record: RunRecord, entitlement: str) -> set[Result]:
    """What attempts of it came to, but for those that the end of the run cut."""
    return {one.result for one in record.of(entitlement)} - {Result.CUT}


def test_the_same_scenario_gives_the_same_record() -> None:
    """To the last attempt and sample; another seed gives another one."""
    (mixed, *_) = shipped_scenarios("mixed")
    one = mixed.scaled(0.2)
    assert simulate(one) == simulate(one)


@pytest.mark.parametrize("name", ["protection", "fair-share", "mixed"])
def test_the_experiments_show_in_virtual_time_what_they_must(name: str) -> None:
    """Shown runs keep their checks, and those without admission fail."""
    scenarios: tuple[Scenario, ...] = shipped_scenarios(name)
    records = {scenario.run: simulate(scenario) for scenario in scenarios}
    judgements = judge(scenarios, records)
    assert judgements
    assert [one.run for one in judgements if not one.as_expected] == []


def test_at_the_end_nothing_is_held() -> None:
    """Of two tenants who stop early every lease has come back."""
    record = simulate(PROTECTION["evict"])
    last = record.samples[-1]
    assert last.standings["guaranteed-c"].in_flight == 0
    assert last.standings["guaranteed-c"].waiting == 0


def test_spot_is_evicted_for_a_guarantee_and_nobody_else_is() -> None:
    """As many as the guarantee needs: six."""
    record = simulate(PROTECTION["evict"])
    evicted = [one for one in record.attempts if one.result is Result.EVICTED]
    assert {one.entitlement for one in evicted} == {"spot-b"}
    assert len(evicted) == 6
    assert results(record, "guaranteed-a") == {Result.COMPLETED}


def test_a_waiting_request_is_decided_later_than_it_was_sent() -> None:
    """And is served in place of being shed; waiting churns no evictions."""
    record = simulate(PROTECTION["wait"])
    assert Result.SHED not in results(record, "spot-b")
    assert any(
        one.decided_ms is not None and one.decided_ms > one.sent_ms + 1_000
        for one in record.of("spot-b")
    )
    assert any(sample.standings["spot-b"].waiting for sample in record.samples)
    assert sum(one.result is Result.EVICTED for one in record.attempts) <= 8


def test_without_admission_everybody_queues_in_the_backend() -> None:
    """Nobody is shed, and the queue is as long as the surplus of clients."""
    record = simulate(PROTECTION["without"])
    assert {one.result for one in record.attempts} <= {Result.COMPLETED, Result.CUT}
    assert max(sample.queued or 0 for sample in record.samples) == 6


def test_attempts_may_be_counted_in_place_of_being_kept() -> None:
    """For runs that are longer than the memory."""

    class Count:
        def __init__(self) -> None:
            self.count = 0

        def append(self, _: object, /) -> None:
            self.count += 1

    sink = Count()
    record = simulate(PROTECTION["alone"], sink=sink)
    assert record.attempts == []
    assert sink.count == len(simulate(PROTECTION["alone"]).attempts)
