"""
`python -m tests.bench`: what the filter costs beside no filter, a filter that does nothing, and a naive one.
"""

import argparse
import asyncio
import os
import sys

from envoy_tokenpools.errors import TokenpoolsError
from tests.bench.load import Generator, generator
from tests.bench.machine import describe, load_average
from tests.bench.measure import rounds, stage
from tests.bench.processors import Kind
from tests.bench.table import Samples, foreign_cores, ratio, table

LEAST_OF_NO_OP = 0.33
"""`--check` fails when ours serves less than this part of what the no-op does; 0.42 when this was written."""

EXIT_BELOW = 1
EXIT_FAILED = 2


async def _measure(load: Generator, arguments: argparse.Namespace) -> Samples:
    async with stage(max(os.sched_getaffinity(0))) as running:
        return await rounds(
            running, load, count=arguments.rounds, seconds=arguments.seconds, say=_progress
        )


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def main() -> int:
    """Measure, print, and compare if asked to; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each contender (default 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load (default 2)")
    parser.add_argument("--python-load", action="store_true", help="do without wrk")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"exit 1 if ours serves less than {LEAST_OF_NO_OP} of what the no-op does",
    )
    arguments = parser.parse_args()
    print(describe(), flush=True)
    before = load_average()
    try:
        with generator(prefer_python=arguments.python_load) as load:
            samples = asyncio.run(_measure(load, arguments))
    except (RuntimeError, OSError, TokenpoolsError) as error:
        print(f"tests.bench: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_FAILED
    print(
        f"{arguments.rounds} rounds of {arguments.seconds:g} s by {load.name}; load average "
        f"{before:.1f} before, {load_average():.1f} after (the benchmark itself makes 2); "
        f"other processes took {foreign_cores(samples):.2f} cores\n"
    )
    print(table(samples))
    if arguments.check:
        reached = ratio(samples, Kind.OURS.value, Kind.NO_OP.value)
        print(f"\nours/no-op {reached:.2f}, at least {LEAST_OF_NO_OP} wanted")
        return 0 if reached >= LEAST_OF_NO_OP else EXIT_BELOW
    return 0


if __name__ == "__main__":
    sys.exit(main())
