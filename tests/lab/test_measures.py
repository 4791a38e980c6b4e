"""Figures of recorded runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.lab.measures import Measured, Span, claimed_ms, jain
from envoy_tokenpools.lab.record import Result
from envoy_tokenpools.lab.scenario_file import load_scenarios, shipped_scenarios
from tests.support.records import attempt, record, sample, shed


def always(_: float) -> bool:
    """Any time of a run."""
    return True


def test_first_tokens_are_waited_for_from_the_attempt_that_was_served() -> None:
    """A percentile over the attempts sent in a span; the wait of who was shed before is told apart."""
    measured = Measured(
        record(
            attempt("chat", 0, 200, 900),
            attempt("chat", 1_000, 1_300, 1_900),
            attempt("chat", 5_000, 5_400, 5_900, wanted_ms=2_000),
            attempt("batch", 0, 9_000, 9_900),
        )
    )
    assert measured.first_token_ms(["chat"], 0.99, within=always) == 400
    assert measured.first_token_ms(["chat"], 0.5, within=always) == 300
    assert measured.first_token_ms(["chat"], 0.99, within=Span(0, 1_000).__contains__) == 200
    assert measured.first_token_ms(["chat"], 0.99, within=Span(7_000, 8_000).__contains__) is None
    assert measured.served_after_ms("chat", 0.99) == 3_400
    assert measured.served_after_ms("nobody", 0.99) is None


def test_who_still_waited_at_the_end_is_not_forgotten() -> None:
    """The longest waits of all are those that the end of the run cut; who was shed did not wait."""
    measured = Measured(
        record(
            attempt("chat", 0, 200, 900),
            attempt("chat", 1_000, None, 10_000, result=Result.CUT),
            shed("chat", 3_000),
        )
    )
    assert measured.first_token_ms(["chat"], 0.99, within=always) == 9_000


def test_shares_are_of_all_tokens_of_answers_that_began() -> None:
    """Prompt and output, also of what was cut; nobody has a share where nothing was served."""
    classes = {"chat": ServiceClass.ELASTIC, "batch": ServiceClass.SPOT}
    served = record(
        attempt("chat", 0, 200, 900, tokens=20),
        attempt("batch", 0, 200, 900, tokens=0, result=Result.CUT),
        attempt("batch", 0, None, 900, result=Result.CUT),
        shed("batch", 0),
        classes=classes,
    )
    assert Measured(served).shares() == {"chat": 0.75, "batch": 0.25}
    assert Measured(record(classes=classes)).shares() == {"chat": 0.0, "batch": 0.0}


def test_a_shortened_run_is_measured_as_written() -> None:
    """Times of the record are divided by its time scale, those of samples too."""
    measured = Measured(
        record(
            attempt("chat", 100, 150, 400),
            samples=[sample(100, queued=7, chat=0.5), sample(900, queued=1, chat=0.25)],
            duration_ms=1_000,
            time_scale=0.1,
        )
    )
    assert measured.whole == Span(0, 10_000)
    assert measured.first_token_ms(["chat"], 1, within=Span(1_000, 1_001).__contains__) == 500
    assert measured.running_ms("chat", Span(0, 3_000)) == 1_500
    assert measured.most_queued(within=Span(5_000, 10_000).__contains__) == 1
    assert measured.largest_debt(within=Span(0, 5_000).__contains__) == 0.5


def test_counts_are_by_result_and_own_limits_are_no_broken_promise() -> None:
    """Tokens are those of prompt and answer."""
    measured = Measured(
        record(
            attempt("chat", 0, 200, 900),
            attempt("chat", 0, 200, 4_900, result=Result.EVICTED, tokens=3),
            shed("chat", 10, "concurrency_limit"),
            shed("chat", 20, "pool_contended"),
        )
    )
    assert measured.count("chat", Result.SHED) == 2
    assert measured.count("chat", Result.COMPLETED, Result.EVICTED, within=Span(0, 1_000)) == 1
    assert measured.shed_inside("chat") == 1
    assert measured.tokens("chat", Result.COMPLETED) == 20
    assert measured.tokens("chat", Result.EVICTED) == 13


def test_a_backend_that_does_not_tell_is_not_measured() -> None:
    """No queue and no utilisation rather than wrong ones; and none of a run without samples."""
    silent = Measured(record(samples=[sample(0, running=None, queued=None)]))
    assert silent.most_queued(within=always) is None
    assert silent.utilisation() is None
    assert Measured(record()).largest_debt(within=always) is None
    half = Measured(record(samples=[sample(0, running=4), sample(200, running=0)]))
    assert half.utilisation() == 0.5


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_jain_is_between_one_of_n_and_one(values: list[float]) -> None:
    """It is 1 when all are equal, and does not depend on the unit."""
    index = jain(values)
    assert index is not None
    assert 1 / len(values) - 1e-9 <= index <= 1 + 1e-9
    assert jain([7 * value for value in values]) == pytest.approx(index)
    assert jain([values[0]] * len(values)) == pytest.approx(1)


def test_jain_of_the_papers_own_counts() -> None:
    """Its 700 against 381 requests served; and nothing at all is no index."""
    assert jain([700, 381]) == pytest.approx(0.92, abs=0.005)
    assert jain([0.0, 0.0]) is None


def test_claims_share_the_slots_of_each_moment_by_baseline() -> None:
    """Nobody claims more than it has clients, and what it leaves the others share."""
    claims = claimed_ms(shipped_scenarios("fair-share")[0])
    # 7 of 16 for the first, who wants no more; 4 of 8 in the outage; a third of 16 at the end.
    copilot_ms = 7 * 30_000 + 4 * 90_000 + 7 * 90_000 + 16 / 3 * 90_000
    synth_ms = 9 * 30_000 + 4 * 90_000 + 9 * 90_000 + 16 / 3 * 90_000
    assert claims == pytest.approx(
        {"copilot": copilot_ms, "synth": synth_ms, "reports": 16 / 3 * 90_000}
    )


def test_who_has_no_baseline_claims_nothing_beside_those_who_have() -> None:
    """Spot is promised nothing."""
    (scenario,) = load_scenarios(
        """
name: small
duration: 10s
engine: {slots: 4, tokens_per_second: 100, prefill_tokens_per_second: 1000}
pool:
  name: tiny
  models: [tiny]
  capacity: {tokens_per_second: 1k, kv_cache: 1GiB, concurrency: 4}
  kv_bytes_per_token: 1KiB
  entitlements:
    - {name: chat, class: elastic, baseline: {tokens_per_second: 1, kv_cache: 1MiB, concurrency: 2}}
    - {name: batch, class: spot}
loads:
  - {entitlement: chat, clients: 9, prompt: 10, output: 20}
  - {entitlement: batch, clients: 9, prompt: 10, output: 20}
"""
    )
    assert claimed_ms(scenario) == {"chat": 40_000, "batch": 0}
