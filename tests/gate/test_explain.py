"""Decisions that can be asked for: which rule decided, by what numbers, and what is forgotten."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.core.admission import Lease, Reason, Refusal, Resource
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.ledger import Ledger
from envoy_tokenpools.core.pool import EntitlementState, Limits, Mode, Pool, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Standing
from envoy_tokenpools.gate.explain import Basis, DecisionLog
from envoy_tokenpools.gate.order import Order
from envoy_tokenpools.logs import JsonFormatter
from envoy_tokenpools.observer import Ending, Explanation, Outcome, Settled, Shortage
from envoy_tokenpools.openai.usage import UsageSource
from tests.support.gate import configured, order_for
from tests.support.pools import amount, claim, cost, entitlement, pool, refused, terms

ELASTIC = entitlement("a", ServiceClass.ELASTIC, amount(100, 4, 8_000), slo_target_ms=500)
OTHER = entitlement("b", ServiceClass.ELASTIC, amount(100, 4, 8_000), slo_target_ms=1_500)
POOL = pool(amount(200, 8, 16_000), ELASTIC, OTHER)
USABLE = amount(200, 6, 12_000)
TERMS = terms("a", weight=50.0, share=amount(90, 3, 7_000), limits=Limits(concurrency=4))
STANDING = Standing(debt=0.25, burst=1.0, weight=50.0)
WHAT = Cost(prompt_tokens=30, output_tokens=70, kv_bytes=400, concurrency=2)
CLAIM = claim("lease-1", WHAT, TERMS, USABLE)
LEASE = Lease("lease-1", "a", WHAT, True, False, False, 0, 0, 60_000)  # noqa: FBT003
SHORT = Refusal(
    Reason.POOL_CONTENDED, Resource.CONCURRENCY, need=2, available=1, retry_after_ms=850
)
SETTLED = Settled(
    pool="pool",
    entitlement="a",
    service_class=ServiceClass.ELASTIC,
    ending=Ending.COMPLETED,
    prompt_tokens=31,
    prompt_source=UsageSource.REPORTED,
    completion_tokens=20,
    completion_source=UsageSource.COUNTED,
    estimated_prompt_tokens=30,
    held_ms=1_200,
)


def ordered(request_id: str = "id-1", *, of: Pool = POOL, enforce: bool = True) -> Order:
    """A request with an id, whose prompt is nobody's business."""
    body = json.dumps({"model": "m", "prompt": "the secret prompt", "max_tokens": 5}).encode()
    order = order_for(configured(of), body, enforce=enforce)
    return replace(order, request_id=request_id)


def basis(judged: Lease | Refusal, waited_ms: int = 0) -> Basis:
    """What the store said of `CLAIM`."""
    return Basis(CLAIM, STANDING, judged, waited_ms)


def added(
    judged: Lease | Refusal | None,
    outcome: Outcome = Outcome.ADMITTED,
    reason: str = "",
    *,
    waited_ms: int = 0,
    order: Order | None = None,
) -> DecisionLog:
    """A log with one decision, made at 1,000 ms."""
    decisions = DecisionLog(10)
    because = None if judged is None else basis(judged, waited_ms)
    decisions.add(order or ordered(), outcome, reason, 1_000, because)
    return decisions


def shown(decisions: DecisionLog, request_id: str = "id-1", now_ms: int = 3_500) -> Explanation:
    """The explanation that must be there."""
    explanation = decisions.explain(request_id, now_ms)
    assert explanation is not None
    return explanation


# What it tells


def test_a_refusal_tells_everything_that_it_was_made_of() -> None:
    """Who, when, by which rule, with which weight, and what was short."""
    told = shown(added(SHORT, Outcome.SHED, "pool_contended"))
    assert (told.request_id, told.at_ms, told.age_ms) == ("id-1", 1_000, 2_500)
    assert (told.pool, told.entitlement, told.service_class) == ("pool", "a", ServiceClass.ELASTIC)
    assert (told.state, told.mode) == (EntitlementState.BOUND, Mode.ENFORCE)
    assert (told.outcome, told.reason) == (Outcome.SHED, "pool_contended")
    assert told.rule == "rule 5b: the pool has no free capacity for it"
    assert (told.cost, told.usable, told.share) == (WHAT, USABLE, TERMS.share)
    assert (told.guarantee, told.limits) == (Resources.NONE, Limits(concurrency=4))
    assert told.shortage == Shortage(Resource.CONCURRENCY, need=2, available=1, retry_after_ms=850)
    assert (told.inside_share, told.inside_guarantee) == (None, False)
    assert (told.waited_ms, told.ended) == (0, None)


def test_the_weight_is_told_with_its_factors() -> None:
    """Of the targets of the pool as it was then."""
    priority = shown(added(LEASE)).priority
    assert priority is not None
    assert (priority.weight, priority.debt, priority.burst) == (50.0, 0.25, 1.0)
    assert (priority.slo_target_ms, priority.mean_slo_ms) == (500, 1_000.0)
    factors = priority.factors
    assert (factors.service_class, factors.slo, factors.burst, factors.debt) == pytest.approx(
        (100.0, 0.5, 0.5, 2.0)
    )


@pytest.mark.parametrize(
    ("within_guarantee", "within_share", "rule"),
    [
        (True, True, "rule 5a: it is inside its reserved baseline, whatever else the pool holds"),
        (True, False, "rule 5a: it is inside its reserved baseline, whatever else the pool holds"),
        (False, True, "rule 5b: it is inside its share, and the pool has free capacity for it"),
        (
            False,
            False,
            "rule 5c: it is beyond its share, but passes nobody, and the pool has free capacity for it",
        ),
    ],
)
def test_an_admission_tells_by_what_right(
    rule: str, *, within_guarantee: bool, within_share: bool
) -> None:
    """A reserved baseline comes before a share, and that before what is left over."""
    lease = replace(LEASE, within_guarantee=within_guarantee, within_share=within_share)
    told = shown(added(lease))
    assert (told.rule, told.shortage) == (rule, None)
    assert (told.inside_share, told.inside_guarantee) == (within_share, within_guarantee)


@pytest.mark.parametrize(
    ("reason", "rule", "inside_share", "inside_guarantee"),
    [
        (Reason.CONCURRENCY_LIMIT, "rule 4: ", None, None),
        (Reason.KV_CACHE_LIMIT, "rule 4: ", None, None),
        (Reason.TOKEN_RATE_LIMIT, "rule 4: ", None, None),
        (Reason.POOL_CONTENDED, "rule 5b: ", None, False),
        (Reason.LOW_PRIORITY, "rule 5c: ", False, False),
    ],
)
def test_every_reason_of_a_refusal_has_its_rule(
    reason: Reason, rule: str, *, inside_share: bool | None, inside_guarantee: bool | None
) -> None:
    """And what the reason says about share and guarantee."""
    told = shown(added(replace(SHORT, reason=reason), Outcome.SHED, reason.value))
    assert told.rule.startswith(rule)
    assert (told.inside_share, told.inside_guarantee) == (inside_share, inside_guarantee)


def test_in_shadow_mode_it_tells_what_was_not_enforced() -> None:
    """Admitted, with the rule and the shortage that would have refused it."""
    shadow = replace(POOL, mode=Mode.SHADOW)
    decisions = added(
        replace(LEASE, shadowed=SHORT), reason="pool_contended", order=ordered(of=shadow)
    )
    told = shown(decisions)
    assert (told.mode, told.outcome) == (Mode.SHADOW, Outcome.ADMITTED)
    assert told.rule == "not enforced; rule 5b: the pool has no free capacity for it"
    assert told.shortage is not None
    assert told.shortage.need == 2


def test_a_request_that_could_not_be_refused_any_more_is_shadowed_too() -> None:
    """Where Envoy only lets us observe."""
    assert shown(added(LEASE, order=ordered(enforce=False))).mode is Mode.SHADOW


@pytest.mark.parametrize(
    ("judged", "outcome", "end"),
    [(LEASE, Outcome.ADMITTED, "admitted"), (SHORT, Outcome.SHED, "shed")],
)
def test_a_wait_is_told_with_its_end(judged: Lease | Refusal, outcome: Outcome, end: str) -> None:
    """How long, and what came of it."""
    told = shown(added(judged, outcome, waited_ms=420))
    assert told.waited_ms == 420
    assert told.rule.endswith(f"; {end} after a wait of 420 ms")


@pytest.mark.parametrize("state", [EntitlementState.PENDING, EntitlementState.EXPIRED])
def test_an_entitlement_without_capacity_is_rule_3(state: EntitlementState) -> None:
    """Nothing was priced or weighed."""
    order = ordered()
    order = replace(order, entitlement=replace(order.entitlement, state=state))
    reason = f"entitlement_{state.value.lower()}"
    told = shown(added(None, Outcome.REJECTED, reason, order=order))
    assert told.rule.startswith(f"rule 3: its entitlement is {state.value}")
    assert (told.priority, told.cost, told.share, told.shortage) == (None, None, None, None)


@pytest.mark.parametrize(
    ("reason", "words"),
    [("store_unavailable", "shared state"), ("context_length_exceeded", "context_length_exceeded")],
)
def test_what_no_rule_decided_is_said_to_be_so(reason: str, words: str) -> None:
    """A store that is away, and a request that fits nowhere."""
    told = shown(added(None, Outcome.REJECTED, reason))
    assert told.rule.startswith("none: ")
    assert words in told.rule


# What happens later


def test_the_end_of_a_request_is_added_to_its_decision() -> None:
    """With what it was charged."""
    decisions = added(LEASE)
    decisions.settled(ordered(), LEASE, SETTLED)
    told = shown(decisions)
    assert told.outcome is Outcome.ADMITTED
    assert told.ended is not None
    assert (told.ended.ending, told.ended.held_ms) == (Ending.COMPLETED, 1_200)
    assert (told.ended.prompt_tokens, told.ended.prompt_source) == (31, UsageSource.REPORTED)
    assert (told.ended.completion_tokens, told.ended.completion_source) == (20, UsageSource.COUNTED)


def test_an_evicted_request_says_so() -> None:
    """It keeps the rule by which it was let in."""
    decisions = added(LEASE)
    decisions.settled(ordered(), LEASE, replace(SETTLED, ending=Ending.EVICTED))
    told = shown(decisions)
    assert (told.outcome, told.reason) == (Outcome.EVICTED, "evicted")
    assert told.rule.startswith("rule 5b: ")
    assert told.rule.endswith("; later evicted, to give its capacity back to a reserved baseline")


def test_another_requests_end_is_not_taken_for_its_own() -> None:
    """Clients may send one id twice: the lease tells them apart; and a refused one never ends."""
    decisions = added(LEASE)
    decisions.settled(ordered(), replace(LEASE, lease_id="lease-0"), SETTLED)
    decisions.settled(ordered("other"), LEASE, SETTLED)
    assert shown(decisions).ended is None
    for judged in (SHORT, None):
        decisions = added(judged, Outcome.SHED)
        decisions.settled(ordered(), LEASE, SETTLED)
        assert shown(decisions).ended is None


# What is kept


def test_of_one_id_the_newest_decision_is_told() -> None:
    """A client that retries with the same id asks about its last try."""
    decisions = added(SHORT, Outcome.SHED)
    decisions.add(ordered(), Outcome.ADMITTED, "", 2_000, basis(LEASE))
    told = shown(decisions)
    assert (told.outcome, told.at_ms) == (Outcome.ADMITTED, 2_000)


def test_an_id_that_comes_again_is_as_young_as_its_newest_decision() -> None:
    """Others are forgotten before it."""
    decisions = DecisionLog(2)
    for request_id in ("one", "two", "one", "three"):
        decisions.add(ordered(request_id), Outcome.ADMITTED, "", 0, basis(LEASE))
    known = [name for name in ("one", "two", "three") if decisions.explain(name, 0) is not None]
    assert known == ["one", "three"]


@given(st.integers(0, 5), st.lists(st.sampled_from("abcdefgh"), max_size=30))
def test_the_last_different_ids_are_kept_and_no_others(last: int, ids: list[str]) -> None:
    """Whatever order they come in; 0 keeps none."""
    decisions = DecisionLog(last)
    order = ordered()
    for at_ms, request_id in enumerate(ids):
        decisions.add(replace(order, request_id=request_id), Outcome.SHED, "", at_ms, basis(SHORT))
    newest = {request_id: at_ms for at_ms, request_id in enumerate(ids)}
    kept = sorted(newest, key=lambda name: newest[name], reverse=True)[:last]
    found = {name: decisions.explain(name, 100) for name in "abcdefgh"}
    assert {name: told.at_ms for name, told in found.items() if told is not None} == {
        name: newest[name] for name in kept
    }


def test_a_request_without_an_id_is_not_kept() -> None:
    """Nobody could ask for it."""
    decisions = added(LEASE, order=ordered(""))
    assert decisions.explain("", 0) is None


def test_nothing_of_a_request_but_its_numbers_is_kept() -> None:
    """No text of the prompt is reachable from the log."""
    decisions = added(LEASE)
    seen: list[object] = []
    todo: list[object] = list(decisions._decisions.values())
    while todo:
        thing = todo.pop()
        seen.append(thing)
        slots = getattr(thing, "__slots__", ())
        todo += [getattr(thing, name) for name in slots]
        if isinstance(thing, Mapping):
            todo += thing.values()
    assert not any(isinstance(thing, Order) for thing in seen)
    assert "secret" not in repr(seen)


# The log


def test_a_decision_is_one_line_of_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    """With the explanation's fields, in JSON; also one without an id, and where none are kept."""
    caplog.set_level(logging.DEBUG, "envoy_tokenpools.gate.explain")
    decisions = DecisionLog(0)
    decisions.add(ordered(""), Outcome.SHED, "pool_contended", 1_000, basis(SHORT))
    (record,) = caplog.records
    line: dict[str, Any] = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["level"]) == ("decided", "debug")
    assert (line["outcome"], line["reason"]) == ("shed", "pool_contended")
    assert line["rule"].startswith("rule 5b: ")
    assert (line["entitlement"], line["service_class"]) == ("a", "elastic")
    assert line["shortage"] == {
        "resource": "concurrency",
        "need": 2,
        "available": 1,
        "retry_after_ms": 850,
    }
    assert line["priority"]["factors"]["debt"] == pytest.approx(2.0)
    assert "secret" not in caplog.text


def test_no_line_is_made_above_the_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    """A decision per request would drown everything else."""
    caplog.set_level(logging.INFO)
    added(LEASE)
    assert caplog.records == []


def test_what_is_told_is_what_the_store_decides_by() -> None:
    """A refusal of real books comes out with its numbers."""
    ledger = Ledger()
    first = claim("lease-0", cost(10, sequences=6), TERMS, USABLE)
    decisions = DecisionLog(1)
    judged = refused(ledger.reserve(first, 0))
    decisions.add(ordered(), Outcome.SHED, judged.reason.value, 0, Basis(first, STANDING, judged))
    told = shown(decisions)
    assert told.rule == "rule 4: its entitlement's concurrency limit is reached"
    assert told.shortage is not None
    assert (told.shortage.need, told.shortage.available) == (6, 4)
