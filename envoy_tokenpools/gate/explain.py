"""
The latest decisions of this process, each of which can be asked for by its request's id.

Rules of this file: nothing of a request but its id and its numbers is kept. To remember a decision costs next to
nothing, since it only refers to what the gate made anyway; it is put into words when somebody asks.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from envoy_tokenpools.core.admission import Claim, Lease, Reason, Refusal
from envoy_tokenpools.core.pool import Entitlement, Mode, Pool
from envoy_tokenpools.core.tick import Standing, is_served
from envoy_tokenpools.core.weight import mean_slo_ms, weight_factors
from envoy_tokenpools.gate.order import Order
from envoy_tokenpools.observer import (
    Ended,
    Ending,
    Explanation,
    Outcome,
    Priority,
    Settled,
    Shortage,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Basis:
    """
    What a decision was made of.

    Attributes:
        claim: what was asked of the store last.
        standing: where the entitlement stood.
        judged: what the store said.
        waited_ms: how long the request waited for capacity before that.
    """

    claim: Claim
    standing: Standing
    judged: Lease | Refusal
    waited_ms: int = 0


class DecisionLog:
    """Keeps the last decisions by request id, and writes each into the log if that is at its debug level."""

    def __init__(self, last: int) -> None:
        """
        Begin without any.

        Args:
            last: how many decisions are kept; 0 keeps none.
        """
        self._last = last
        self._decisions: OrderedDict[str, _Decision] = OrderedDict()

    def add(
        self, order: Order, outcome: Outcome, reason: str, at_ms: int, basis: Basis | None = None
    ) -> None:
        """
        A request was decided on.

        Args:
            order: what was asked; without a request id it is only written into the log.
            outcome: what became of it.
            reason: as the metrics have it.
            at_ms: pool time.
            basis: None if it got no further than its entitlement's state, or if the store could not be asked.
        """
        is_logged = log.isEnabledFor(logging.DEBUG)
        request_id, last = order.request_id, self._last
        is_kept = last > 0 and request_id != ""
        if not (is_kept or is_logged):
            return
        decision = _Decision(
            request_id,
            at_ms,
            order.pool,
            order.entitlement,
            Mode.SHADOW if not order.enforce else order.pool.mode,
            outcome,
            reason,
            basis,
        )
        if is_logged:
            log.debug("decided", extra=msgspec.to_builtins(_explanation(decision, at_ms)))
        if is_kept:
            decisions = self._decisions
            decisions[request_id] = decision
            # Of an id that came again, the newest decision is as young as it is.
            decisions.move_to_end(request_id)
            if len(decisions) > last:
                decisions.popitem(last=False)

    def settled(self, order: Order, lease: Lease, event: Settled) -> None:
        """An admitted request has ended."""
        decision = self._decisions.get(order.request_id)
        if decision is None or decision.basis is None:
            return
        judged = decision.basis.judged
        # Another request may have taken the id since.
        if isinstance(judged, Lease) and judged.lease_id == lease.lease_id:
            decision.settled = event

    def explain(self, request_id: str, now_ms: int) -> Explanation | None:
        """The newest decision on a request of this id; None if it is not known, or not any more."""
        decision = self._decisions.get(request_id)
        return _explanation(decision, now_ms) if decision is not None else None


@dataclass(slots=True)
class _Decision:
    """Not frozen: that would double the time that it takes to make one."""

    request_id: str
    at_ms: int
    pool: Pool
    entitlement: Entitlement
    mode: Mode
    outcome: Outcome
    reason: str
    basis: Basis | None
    settled: Settled | None = None


def _explanation(decision: _Decision, now_ms: int) -> Explanation:
    basis, entitlement, settled = decision.basis, decision.entitlement, decision.settled
    claim = basis.claim if basis is not None else None
    terms = claim.terms if claim is not None else None
    judged = basis.judged if basis is not None else None
    was_evicted = settled is not None and settled.ending is Ending.EVICTED
    return Explanation(
        request_id=decision.request_id,
        at_ms=decision.at_ms,
        age_ms=max(0, now_ms - decision.at_ms),
        pool=decision.pool.name,
        entitlement=entitlement.name,
        service_class=entitlement.service_class,
        state=entitlement.state,
        mode=decision.mode,
        outcome=Outcome.EVICTED if was_evicted else decision.outcome,
        reason="evicted" if was_evicted else decision.reason,
        rule=_rule(decision, was_evicted=was_evicted),
        priority=_priority(decision.pool, entitlement, basis.standing) if basis else None,
        cost=claim.cost if claim is not None else None,
        usable=claim.usable if claim is not None else None,
        share=terms.share if terms is not None else None,
        guarantee=terms.guarantee if terms is not None else None,
        limits=terms.limits if terms is not None else None,
        inside_share=_inside_share(judged),
        inside_guarantee=_inside_guarantee(judged),
        shortage=_shortage(judged),
        waited_ms=basis.waited_ms if basis is not None else 0,
        ended=_ended(settled) if settled is not None else None,
    )


def _priority(pool: Pool, entitlement: Entitlement, standing: Standing) -> Priority:
    mean = mean_slo_ms(pool.entitlements.values())
    factors = weight_factors(
        entitlement.service_class,
        slo_target_ms=entitlement.slo_target_ms,
        mean_slo_ms=mean,
        burst=standing.burst,
        debt=standing.debt,
        gains=pool.gains,
    )
    return Priority(
        weight=standing.weight,
        factors=factors,
        debt=standing.debt,
        burst=standing.burst,
        slo_target_ms=entitlement.slo_target_ms,
        mean_slo_ms=mean,
    )


def _ended(event: Settled) -> Ended:
    return Ended(
        ending=event.ending,
        prompt_tokens=event.prompt_tokens,
        prompt_source=event.prompt_source,
        completion_tokens=event.completion_tokens,
        completion_source=event.completion_source,
        held_ms=event.held_ms,
    )


def _refusal(judged: Lease | Refusal | None) -> Refusal | None:
    """What the store had against it, also where that was not enforced."""
    return judged.shadowed if isinstance(judged, Lease) else judged


def _shortage(judged: Lease | Refusal | None) -> Shortage | None:
    refusal = _refusal(judged)
    if refusal is None:
        return None
    return Shortage(refusal.resource, refusal.need, refusal.available, refusal.retry_after_ms)


def _inside_share(judged: Lease | Refusal | None) -> bool | None:
    """A refusal tells it only where it was the reason."""
    if isinstance(judged, Lease):
        return judged.within_share
    return False if judged is not None and judged.reason is Reason.LOW_PRIORITY else None


def _inside_guarantee(judged: Lease | Refusal | None) -> bool | None:
    """Inside of it, the pool is no reason to refuse."""
    if isinstance(judged, Lease):
        return judged.within_guarantee
    pool_reasons = (Reason.POOL_CONTENDED, Reason.LOW_PRIORITY)
    return False if judged is not None and judged.reason in pool_reasons else None


# ---------------------------------------------------------------------- in words

_REFUSED = {
    Reason.CONCURRENCY_LIMIT: "rule 4: its entitlement's concurrency limit is reached",
    Reason.KV_CACHE_LIMIT: "rule 4: its entitlement's KV cache limit is reached",
    Reason.TOKEN_RATE_LIMIT: "rule 4: its entitlement's token rate is used up",
    Reason.POOL_CONTENDED: "rule 5b: the pool has no free capacity for it",
    Reason.LOW_PRIORITY: "rule 5c: it is beyond its share, and requests with a better claim were refused lately",
}


def _rule(decision: _Decision, *, was_evicted: bool) -> str:
    basis = decision.basis
    if basis is None:
        return _rule_without_store(decision)
    judged = basis.judged
    if isinstance(judged, Refusal):
        rule = _REFUSED[judged.reason]
    elif judged.shadowed is not None:
        rule = f"not enforced; {_REFUSED[judged.shadowed.reason]}"
    else:
        rule = _admitting_rule(judged)
    if basis.waited_ms:
        end = "admitted" if isinstance(judged, Lease) else "shed"
        rule = f"{rule}; {end} after a wait of {basis.waited_ms} ms"
    if was_evicted:
        rule = f"{rule}; later evicted, to give its capacity back to a reserved baseline"
    return rule


def _admitting_rule(lease: Lease) -> str:
    if lease.within_guarantee:
        return "rule 5a: it is inside its reserved baseline, whatever else the pool holds"
    if lease.within_share:
        return "rule 5b: it is inside its share, and the pool has free capacity for it"
    return (
        "rule 5c: it is beyond its share, but passes nobody, and the pool has free capacity for it"
    )


def _rule_without_store(decision: _Decision) -> str:
    if not is_served(decision.entitlement):
        state = decision.entitlement.state.value
        return f"rule 3: its entitlement is {state}, so that no capacity stands behind it"
    if decision.reason == "store_unavailable":
        return "none: the shared state could not be asked"
    return f"none: the request cannot be served, whatever the load ({decision.reason})"
