"""What several workers say becomes what is true of all of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.admin.merge import complaint, merged_reports, newest_explanation
from tests.support.reports import QWEN, SEARCH


def test_shared_books_are_told_once_and_those_who_wait_are_added_up() -> None:
    """In use, capacity and standing are one worker's; waiting is everybody's own."""
    other = replace(
        QWEN,
        waiting=4,
        oldest_wait_ms=300,
        entitlements=(replace(SEARCH, waiting=4),),
        prompt_ratios={"Qwen/Qwen3-8B": 1.12, "qwen3-8b": 0.9},
    )
    (merged,) = merged_reports([[QWEN], [other], [other]])
    assert merged == replace(
        QWEN,
        waiting=9,
        oldest_wait_ms=1_700,
        entitlements=(replace(SEARCH, waiting=9),),
        prompt_ratios=merged.prompt_ratios,
    )
    assert merged.prompt_ratios == pytest.approx(
        {"Qwen/Qwen3-8B": (1.08 + 2 * 1.12) / 3, "qwen3-8b": 0.9}
    )


def test_what_only_some_workers_know_yet_is_there_too() -> None:
    """In the middle of a reload."""
    llama = replace(QWEN, name="llama")
    grown = replace(QWEN, entitlements=(SEARCH, replace(SEARCH, name="batch")))
    merged = merged_reports([[QWEN], [grown, llama]])
    assert [pool.name for pool in merged] == ["qwen", "llama"]
    assert [each.name for each in merged[0].entitlements] == ["search", "batch"]


@given(st.lists(st.integers(0, 1_000), min_size=1, max_size=8))
def test_one_worker_is_as_it_is_and_more_only_wait_more(waits: list[int]) -> None:
    """Whatever the number of workers, only what is each one's own grows."""
    answers = [[replace(QWEN, waiting=wait, oldest_wait_ms=wait)] for wait in waits]
    (merged,) = merged_reports(answers)
    assert merged.waiting == sum(waits)
    assert merged.oldest_wait_ms == max(waits)
    assert replace(merged, waiting=1, oldest_wait_ms=1, entitlements=(), prompt_ratios={}) == (
        replace(QWEN, waiting=1, oldest_wait_ms=1, entitlements=(), prompt_ratios={})
    )


def test_nobody_knows_nothing() -> None:
    """No answers are no pools, and no explanation."""
    assert merged_reports([]) == []
    assert newest_explanation([]) is None


def test_the_latest_decision_explains() -> None:
    """A request that was tried again at another worker."""
    first, second = {"age_ms": 900, "outcome": "shed"}, {"age_ms": 20, "outcome": "admitted"}
    assert newest_explanation([first, second]) == second


def test_a_complaint_names_each_worker_once_in_order() -> None:
    """And is nothing where all is well."""
    assert complaint({2: "is draining", 0: "does not answer"}) == (
        "worker 0 does not answer; worker 2 is draining"
    )
    assert complaint({}) == ""
