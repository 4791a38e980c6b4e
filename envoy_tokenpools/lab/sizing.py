"""
What each entitlement would have got of a pool: a traffic log replayed in virtual time against a configuration.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.table import Table

from envoy_tokenpools.config import Config
from envoy_tokenpools.core.pool import Pool
from envoy_tokenpools.errors import ConfigError, Fault
from envoy_tokenpools.lab.engine import EngineShape
from envoy_tokenpools.lab.lengths import Fixed
from envoy_tokenpools.lab.record import Attempt, Result
from envoy_tokenpools.lab.scenario import Load, Role, Scenario
from envoy_tokenpools.lab.simulation import simulate
from envoy_tokenpools.lab.trace import Trace, read_trace

PREFILL_TOKENS_PER_SECOND = 8_000
"""Of one sequence, unless it is stated."""

AFTERWARDS_MS = 600_000
"""How long what was sent last may take."""

BUCKETS_PER_DOUBLING = 16
"""Waits are kept to within about four in a hundred."""


@dataclass(slots=True)
class Waits:
    """Times to first token, as a histogram whose buckets grow with them: constant memory."""

    _counts: Counter[int] = field(default_factory=Counter)

    def add(self, wait_ms: float) -> None:
        """Take one."""
        self._counts[math.ceil(math.log2(max(1.0, wait_ms)) * BUCKETS_PER_DOUBLING)] += 1

    def percentile_ms(self, share: float) -> float | None:
        """What a share of them did not exceed; None without any."""
        left = math.ceil(share * self._counts.total())
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return float(2 ** (bucket / BUCKETS_PER_DOUBLING))
        return None

    def include(self, other: "Waits") -> None:
        """Take all of another's."""
        self._counts.update(other._counts)  # noqa: SLF001  its own kind


@dataclass(slots=True)
class Got:
    """
    What became of the requests of an entitlement, or of a class.

    Attributes:
        requests: that were wanted.
        completed: served to their end.
        evicted: ended to give capacity back.
        failed: neither served nor shed.
        waited: decided only after a wait.
        shed: refused attempts, by reason.
        tokens_wanted: prompts and answers of all requests.
        tokens_got: of what was served, whole or not.
        waits: times to first token.
    """

    requests: int = 0
    completed: int = 0
    evicted: int = 0
    failed: int = 0
    waited: int = 0
    shed: Counter[str] = field(default_factory=Counter)
    tokens_wanted: int = 0
    tokens_got: int = 0
    waits: Waits = field(default_factory=Waits)

    def take(self, attempt: Attempt) -> None:
        """Count one attempt."""
        if not attempt.retries:
            self.requests += 1
            self.tokens_wanted += attempt.prompt_tokens + attempt.asked_tokens
        self.completed += attempt.result is Result.COMPLETED
        self.evicted += attempt.result is Result.EVICTED
        self.failed += attempt.result in (Result.FAILED, Result.CUT)
        if attempt.result is Result.SHED:
            self.shed[attempt.reason] += 1
        self.waited += (attempt.decided_ms or attempt.sent_ms) > attempt.sent_ms
        if attempt.first_token_ms is not None:
            self.tokens_got += attempt.prompt_tokens + attempt.output_tokens
            self.waits.add(attempt.first_token_ms - attempt.sent_ms)

    def include(self, other: "Got") -> None:
        """Add another's, for a class."""
        for name in ("requests", "completed", "evicted", "failed", "waited"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.tokens_wanted += other.tokens_wanted
        self.tokens_got += other.tokens_got
        self.shed.update(other.shed)
        self.waits.include(other.waits)


@dataclass(slots=True)
class Sizing:
    """
    The outcome of a replay.

    Attributes:
        pool: what it was replayed against.
        engine: the backend that was assumed.
        trace: what was replayed.
        got: by entitlement.
        utilisation: mean share of the backend's slots in use while requests arrived.
    """

    pool: Pool
    engine: EngineShape
    trace: Trace
    got: dict[str, Got] = field(default_factory=dict)
    utilisation: float = 0.0

    def append(self, attempt: Attempt) -> None:
        """Count one attempt; nothing of it is kept."""
        self.got.setdefault(attempt.entitlement, Got()).take(attempt)

    def by_class(self) -> Mapping[str, Got]:
        """The same, by service class."""
        classes: dict[str, Got] = {}
        for name, got in self.got.items():
            service_class = self.pool.entitlements[name].service_class.value
            classes.setdefault(service_class, Got()).include(got)
        return classes


def size(
    config: Config,
    trace_path: Path,
    *,
    pool_name: str | None = None,
    slots: int | None = None,
    tokens_per_second: int | None = None,
    prefill_tokens_per_second: int | None = None,
    retries: int = 0,
) -> Sizing:
    """
    Replay a traffic log.

    Args:
        config: holds the pool.
        trace_path: the log (see `trace`).
        pool_name: which pool, where there are several.
        slots: of the backend; as many as the pool's concurrency if None.
        tokens_per_second: that it generates in all; the pool's rate if None, which counts prompts too.
        prefill_tokens_per_second: that it reads of one prompt; `PREFILL_TOKENS_PER_SECOND` if None.
        retries: how often a shed request is sent again.

    Raises:
        ConfigError: there is no such pool, or the log has faults.
    """
    pool = _pool(config, pool_name)
    trace = read_trace(trace_path, pool.entitlements)
    engine = EngineShape(
        slots=slots or pool.capacity.concurrency,
        tokens_per_second=tokens_per_second or pool.capacity.tokens_per_second,
        prefill_tokens_per_second=prefill_tokens_per_second or PREFILL_TOKENS_PER_SECOND,
        kv_tokens=pool.kv_capacity_tokens,
    )
    duration_ms = math.ceil(trace.duration_ms) + AFTERWARDS_MS
    one = Fixed(1)
    loads = {
        name: Load(name, "", prompt=one, output=one, stop_ms=duration_ms, retries=retries)
        for name in pool.entitlements
    }
    scenario = Scenario(
        name=pool.name,
        run="trace",
        about=f"{trace.requests} recorded requests",
        role=Role.REPORTED,
        checks="",
        config=replace(config, pools={pool.name: pool}),
        engine=engine,
        loads=tuple(loads.values()),
        changes=(),
        duration_ms=duration_ms,
        seed=1,
    )
    sizing = Sizing(pool, engine, trace)
    record = simulate(scenario, trace=trace.arrivals(loads), sink=sizing)
    busy = [one.running or 0 for one in record.samples if one.at_ms <= trace.duration_ms]
    sizing.utilisation = sum(busy) / len(busy) / engine.slots if busy else 0.0
    return sizing


def _pool(config: Config, name: str | None) -> Pool:
    if name is None and len(config.pools) == 1:
        return next(iter(config.pools.values()))
    if name is None:
        known = ", ".join(config.pools)
        raise ConfigError([Fault("pools", f"are several; name one of {known} with --pool")])
    if name not in config.pools:
        raise ConfigError([Fault("pools", f"have none named {name!r}")])
    return config.pools[name]


def sizing_table(sizing: Sizing) -> Table:
    """Who would have got what, by entitlement and by class."""
    engine = sizing.engine
    table = Table(
        title=f"Pool {sizing.pool.name}: {sizing.trace.requests} requests in "
        f"{sizing.trace.duration_ms / 1_000:.0f} s; {engine.slots} slots, "
        f"{engine.tokens_per_second} generated tokens/s; slots in use {sizing.utilisation:.1%}",
        title_justify="left",
    )
    for name in ("who", "class"):
        table.add_column(name)
    for name in (
        "requests", "completed", "shed", "waited", "evicted", "failed", "tokens", "first token",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for name, got in sizing.got.items():
        _add(table, name, sizing.pool.entitlements[name].service_class.value, got)
    table.add_section()
    for service_class, got in sizing.by_class().items():
        _add(table, "all", service_class, got)
    return table


def _add(table: Table, who: str, service_class: str, got: Got) -> None:
    median, slowest = got.waits.percentile_ms(0.5), got.waits.percentile_ms(0.99)
    reasons = "".join(f"\n{reason} {count}" for reason, count in got.shed.most_common())
    table.add_row(
        who,
        service_class,
        str(got.requests),
        str(got.completed),
        f"{got.shed.total()}{reasons}",
        str(got.waited),
        str(got.evicted),
        str(got.failed),
        f"{got.tokens_got:,} of {got.tokens_wanted:,}",
        "-" if median is None or slowest is None else f"{median:,.0f} / {slowest:,.0f} ms",
    )
