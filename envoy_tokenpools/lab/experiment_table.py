"""
What the runs of an experiment came to, as tables for the terminal.
"""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from envoy_tokenpools.lab.checks import Check, Judgement
from envoy_tokenpools.lab.measures import Measured
from envoy_tokenpools.lab.record import Decisions, Result, RunRecord
from envoy_tokenpools.lab.scenario import Role

NOTHING = "-"


def report(records: Mapping[str, RunRecord], judgements: Sequence[Judgement]) -> RenderableType:
    """All of it: who got what, what was checked, and a sentence per run."""
    parts: list[RenderableType] = [who_got_what(records)]
    parts += [_who_decided(each) for each in records.values() if _is_worth_telling(each.decisions)]
    if any(judgement.checks for judgement in judgements):
        parts.append(what_was_checked(judgements))
    parts += [_verdict(judgement) for judgement in judgements if judgement.checks]
    return Group(*parts)


def who_got_what(records: Mapping[str, RunRecord]) -> Table:
    """A row per run and entitlement; times as written in the scenario."""
    table = Table(title="Who got what", title_justify="left")
    for heading in ("run", "entitlement", "class"):
        table.add_column(heading)
    for heading in (
        "completed",
        "shed",
        "evicted",
        "failed",
        "first token\np50 / p99 ms",
        "with retries\np50 / p99 ms",
        "tokens in\nfull answers",
        "share",
        "slots\nin use",
    ):
        table.add_column(heading, justify="right")
    for record in records.values():
        measured = Measured(record)
        in_use = measured.utilisation()
        shares = measured.shares()
        for index, (name, party) in enumerate(record.parties.items()):
            table.add_row(
                "" if index else escape(record.run),
                escape(name),
                party.service_class.value,
                str(measured.count(name, Result.COMPLETED)),
                str(measured.count(name, Result.SHED)),
                str(measured.count(name, Result.EVICTED)),
                str(measured.count(name, Result.FAILED)),
                _first_token(measured, name),
                _pair(measured.served_after_ms(name, 0.5), measured.served_after_ms(name, 0.99)),
                str(measured.tokens(name, Result.COMPLETED)),
                f"{shares[name]:.1%}",
                NOTHING if index or in_use is None else f"{in_use:.1%}",
            )
        table.add_section()
    return table


def what_was_checked(judgements: Sequence[Judgement]) -> Table:
    """A row per run and check."""
    table = Table(title="What was checked", title_justify="left")
    table.add_column("run")
    table.add_column("check")
    table.add_column("measured", justify="right")
    table.add_column("limit", justify="right")
    table.add_column("")
    for judgement in judgements:
        for index, check in enumerate((*judgement.checks, *judgement.proofs)):
            table.add_row(
                "" if index else escape(judgement.run),
                escape(check.name),
                _value(check.measured, check.unit),
                f"{check.bound.value} {_value(check.limit, check.unit)}",
                Text("✓", "green") if check.passed else Text("✗", "bold red"),
            )
        table.add_section()
    return table


def _is_worth_telling(decisions: Sequence[Decisions]) -> bool:
    """One replica that always had its books has decided everything."""
    return len(decisions) > 1 or any(each.alone for each in decisions)


def _who_decided(record: RunRecord) -> Text:
    """How the requests of a run were spread over the replicas, and whether the shared books answered."""
    made = ", ".join(str(each.made) for each in record.decisions)
    alone = sum(each.alone for each in record.decisions)
    said = f" decisions by {len(record.decisions)} replica(s): {made}"
    if alone:
        return Text.assemble(
            (record.run, "bold"), said, (f"; {alone} of them without the shared books", "bold red")
        )
    return Text.assemble((record.run, "bold"), said)


def _verdict(judgement: Judgement) -> Text:
    failed = [check for check in (*judgement.checks, *judgement.proofs) if not check.passed]
    of = len(judgement.checks) + len(judgement.proofs)
    mark = ("✓ ", "green") if judgement.as_expected else ("✗ ", "bold red")
    if judgement.role is Role.CONTROL:
        lost = sum(not check.passed for check in judgement.checks)
        said = (
            f"fails {lost} of {len(judgement.checks)} checks, as it must"
            if judgement.as_expected
            else "is there to fail, and did not as it should"
        )
    elif judgement.role is Role.REPORTED:
        mark = ("· ", "")
        said = f"keeps {of - len(failed)} of {of} checks; it is reported, not required"
    else:
        said = f"keeps {of - len(failed)} of {of} checks"
    return Text.assemble(mark, (judgement.run, "bold"), f" {said}{_named(failed, judgement)}")


def _named(failed: Sequence[Check], judgement: Judgement) -> str:
    if not failed or judgement.role is Role.CONTROL:
        return ""
    return ": not " + "; ".join(check.name for check in failed)


def _first_token(measured: Measured, name: str) -> str:
    always = measured.whole.__contains__
    return _pair(
        measured.first_token_ms([name], 0.5, within=always),
        measured.first_token_ms([name], 0.99, within=always),
    )


def _pair(median: float | None, slowest: float | None) -> str:
    return NOTHING if median is None or slowest is None else f"{median:,.0f} / {slowest:,.0f}"


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return NOTHING
    number = f"{value:,.0f}" if unit == "ms" or value == int(value) else f"{value:.3g}"
    return f"{number} {unit}".rstrip()
