"""The terminal view as text, and the sentences that sum up a run."""

import copy
from collections import Counter
from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from envoy_tokenpools.clock import ManualClock
from envoy_tokenpools.lab.state_view import read_state
from envoy_tokenpools.lab.table import live_table, summary
from envoy_tokenpools.lab.tally import Tally
from envoy_tokenpools.lab.verdict import Finding, Verdict, findings


def entitlement(name: str, service_class: str, **fields: object) -> dict[str, object]:
    """One entitlement of `/state`, at rest."""
    amounts = {"tokens_per_second": 90, "kv_bytes": 1_000, "concurrency": 6}
    return {
        "name": name,
        "service_class": service_class,
        "state": "Bound",
        "in_flight": 0,
        "reserved_tokens": 0,
        "reserved_kv_bytes": 0,
        "baseline": amounts,
        "allocation": amounts,
        "weight": 333.333,
        "debt": 0.0,
        "burst": 0.0,
    } | fields


STATE: dict[str, Any] = {
    "pools": [
        {
            "name": "qwen[8b]",
            "mode": "enforce",
            "degraded": False,
            "capacity": {"tokens_per_second": 240, "kv_bytes": 10_000, "concurrency": 16},
            "in_use": {"tokens_reserved": 0, "kv_bytes": 0, "concurrency": 0},
            "entitlements": [
                entitlement("search-prod", "guaranteed", in_flight=5),
                entitlement("analytics", "elastic", debt=0.125),
                entitlement("batch", "spot", weight=0.5),
                entitlement("idle", "preemptible"),
            ],
        }
    ]
}
SETTLED = copy.deepcopy(STATE)
SETTLED["pools"][0]["entitlements"][0]["in_flight"] = 0


def tally(admitted: int, *, tokens: int, shed: dict[str, int] | None = None) -> Tally:
    """Ten seconds of a tenant."""
    counted = Tally(ManualClock(), ended_ms=10_000, admitted=admitted, tokens=tokens)
    counted.shed = Counter(shed or {})
    counted.sent = admitted + counted.shed.total()
    for waited_ms in range(10, 110):
        counted.saw_first_token(float(waited_ms))
    return counted


def tallies() -> dict[str, Tally]:
    """Three tenants with traffic."""
    return {
        "search-prod": tally(300, tokens=600),
        "analytics": tally(100, tokens=300, shed={"low_priority": 7}),
        "batch": tally(50, tokens=100, shed={"pool_contended": 540, "low_priority": 12}),
    }


def text(renderable: RenderableType) -> str:
    """What a wide terminal shows, without colours."""
    console = Console(file=StringIO(), width=160, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def row(output: str, name: str) -> list[str]:
    """The cells of one entitlement."""
    (line,) = [line for line in output.splitlines() if line.startswith(f"│ {name} ")]
    return [cell.strip() for cell in line.strip("│").split("│")]


def told(seen: dict[str, Tally], state: dict[str, Any], about: str) -> list[Finding]:
    """The findings that begin with a name."""
    found = findings(seen, read_state(state))
    return [finding for finding in found if finding.text.startswith(about)]


def test_the_live_table_has_a_row_per_entitlement() -> None:
    """Class, what is in flight, what was let in and shed, rates, first tokens, and its standing."""
    output = text(live_table(tallies(), STATE))
    guaranteed = ["search-prod", "guaranteed", "5", "300", "0", "60", "59 / 108", "90, 6"]
    assert row(output, "search-prod") == [*guaranteed, "333.3", "-"]
    assert row(output, "analytics")[-1] == "+0.12"
    assert row(output, "batch")[3:5] == ["50", "552"]
    assert "pool_contended 540, low_priority 12" in output
    assert row(output, "idle") == ["idle", "preemptible", "0", *["-"] * 4, "90, 6", "333.3", "-"]


def test_the_live_table_states_the_pool() -> None:
    """Name (brackets are no markup), mode, use and capacity."""
    output = text(live_table(tallies(), STATE))
    assert "10.0 s  pool qwen[8b] (enforce): 0 of 16 sequences" in output
    degraded = copy.deepcopy(STATE)
    degraded["pools"][0]["degraded"] = True
    assert "(enforce, degraded)" in text(live_table({}, degraded))


def test_the_summary_says_who_got_what() -> None:
    """Numbers in a table, and the promises in sentences."""
    output = text(summary(tallies(), SETTLED, backend_peak_waiting=0))
    assert "Who got what in 10.0 s" in output
    cells = ["batch", "spot", "602", "50", "552", "100", "10", "59 / 108"]
    assert row(output, "batch") == cells
    lines = output.splitlines()
    for sentence in (
        "✓ search-prod (guaranteed) was never refused: 300 requests let in, 60% of all tokens,",
        "· analytics (elastic) shared by weight, refused 7 times with 429",
        "· batch (spot) got what was left, refused 552 times with 429 and told when to come back",
        "· the backend's own queue never held more than 0 sequences",
        "✓ every lease was settled: nothing in flight, no tokens and no KV cache reserved",
    ):
        assert any(line.startswith(sentence) for line in lines), sentence
    assert "first token after 59 ms (99 of 100 within 108 ms)" in output
    assert "idle (preemptible)" not in output


def test_a_guaranteed_tenant_may_be_refused_above_its_baseline() -> None:
    """Its own limits are the reason; the promise held."""
    seen = {"search-prod": tally(9, tokens=9, shed={"concurrency_limit": 3})}
    (finding,) = told(seen, SETTLED, "search-prod")
    assert finding.verdict is Verdict.KEPT
    assert "never refused inside its baseline, 3 times above it (concurrency_limit 3)" in (
        finding.text
    )


@pytest.mark.parametrize("reason", ["pool_contended", "low_priority", "unstated"])
def test_a_guaranteed_tenant_refused_for_others_is_a_broken_promise(reason: str) -> None:
    """And the summary does not hide it."""
    seen = {"search-prod": tally(9, tokens=9, shed={"concurrency_limit": 3, reason: 2})}
    (finding,) = told(seen, SETTLED, "search-prod")
    assert finding.verdict is Verdict.BROKEN
    assert "refused 2 times inside its baseline" in finding.text
    assert "✗ search-prod" in text(summary(seen, SETTLED))


@pytest.mark.parametrize(
    ("field", "value"), [("in_flight", 1), ("reserved_tokens", 300), ("reserved_kv_bytes", 5)]
)
def test_a_lease_that_is_left_over_is_reported(field: str, value: int) -> None:
    """With the tenant that holds it."""
    leaking = copy.deepcopy(SETTLED)
    leaking["pools"][0]["entitlements"][2][field] = value
    (finding,) = told(tallies(), leaking, "leases were not settled")
    assert finding.verdict is Verdict.BROKEN
    assert "batch" in finding.text


@pytest.mark.parametrize("field", ["tokens_reserved", "kv_bytes", "concurrency"])
def test_a_pool_that_still_counts_something_is_reported(field: str) -> None:
    """Though no entitlement owns up to it."""
    leaking = copy.deepcopy(SETTLED)
    leaking["pools"][0]["in_use"][field] = 1
    (finding,) = told(tallies(), leaking, "leases were not settled")
    assert "pool qwen[8b]" in finding.text


def test_errors_are_findings() -> None:
    """Except that a preemptible request may be ended, which its class allows."""
    seen = {"batch": tally(9, tokens=9), "idle": tally(9, tokens=9)}
    for tenant in seen.values():
        tenant.errors = Counter({"broken_off": 2, "503": 1})
    assert told(seen, SETTLED, "batch saw") == [
        Finding(Verdict.BROKEN, "batch saw errors: broken_off 2, 503 1")
    ]
    assert told(seen, SETTLED, "idle had") == [
        Finding(Verdict.NOTE, "idle had 2 running requests ended to give capacity back")
    ]
    assert told(seen, SETTLED, "idle saw") == [Finding(Verdict.BROKEN, "idle saw errors: 503 1")]


def test_shadow_mode_is_said() -> None:
    """Else the numbers would look like a failure."""
    shadow = copy.deepcopy(SETTLED)
    shadow["pools"][0]["mode"] = "shadow"
    (finding,) = told({}, shadow, "pool qwen[8b] is in shadow mode")
    assert finding.verdict is Verdict.NOTE


def test_a_tenant_whose_answers_are_not_streamed_has_no_first_token() -> None:
    """The sentence leaves it out, the table shows a dash."""
    whole = Tally(ManualClock(), ended_ms=1_000, sent=3, admitted=3, tokens=9)
    (finding,) = told({"batch": whole}, SETTLED, "batch")
    assert finding.text.endswith("3 requests let in, 100% of all tokens")
    assert row(text(summary({"batch": whole}, SETTLED)), "batch")[-1] == "-"


def test_a_run_without_tokens_has_no_shares() -> None:
    """Nothing is divided by zero."""
    (finding,) = told({"batch": tally(1, tokens=0)}, SETTLED, "batch")
    assert "none of all tokens" in finding.text


def test_a_state_of_another_form_is_refused() -> None:
    """Rather than shown as zeros."""
    with pytest.raises(msgspec.ValidationError):
        live_table({}, {"pools": [{"name": "qwen"}]})
