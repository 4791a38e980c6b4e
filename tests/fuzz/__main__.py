"""
`python -m tests.fuzz TARGET`: any number of odd inputs, and whether one of them breaks a promise.
"""

import argparse
import logging
import multiprocessing
import sys
from collections import Counter
from pathlib import Path

from tests.fuzz.running import Finding, Run, run
from tests.fuzz.targets import TARGETS

MAX_GROWTH_BYTES = 50 * 1024 * 1024
"""Resident memory may grow by this much in a run, in each process."""


def main() -> int:
    """Fuzz, and print what came of it; 1 if there is a finding or a leak."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--runs", type=int, default=100_000, help="inputs (default 100000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after as many")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default 0)")
    parser.add_argument("--corpus", type=Path, help="a folder of inputs to begin with, one a file")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument(
        "--atheris", action="store_true", help="guided by coverage; needs the package atheris"
    )
    options = parser.parse_args()
    # A target provokes what the package rightly logs, over and over.
    logging.disable(logging.CRITICAL)
    if options.atheris:
        from tests.fuzz.guided import fuzz_guided  # noqa: PLC0415 - an optional package

        fuzz_guided(options.target, options.runs, options.seconds, options.seed, options.corpus)
    return _report(options.target, _run_all(options))


def _run_all(options: argparse.Namespace) -> list[Run]:
    corpus = []
    if options.corpus is not None:
        corpus = [path.read_bytes() for path in sorted(options.corpus.iterdir()) if path.is_file()]
    tasks = [
        (
            options.target,
            options.runs // options.jobs,
            options.seconds,
            options.seed + job * 1_000_003,
            corpus,
        )
        for job in range(options.jobs)
    ]
    if options.jobs == 1:
        return [_run_one(*tasks[0])]
    with multiprocessing.Pool(options.jobs) as processes:
        return processes.starmap(_run_one, tasks)


def _run_one(name: str, runs: int, seconds: float, seed: int, corpus: list[bytes]) -> Run:
    return run(name, runs=runs, seconds=seconds, seed=seed, corpus=corpus)


def _report(name: str, results: list[Run]) -> int:
    executions = sum(result.executions for result in results)
    seconds = max(result.seconds for result in results)
    growth = max(result.growth_bytes for result in results)
    seen: Counter[str] = Counter()
    findings: dict[str, Finding] = {}
    for result in results:
        seen += result.seen
        findings |= result.findings
    lines = [
        f"{name}: {executions} executions in {seconds:.1f} s, {executions / seconds:.0f}/s",
        f"  resident memory grew by {growth / 1024**2:.1f} MB after the warm-up",
        "  " + ", ".join(f"{count} {what}" for what, count in sorted(seen.items())),
    ]
    for place, finding in findings.items():
        lines += [f"FINDING {place}", finding.error, f"  input: {finding.data!r}"]
    if growth > MAX_GROWTH_BYTES:
        lines.append(f"LEAK: more than {MAX_GROWTH_BYTES / 1024**2:.0f} MB")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if findings or growth > MAX_GROWTH_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
