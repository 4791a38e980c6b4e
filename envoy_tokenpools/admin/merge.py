"""
From what several workers say of the same pools to what is true of all of them. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from envoy_tokenpools.observer import EntitlementReport, PoolReport


def merged_reports(answers: Iterable[Sequence[PoolReport]]) -> list[PoolReport]:
    """
    One report of each pool that any of the workers knows.

    The books and the terms are the same for all of them: they are the first one's. Who waits does so in one worker:
    numbers are added up, and the longest wait is the longest of all. What each of them has learned is averaged.
    """
    of_pool: dict[str, list[PoolReport]] = {}
    for reports in answers:
        for report in reports:
            of_pool.setdefault(report.name, []).append(report)
    return [_merged_pool(reports) for reports in of_pool.values()]


def _merged_pool(reports: Sequence[PoolReport]) -> PoolReport:
    of_entitlement: dict[str, list[EntitlementReport]] = {}
    for report in reports:
        for entitlement in report.entitlements:
            of_entitlement.setdefault(entitlement.name, []).append(entitlement)
    return replace(
        reports[0],
        waiting=sum(report.waiting for report in reports),
        oldest_wait_ms=max(report.oldest_wait_ms for report in reports),
        entitlements=tuple(
            replace(same[0], waiting=sum(each.waiting for each in same))
            for same in of_entitlement.values()
        ),
        prompt_ratios=_averages([report.prompt_ratios for report in reports]),
    )


def _averages(learned: Sequence[Mapping[str, float]]) -> dict[str, float]:
    models = dict.fromkeys(model for ratios in learned for model in ratios)
    return {
        model: fmean(ratios[model] for ratios in learned if model in ratios) for model in models
    }


def newest_explanation(explanations: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The explanation of the latest decision: a client may use an id again, and meet another worker."""
    return min(explanations, key=lambda each: each["age_ms"], default=None)


def complaint(troubles: Mapping[int, str]) -> str:
    """What is wrong with which worker, in one line; nothing if nothing is wrong."""
    return "; ".join(f"worker {worker} {trouble}" for worker, trouble in sorted(troubles.items()))
