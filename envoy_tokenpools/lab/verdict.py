"""
What a run has shown, in plain words: who got what, and whether the promises of the classes held.

Pure: from the clients' tallies and the filter's own state to sentences.
"""

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from envoy_tokenpools.core.admission import Reason
from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.lab.state_view import EntitlementView, StateView
from envoy_tokenpools.lab.tally import Tally

_OWN_LIMITS = {
    Reason.CONCURRENCY_LIMIT.value,
    Reason.KV_CACHE_LIMIT.value,
    Reason.TOKEN_RATE_LIMIT.value,
}
"""Reasons to shed that say: this was more than the entitlement's own limits."""


class Verdict(enum.Enum):
    """Whether a finding is a promise that held, one that did not, or neither."""

    KEPT = "kept"
    BROKEN = "broken"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about a run."""

    verdict: Verdict
    text: str


def findings(
    tallies: Mapping[str, Tally],
    state: StateView,
    *,
    backend_peak_waiting: int | None = None,
) -> list[Finding]:
    """
    Judge a run that has ended.

    Args:
        tallies: what the clients saw, by entitlement.
        state: what the filter reports after the run.
        backend_peak_waiting: the longest queue of the backend itself, if it is known.
    """
    told: list[Finding] = []
    for pool in state.pools:
        if pool.mode == "shadow":
            text = f"pool {pool.name} is in shadow mode: it decides and counts, nobody is refused"
            told.append(Finding(Verdict.NOTE, text))
        for entitlement in pool.entitlements:
            tally = tallies.get(entitlement.name)
            if tally is not None and tally.sent:
                told.append(_treatment(entitlement, tally, tallies))
                told += _failures(entitlement, tally)
    if backend_peak_waiting is not None:
        text = f"the backend's own queue never held more than {backend_peak_waiting} sequences"
        told.append(Finding(Verdict.NOTE, text))
    told.append(_settlement(state))
    return told


def shed_reasons(shed: Counter[str]) -> str:
    """Reasons with their counts, the most frequent first."""
    return ", ".join(f"{reason} {count}" for reason, count in shed.most_common())


def _treatment(entitlement: EntitlementView, tally: Tally, tallies: Mapping[str, Tally]) -> Finding:
    who = f"{entitlement.name} ({entitlement.service_class.value})"
    got = f"{tally.admitted} requests let in, {_share(tally, tallies)} of all tokens"
    median, slowest = tally.first_token_ms(0.5), tally.first_token_ms(0.99)
    if median is not None and slowest is not None:
        got += f", first token after {median:.0f} ms (99 of 100 within {slowest:.0f} ms)"
    refused = tally.shed.total()
    if not refused:
        return Finding(_kept_if_reserved(entitlement), f"{who} was never refused: {got}")
    why = shed_reasons(tally.shed)
    if entitlement.service_class.is_reserved:
        inside = sum(count for reason, count in tally.shed.items() if reason not in _OWN_LIMITS)
        if inside:
            text = f"{who} was refused {inside} times inside its baseline ({why}): {got}"
            return Finding(Verdict.BROKEN, text)
        text = f"{who} was never refused inside its baseline, {refused} times above it ({why})"
        return Finding(Verdict.KEPT, f"{text}: {got}")
    refusal = f"refused {refused} times with 429 and told when to come back ({why})"
    if entitlement.service_class.has_baseline:
        return Finding(Verdict.NOTE, f"{who} shared by weight, {refusal}: {got}")
    return Finding(Verdict.NOTE, f"{who} got what was left, {refusal}: {got}")


def _kept_if_reserved(entitlement: EntitlementView) -> Verdict:
    return Verdict.KEPT if entitlement.service_class.is_reserved else Verdict.NOTE


def _share(tally: Tally, tallies: Mapping[str, Tally]) -> str:
    total = sum(other.tokens for other in tallies.values())
    return f"{tally.tokens / total:.0%}" if total else "none"


def _failures(entitlement: EntitlementView, tally: Tally) -> list[Finding]:
    """Errors other than 429; a preemptible request that breaks off was evicted, as agreed."""
    errors = Counter(tally.errors)
    told: list[Finding] = []
    if entitlement.service_class is ServiceClass.PREEMPTIBLE and (
        evicted := errors.pop("broken_off", 0)
    ):
        text = f"{entitlement.name} had {evicted} running requests ended to give capacity back"
        told.append(Finding(Verdict.NOTE, text))
    if errors:
        text = f"{entitlement.name} saw errors: {shed_reasons(errors)}"
        told.append(Finding(Verdict.BROKEN, text))
    return told


def _settlement(state: StateView) -> Finding:
    """Whether anything is still held though nobody asks for anything."""
    left = [
        f"{entitlement.name} ({entitlement.in_flight} in flight, "
        f"{entitlement.reserved_tokens} tokens, {entitlement.reserved_kv_bytes} KV bytes)"
        for pool in state.pools
        for entitlement in pool.entitlements
        if entitlement.holds_something
    ]
    left += [f"pool {pool.name}" for pool in state.pools if pool.holds_something]
    if left:
        return Finding(Verdict.BROKEN, f"leases were not settled: {', '.join(left)}")
    text = "every lease was settled: nothing in flight, no tokens and no KV cache reserved"
    return Finding(Verdict.KEPT, text)
