"""
The terminal view of a run: a table while it lasts, and what it has shown at its end.

The only file that imports rich, which is an optional dependency.
"""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.lab.state_view import EntitlementView, PoolView, StateView, read_state
from envoy_tokenpools.lab.tally import Tally
from envoy_tokenpools.lab.verdict import Verdict, findings, shed_reasons

NOTHING = "-"

_CLASS_STYLES = {
    ServiceClass.DEDICATED: "bold green",
    ServiceClass.GUARANTEED: "green",
    ServiceClass.ELASTIC: "cyan",
    ServiceClass.SPOT: "yellow",
    ServiceClass.PREEMPTIBLE: "magenta",
}
_MARKS = {
    Verdict.KEPT: ("✓ ", "green"),
    Verdict.BROKEN: ("✗ ", "bold red"),
    Verdict.NOTE: ("· ", ""),
}


def live_table(tallies: Mapping[str, Tally], state: Mapping[str, object]) -> Table:
    """
    Who has what at this moment: a row per entitlement, grouped by pool.

    Args:
        tallies: what the clients saw so far, by entitlement; one without traffic may be missing.
        state: the JSON of the filter's `/state`.
    """
    report = read_state(state)
    table = Table(title=_title(tallies, report), title_justify="left", expand=False)
    table.add_column("entitlement")
    table.add_column("class")
    for heading in (
        "in flight",
        "admitted",
        "shed",
        "tokens/s",
        "first token\np50 / p99 ms",
        "allocation\ntokens/s, seqs",
        "weight",
        "debt",
    ):
        table.add_column(heading, justify="right")
    for pool in report.pools:
        for entitlement in pool.entitlements:
            tally = tallies.get(entitlement.name)
            table.add_row(
                *_identity(entitlement),
                str(entitlement.in_flight),
                *_counts(tally),
                NOTHING if tally is None else f"{tally.tokens_per_second:.0f}",
                _first_token(tally),
                _allocation(entitlement.allocation),
                f"{entitlement.weight:.4g}",
                _debt(entitlement),
            )
        table.add_section()
    return table


def summary(
    tallies: Mapping[str, Tally],
    state: Mapping[str, object],
    *,
    backend_peak_waiting: int | None = None,
) -> RenderableType:
    """
    What a run has shown, for somebody who has never heard of token pools.

    Args:
        tallies: what the clients saw, ended.
        state: the JSON of the filter's `/state`, fetched after the last request has ended.
        backend_peak_waiting: the longest queue of the backend itself, if it is known.
    """
    report = read_state(state)
    lines: list[RenderableType] = [_totals(tallies, report)]
    for finding in findings(tallies, report, backend_peak_waiting=backend_peak_waiting):
        mark, style = _MARKS[finding.verdict]
        lines.append(Text.assemble((mark, style), finding.text))
    return Group(*lines)


def _totals(tallies: Mapping[str, Tally], report: StateView) -> Table:
    seconds = max((tally.elapsed_ms for tally in tallies.values()), default=0) / 1_000
    table = Table(title=f"Who got what in {seconds:.1f} s", title_justify="left", expand=False)
    table.add_column("entitlement")
    table.add_column("class")
    for heading in ("sent", "admitted", "shed", "tokens", "tokens/s", "first token\np50 / p99 ms"):
        table.add_column(heading, justify="right")
    for pool in report.pools:
        for entitlement in pool.entitlements:
            tally = tallies.get(entitlement.name)
            table.add_row(
                *_identity(entitlement),
                NOTHING if tally is None else str(tally.sent),
                *_counts(tally),
                NOTHING if tally is None else str(tally.tokens),
                NOTHING if tally is None else f"{tally.tokens_per_second:.0f}",
                _first_token(tally),
            )
        table.add_section()
    return table


def _title(tallies: Mapping[str, Tally], report: StateView) -> str:
    seconds = max((tally.elapsed_ms for tally in tallies.values()), default=0) / 1_000
    return "\n".join(f"{seconds:5.1f} s  {_pool_line(pool)}" for pool in report.pools)


def _pool_line(pool: PoolView) -> str:
    marks = [mark for mark, on in ((pool.mode, True), ("degraded", pool.degraded)) if on]
    return (
        f"pool {escape(pool.name)} ({', '.join(marks)}): "
        f"{pool.in_use.concurrency} of {pool.capacity.concurrency} sequences, "
        f"{pool.in_use.tokens_reserved} tokens reserved, "
        f"capacity {pool.capacity.tokens_per_second} tokens/s"
    )


def _identity(entitlement: EntitlementView) -> tuple[str, Text]:
    service_class = entitlement.service_class
    return escape(entitlement.name), Text(service_class.value, _CLASS_STYLES[service_class])


def _counts(tally: Tally | None) -> tuple[str, str]:
    """Admitted and shed, the latter with its reasons."""
    if tally is None:
        return NOTHING, NOTHING
    shed = tally.shed.total()
    reasons = f"\n{escape(shed_reasons(tally.shed))}" if shed else ""
    return str(tally.admitted), f"{shed}{reasons}"


def _first_token(tally: Tally | None) -> str:
    median = tally.first_token_ms(0.5) if tally else None
    slowest = tally.first_token_ms(0.99) if tally else None
    if median is None or slowest is None:
        return NOTHING
    return f"{median:.0f} / {slowest:.0f}"


def _allocation(allocation: Resources) -> str:
    return f"{allocation.tokens_per_second}, {allocation.concurrency}"


def _debt(entitlement: EntitlementView) -> str:
    """Only elastic entitlements have one."""
    if entitlement.service_class is not ServiceClass.ELASTIC:
        return NOTHING
    return f"{entitlement.debt:+.2f}"
