"""
The same targets under libFuzzer, which keeps the inputs that reach new code: for whoever has atheris installed.
"""

import gc
import importlib
import random
import sys
import tempfile
from pathlib import Path
from types import FunctionType
from typing import NoReturn

from tests.fuzz.mutate import MAX_BYTES, mutated
from tests.fuzz.targets import TARGETS

_SEEDS = 300
_OWN_MUTATIONS = 3
"""One in as many inputs is damaged by us, who know JSON and event streams; the others by libFuzzer."""


def fuzz_guided(name: str, runs: int, seconds: float, seed: int, corpus: Path | None) -> NoReturn:
    """
    Fuzz; libFuzzer ends the process, with an error at the first finding, which it writes to a file.

    Args:
        name: the target.
        runs: inputs.
        seconds: longest time.
        seed: of everything that is random.
        corpus: where the inputs are that are worth keeping, and where new ones go; a temporary folder if None.

    Raises:
        ImportError: atheris is not installed.
    """
    atheris = importlib.import_module("atheris")
    target = TARGETS[name]
    rng = random.Random(seed)
    seeds = [target.generate(rng) for _ in range(_SEEDS)]
    folder = corpus or Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds):
        (folder / f"seed-{seed}-{number}").write_bytes(data)

    def test_one_input(data: bytes) -> None:
        target.fuzz(bytes(data))

    def mutate(data: bytes, max_size: int, number: int) -> bytes:
        if number % _OWN_MUTATIONS:
            changed: bytes = atheris.Mutate(data, max_size)
            return changed
        return mutated(bytes(data), random.Random(number), seeds)[:max_size]

    for function in _functions_of("envoy_tokenpools"):
        atheris.instrument_func(function)
    arguments = [f"-runs={runs}", f"-seed={seed + 1}", f"-max_len={MAX_BYTES}", "-timeout=20"]
    if seconds != float("inf"):
        arguments.append(f"-max_total_time={round(seconds)}")
    atheris.Setup([sys.argv[0], *arguments, str(folder)], test_one_input, custom_mutator=mutate)
    atheris.Fuzz()
    sys.exit(0)


def _functions_of(package: str) -> list[FunctionType]:
    """Every function that has been defined there."""
    return [
        thing
        for thing in gc.get_objects()
        if isinstance(thing, FunctionType) and (thing.__module__ or "").partition(".")[0] == package
    ]
