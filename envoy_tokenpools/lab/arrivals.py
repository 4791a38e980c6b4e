"""
Open-loop arrivals: who sends what, and when, whatever becomes of it.

Drawn from a scenario, the same for the same seed; or read from a recorded trace, JSON lines such as
`{"time": 1.5, "entitlement": "chat", "prompt_tokens": 40, "output_tokens": 60}`.
"""

import heapq
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from envoy_tokenpools.errors import ConfigError, Fault
from envoy_tokenpools.lab.scenario import Load, Scenario


@dataclass(frozen=True, slots=True)
class Arrival:
    """
    One request of an open loop.

    Attributes:
        at_ms: when it is sent, from the start of the run.
        load: the load that it is part of.
        prompt_tokens: length of its prompt.
        output_tokens: length of its answer.
    """

    at_ms: float
    load: Load
    prompt_tokens: int
    output_tokens: int


def arrivals(scenario: Scenario) -> Iterator[Arrival]:
    """All arrivals of the scenario's open loops, in order of time; drawn as they are read."""
    return heapq.merge(
        *(
            _of_load(load, scenario.duration_ms, random.Random(f"{scenario.seed} {number}"))
            for number, load in enumerate(scenario.loads)
            if load.rate > 0
        ),
        key=lambda arrival: arrival.at_ms,
    )


class _Line(msgspec.Struct):
    """One request of a trace; `time` is seconds since its start."""

    time: float
    entitlement: str
    prompt_tokens: int
    output_tokens: int


def traced_arrivals(scenario: Scenario, lines: Iterable[str]) -> list[Arrival]:
    """
    The arrivals of a recorded trace, in order of time; those after the end of the run are left out.

    Args:
        scenario: scaled or not; an entitlement's requests are sent as its first load says.
        lines: of the trace, in any order of time.

    Raises:
        ConfigError: every faulty line, by its number.
    """
    loads: dict[str, Load] = {}
    for load in scenario.loads:
        loads.setdefault(load.entitlement, load)
    decoder = msgspec.json.Decoder(_Line)
    faults: list[Fault] = []
    read: list[Arrival] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            faults.append(Fault(f"line {number}", str(error)))
            continue
        if line.entitlement not in loads:
            faults.append(Fault(f"line {number}", "names an entitlement without a load"))
        elif min(line.time, line.prompt_tokens - 1, line.output_tokens - 1) < 0:
            faults.append(Fault(f"line {number}", "has a negative time, or a length below 1"))
        else:
            at_ms = line.time * 1_000 * scenario.time_scale
            load = loads[line.entitlement]
            read.append(Arrival(at_ms, load, line.prompt_tokens, line.output_tokens))
    if faults:
        raise ConfigError(faults)
    read.sort(key=lambda arrival: arrival.at_ms)
    return [arrival for arrival in read if arrival.at_ms < scenario.duration_ms]


def _of_load(load: Load, duration_ms: int, rng: random.Random) -> Iterator[Arrival]:
    """A Poisson process at the highest rate, thinned to the rate of each moment."""
    most = load.rate * max(load.curve, default=1.0)
    at_ms = float(load.start_ms)
    while most > 0:
        at_ms += rng.expovariate(most) * 1_000
        if at_ms >= load.stop_ms:
            return
        if rng.random() * most < load.rate_at(at_ms, duration_ms):
            yield Arrival(at_ms, load, load.prompt.draw(rng), load.output.draw(rng))
