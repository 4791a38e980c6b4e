"""
`python -m tests.bench.store`: what keeping the books on a Redis server costs, at the port and behind Envoy.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import uvloop

from envoy_tokenpools.errors import TokenpoolsError
from tests.bench import admissions, growth, replicas
from tests.bench.load import Generator, generator
from tests.bench.machine import describe, load_average

PARTS = ("admissions", "growth", "envoy")

EXIT_FAILED = 2


async def _measure(load: Generator, arguments: argparse.Namespace, cores: Sequence[int]) -> None:
    rounds, parts = arguments.rounds, arguments.parts or PARTS
    if "admissions" in parts:
        cost = await admissions.admissions(
            rounds=rounds, seconds=0.5, server_core=cores[0], say=_progress
        )
        _print("An admission and its settlement at the port", admissions.table(cost))
        _print("What batching gains", admissions.gains(cost))
    if "growth" in parts:
        grown = await growth.growth(rounds=rounds, seconds=0.3, server_core=cores[0], say=_progress)
        _print("A call of one operation, by what the books hold", growth.table(grown))
    if "envoy" in parts:
        seen = await replicas.replicas(load, rounds=rounds, seconds=2.0, cores=cores, say=_progress)
        _print(f"Through Envoy; {_shared(len(cores))}", replicas.table(seen))


def _shared(cores: int) -> str:
    if cores > replicas.MOST_REPLICAS:
        return f"{cores} cores"
    return f"{cores} cores: the second replica competes with Envoy, Redis and the load for them"


def _print(title: str, text: str) -> None:
    print(f"\n{title}; load average {load_average():.1f}\n\n{text}", flush=True)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def main() -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.store", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5, help="of each contender (default 5)")
    parser.add_argument("--python-load", action="store_true", help="do without wrk")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    if len(cores) == 1:
        parser.error("two cores are needed: one for the server, one for who asks it")
    os.sched_setaffinity(0, cores[1:])
    print(f"{describe()}; {arguments.rounds} rounds; load average {load_average():.1f}", flush=True)
    try:
        with generator(prefer_python=arguments.python_load) as load:
            uvloop.run(_measure(load, arguments, cores))
    except (RuntimeError, OSError, TokenpoolsError) as error:
        print(f"tests.bench.store: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
