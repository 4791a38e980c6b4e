"""
Runs a target on generated and damaged inputs, and measures what that takes.
"""

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS, Target

_CORPUS_INPUTS = 2_000
_FRESH = 0.2
"""Part of the inputs that is made anew; the others come from the corpus, most of them damaged."""

_DAMAGED = 0.5
_MAX_FINDINGS = 10
_MEASURED_EVERY = 2_000
_WARM_UP = 0.1
"""Part of the run after which memory is expected not to grow any more."""

_MINIMISING_S = 20.0


@dataclass(frozen=True, slots=True)
class Finding:
    """An input on which a target raised, as short as it could be made, and what was raised."""

    data: bytes
    error: str


@dataclass(slots=True)
class Run:
    """
    What a run came to.

    Attributes:
        executions: how many.
        seconds: how long.
        growth_bytes: resident memory at its highest over what it was after the warm-up.
        seen: the sum of what the target saw.
        findings: distinct ones, by where they were raised.
    """

    executions: int = 0
    seconds: float = 0.0
    growth_bytes: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)


def run(
    name: str,
    *,
    runs: int,
    seconds: float = float("inf"),
    seed: int = 0,
    corpus: Sequence[bytes] = (),
) -> Run:
    """Run target `name` on `runs` inputs, or for `seconds`; those of `corpus` first, as they are."""
    target = TARGETS[name]
    rng = random.Random(seed)
    inputs = [*corpus, *(target.generate(rng) for _ in range(min(_CORPUS_INPUTS, runs)))]
    result = Run()
    memory = _Memory(runs, seconds)
    began = time.monotonic()
    while result.executions < runs and len(result.findings) < _MAX_FINDINGS:
        data = (
            corpus[result.executions]
            if result.executions < len(corpus)
            else _next(target, rng, inputs)
        )
        try:
            result.seen.update(target.fuzz(data))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what we look for
            _note(result, target, data, error)
        result.executions += 1
        if result.executions % _MEASURED_EVERY == 0:
            result.seconds = time.monotonic() - began
            memory.measure(result.executions, result.seconds)
            if result.seconds > seconds:
                break
    result.seconds = time.monotonic() - began
    result.growth_bytes = memory.growth_bytes
    return result


def _next(target: Target, rng: random.Random, inputs: Sequence[bytes]) -> bytes:
    data = target.generate(rng) if rng.random() < _FRESH else rng.choice(inputs)
    return mutated(data, rng, inputs) if rng.random() < _DAMAGED else data


class _Memory:
    """Resident memory of this process, from the end of the warm-up on."""

    def __init__(self, runs: int, seconds: float) -> None:
        self._process = psutil.Process()
        self._runs = runs
        self._seconds = seconds
        self._base: int | None = None
        self.growth_bytes = 0

    def measure(self, executions: int, seconds: float) -> None:
        """Look; nothing counts before the warm-up is over."""
        if executions < _WARM_UP * self._runs and seconds < _WARM_UP * self._seconds:
            return
        resident: int = self._process.memory_info().rss
        if self._base is None:
            self._base = resident
        self.growth_bytes = max(self.growth_bytes, resident - self._base)


def _note(result: Run, target: Target, data: bytes, error: Exception) -> None:
    place = _place_of(error)
    if place not in result.findings:
        smallest = minimised(data, lambda part: _fails_at(target, part) == place)
        result.findings[place] = Finding(smallest, "".join(traceback.format_exception(error)[-3:]))


def _fails_at(target: Target, data: bytes) -> str | None:
    try:
        target.fuzz(data)
    except Exception as error:  # noqa: BLE001
        return _place_of(error)
    return None


def _place_of(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {last.filename}:{last.lineno}"


def minimised(data: bytes, fails: Callable[[bytes], bool]) -> bytes:
    """A shorter input that still fails: pieces are left out, large ones first, as long as that works."""
    give_up_at = time.monotonic() + _MINIMISING_S
    size = max(1, len(data) // 2)
    while time.monotonic() < give_up_at:
        at, is_shorter = 0, False
        while at < len(data) and time.monotonic() < give_up_at:
            shorter = data[:at] + data[at + size :]
            if fails(shorter):
                data, is_shorter = shorter, True
            else:
                at += size
        if size == 1 and not is_shorter:
            break
        size = max(1, size // 2)
    return data
