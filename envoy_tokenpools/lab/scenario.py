"""
What one run of an experiment is made of, whoever runs it: a real Envoy in real time, or the simulator.

Pure values. `scenario_file` reads them from YAML.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from envoy_tokenpools.config import Config
from envoy_tokenpools.core.pool import Entitlement, Limits, Mode, Pool
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.lab.engine import EngineShape
from envoy_tokenpools.lab.lengths import Lengths

MIN_TICK_MS = 1_000
MIN_WINDOW_MS = 1_000
"""What a configuration allows at least, and so how far a run can be shortened faithfully."""


class Role(enum.Enum):
    """
    What the record of a run is for.

    `shown` must pass the checks; `reported` is measured, whatever it comes to; `control` is there to
    fail them, as a run without admission must; `reference` is what others are compared with.
    """

    SHOWN = "shown"
    REPORTED = "reported"
    CONTROL = "control"
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Load:
    """
    What the clients of one entitlement send: closed loop if `clients`, open loop if `rate`.

    A closed-loop client sends a request, waits for its end, thinks, and sends the next one. An open
    loop sends at random instants (Poisson), whatever becomes of the earlier ones.

    Attributes:
        entitlement: who sends.
        key: their bearer token.
        prompt: tokens of each prompt.
        output: tokens that each answer has.
        max_tokens: what each request states; None states exactly what it will get.
        clients: of a closed loop; 0 for an open one.
        rate: requests per second of an open loop; 0 for a closed one.
        curve: factors of `rate` over the duration of the run, evenly spread; empty is 1 all the time.
        think_ms: pause between the end of an answer and the client's next request.
        start_ms: when they begin, from the start of the run.
        stop_ms: when they send no more; what runs then comes to its end.
        retries: how often a shed request is sent again; None is until it is served.
    """

    entitlement: str
    key: str
    prompt: Lengths
    output: Lengths
    max_tokens: int | None = None
    clients: int = 0
    rate: float = 0.0
    curve: tuple[float, ...] = ()
    think_ms: int = 0
    start_ms: int = 0
    stop_ms: int = 0
    retries: int | None = None

    def rate_at(self, at_ms: float, duration_ms: int) -> float:
        """Requests per second of an open loop at a time of a run of that duration."""
        if not self.curve:
            return self.rate
        step = int(at_ms * len(self.curve) / duration_ms)
        return self.rate * self.curve[min(step, len(self.curve) - 1)]


@dataclass(frozen=True, slots=True)
class Change:
    """From `at_ms` on the backend has `slots` slots, and the pool the same share of its capacity."""

    at_ms: int
    slots: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """
    One run.

    Attributes:
        name: of the experiment.
        run: which of its runs; unique within the experiment.
        about: what this run shows, in a sentence.
        role: what its record is for.
        checks: the list of checks that its record is held against; empty for none.
        config: the filter's configuration, with one pool, at full capacity.
        engine: the simulated backend.
        loads: who sends what.
        changes: of the capacity, in order of time.
        duration_ms: after this nothing is sent.
        seed: of everything random.
        time_scale: what `scaled` made of it; 1 is as written.
    """

    name: str
    run: str
    about: str
    role: Role
    checks: str
    config: Config
    engine: EngineShape
    loads: tuple[Load, ...]
    changes: tuple[Change, ...]
    duration_ms: int
    seed: int
    time_scale: float = 1.0

    @property
    def pool(self) -> Pool:
        """The one pool, at full capacity."""
        (pool,) = self.config.pools.values()
        return pool

    @property
    def model(self) -> str:
        """The name by which clients ask for the pool's model."""
        return self.pool.models[0]

    @property
    def enforces(self) -> bool:
        """Whether requests are really shed: False is a run without admission control."""
        return self.pool.mode is Mode.ENFORCE

    def slots_at(self, at_ms: float) -> int:
        """Slots of the backend at a time."""
        slots = self.engine.slots
        for change in self.changes:
            if change.at_ms <= at_ms:
                slots = change.slots
        return slots

    def config_for(self, slots: int) -> Config:
        """The configuration while the backend has that many slots: that share of the capacity."""
        full, of = self.pool.capacity, self.engine.slots
        capacity = Resources(
            full.tokens_per_second * slots // of,
            full.kv_bytes * slots // of,
            full.concurrency * slots // of,
        )
        return _with_pool(self.config, replace(self.pool, capacity=capacity))

    def keeping_books_at(self, state: str) -> "Scenario":
        """The same with its books kept elsewhere."""
        return replace(self, config=replace(self.config, state=state))

    def asking_for(self, model: str) -> "Scenario":
        """The same with another model's name, for a backend that serves that one."""
        config = replace(self.config, pool_of_model={model: self.pool.name})
        return replace(self, config=_with_pool(config, replace(self.pool, models=(model,))))

    def at_speed(self, tokens_per_second: int) -> "Scenario":
        """
        The same on a backend that generates at another rate, all slots together, and as much faster in prefill.

        The pool's token rates follow; times, sequences and lengths stay, so that more requests are served.
        """
        factor = self.engine.tokens_per_second / tokens_per_second
        pool = self.pool
        faster = replace(
            pool,
            capacity=_scaled_resources(pool.capacity, factor),
            entitlements={
                name: replace(
                    one,
                    baseline=_scaled_resources(one.baseline, factor),
                    limits=_scaled_limits(one.limits, factor),
                )
                for name, one in pool.entitlements.items()
            },
        )
        return replace(
            self,
            config=_with_pool(self.config, faster),
            engine=_scaled_engine(self.engine, factor),
        )

    def scaled(self, factor: float) -> "Scenario":
        """
        The same run in `factor` times its duration.

        Kept: sequences, tokens of each request and KV bytes; how many requests there are; every
        ratio of times and of rates, the decay of debt and burst per request served included.
        Shortened: duration, phases, capacity changes, think times, ticks, token windows, SLO
        targets and waits; the engine, arrivals, rates of baselines and the ramp of restored capacity
        are faster by the same factor. Not kept: a tick and a window never fall below 1 s, nor the
        ramp's share above 1 per second; what a request costs in transit, and the bounds of a
        client's wait before it tries again, stay in real time.

        Raises:
            ValueError: the factor is not positive.
        """
        if factor <= 0:
            raise ValueError(f"a time scale is positive: {factor}")
        if factor == 1:
            return self
        return replace(
            self,
            config=_with_pool(self.config, _scaled_pool(self.pool, factor)),
            engine=_scaled_engine(self.engine, factor),
            loads=tuple(_scaled_load(load, factor) for load in self.loads),
            changes=tuple(
                replace(change, at_ms=_time(change.at_ms, factor)) for change in self.changes
            ),
            duration_ms=_time(self.duration_ms, factor),
            time_scale=self.time_scale * factor,
        )


def _with_pool(config: Config, pool: Pool) -> Config:
    return replace(config, pools={pool.name: pool})


def _time(duration_ms: int, factor: float) -> int:
    return round(duration_ms * factor)


def _rate(per_second: int, factor: float) -> int:
    return max(1, round(per_second / factor))


def _scaled_load(load: Load, factor: float) -> Load:
    return replace(
        load,
        rate=load.rate / factor,
        think_ms=_time(load.think_ms, factor),
        start_ms=_time(load.start_ms, factor),
        stop_ms=_time(load.stop_ms, factor),
    )


def _scaled_pool(pool: Pool, factor: float) -> Pool:
    entitlements: Mapping[str, Entitlement] = {
        name: _scaled_entitlement(entitlement, factor)
        for name, entitlement in pool.entitlements.items()
    }
    return replace(
        pool,
        capacity=_scaled_resources(pool.capacity, factor),
        window_ms=max(MIN_WINDOW_MS, _time(pool.window_ms, factor)),
        tick_ms=max(MIN_TICK_MS, _time(pool.tick_ms, factor)),
        ramp_per_second=min(1.0, pool.ramp_per_second / factor),
        # an average forgets as much per request served
        gains=replace(pool.gains, gamma=pool.gains.gamma ** (1 / factor)),
        entitlements=entitlements,
    )


def _scaled_entitlement(entitlement: Entitlement, factor: float) -> Entitlement:
    target_ms = entitlement.slo_target_ms
    return replace(
        entitlement,
        slo_target_ms=None if target_ms is None else max(1, _time(target_ms, factor)),
        baseline=_scaled_resources(entitlement.baseline, factor),
        limits=_scaled_limits(entitlement.limits, factor),
        max_wait_ms=_time(entitlement.max_wait_ms, factor),
    )


def _scaled_engine(engine: EngineShape, factor: float) -> EngineShape:
    return replace(
        engine,
        tokens_per_second=_rate(engine.tokens_per_second, factor),
        prefill_tokens_per_second=_rate(engine.prefill_tokens_per_second, factor),
    )


def _scaled_limits(limits: Limits, factor: float) -> Limits:
    rate = limits.tokens_per_second
    return replace(limits, tokens_per_second=None if rate is None else _rate(rate, factor))


def _scaled_resources(amount: Resources, factor: float) -> Resources:
    return replace(amount, tokens_per_second=round(amount.tokens_per_second / factor))
