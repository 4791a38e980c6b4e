"""
The commands and their arguments.
"""

import argparse
from pathlib import Path

from envoy_tokenpools import __version__
from envoy_tokenpools.cli import commands
from envoy_tokenpools.config import EMBEDDED
from envoy_tokenpools.envoyconf.options import MAX_WORKERS, Profile


def build_parser() -> argparse.ArgumentParser:
    """The commands and their arguments; each sets `run` to the function that does it."""
    parser = argparse.ArgumentParser(
        prog="envoy-tokenpools",
        description="Fair, class-aware admission control for shared LLM backends, inside Envoy.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="default: info"
    )
    subcommands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = subcommands.add_parser(
        "demo", help="see it work: simulated backend, real Envoy, mixed traffic"
    )
    demo.add_argument("--seconds", type=int, default=20, help="how long traffic runs (default 20)")
    demo.add_argument("--keep", action="store_true", help="stay up afterwards, for curl")
    demo.add_argument("--plain", action="store_true", help="no live table, only the summary")
    demo.set_defaults(run=commands.demo)

    _add_experiment(subcommands)
    _add_simulate(subcommands)

    run = subcommands.add_parser("run", help="the filter and a real Envoy in front of a backend")
    _add_config(run)
    _add_envoy(run, listen="0.0.0.0:8080")
    run.add_argument("--admin", type=_address, default="127.0.0.1:9090", metavar="HOST:PORT")
    run.add_argument("--envoy-log-level", default="warning")
    run.set_defaults(run=commands.run)

    serve = subcommands.add_parser(
        "serve", help="the filter only, for an Envoy that exists already"
    )
    _add_config(serve)
    serve.add_argument(
        "--ext-proc",
        type=_address_or_socket,
        default="127.0.0.1:50051",
        metavar="ADDR",
        help="HOST:PORT or unix:/PATH",
    )
    serve.add_argument("--admin", type=_address, default="127.0.0.1:9090", metavar="HOST:PORT")
    _add_workers(serve, "processes that share the pools; each has a port of its own, from PORT on")
    # How a supervisor starts them: the number of the worker, and the folder that all share.
    serve.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    serve.set_defaults(run=commands.serve)

    check = subcommands.add_parser("check", help="validate a configuration; names every fault")
    check.add_argument("config", type=Path, metavar="FILE")
    check.set_defaults(run=commands.check)

    envoy = subcommands.add_parser(
        "envoy-config", help="print an Envoy configuration for a backend"
    )
    _add_config(envoy)
    _add_envoy(envoy, listen="0.0.0.0:8080")
    envoy.add_argument(
        "--ext-proc", type=_address_or_socket, default="127.0.0.1:50051", metavar="ADDR"
    )
    _add_workers(envoy, "as for `serve`, which has to be given the same ADDR")
    envoy.add_argument("--envoy-admin-port", type=int, default=9901, metavar="PORT")
    envoy.add_argument(
        "--format", choices=("envoy", "istio"), default="envoy", help="bootstrap or EnvoyFilter"
    )
    envoy.add_argument("--namespace", default="istio-system", help="of the gateway (istio)")
    envoy.add_argument(
        "--label",
        type=_label,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the gateway's pods (istio); may be repeated, default istio=ingressgateway",
    )
    envoy.set_defaults(run=commands.envoy_config)
    return parser


def _add_experiment(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subcommands.add_parser(
        "experiment",
        help="measure protection and fairness on a real Envoy, with and without the filter's decisions",
    )
    parser.add_argument(
        "scenario", metavar="SCENARIO", help="protection, fair-share, mixed, or a YAML file"
    )
    parser.add_argument(
        "--run",
        dest="run_named",
        action="append",
        default=[],
        metavar="NAME",
        help="only this of its runs; may be repeated, default all",
    )
    parser.add_argument(
        "--time-scale",
        type=_positive,
        default=1.0,
        metavar="X",
        help="shorten it to X times its duration, engine and all (default 1)",
    )
    parser.add_argument(
        "--backend", metavar="URL", help="a server such as vLLM; default: simulated"
    )
    parser.add_argument("--model", metavar="NAME", help="that the backend serves")
    parser.add_argument(
        "--tokens-per-second",
        type=_count,
        metavar="N",
        help="that the backend generates in all; default: the scenario's",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="JSON lines to send, instead of the scenario's loads",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write a JSON file and a picture there"
    )
    parser.add_argument(
        "--replicas",
        type=_count,
        default=1,
        metavar="N",
        help="of the filter, behind one Envoy; several need --state (default 1)",
    )
    parser.add_argument(
        "--state",
        default=EMBEDDED,
        metavar="URL",
        help="the server that keeps the books, such as redis://127.0.0.1:6379 (default memory://)",
    )
    parser.set_defaults(run=commands.experiment)


def _add_simulate(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subcommands.add_parser(
        "simulate", help="the same decisions in virtual time: a scenario, or a recorded traffic log"
    )
    parser.add_argument(
        "scenario", nargs="?", metavar="SCENARIO",
        help="protection, fair-share, mixed, day, or a YAML file",
    )  # fmt: skip
    parser.add_argument(
        "--run", dest="run_named", action="append", default=[], metavar="NAME",
        help="only this of its runs; may be repeated, default all",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture (PNG)")
    sizing = parser.add_argument_group("sizing a pool by a traffic log, in place of SCENARIO")
    sizing.add_argument("--config", type=Path, metavar="FILE", help="holds the pool")
    sizing.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines")
    sizing.add_argument("--pool", metavar="NAME", help="where there are several")
    sizing.add_argument("--slots", type=_count, metavar="N", help="default: the pool's concurrency")
    sizing.add_argument(
        "--tokens-per-second", type=_count, metavar="N",
        help="that the backend generates; default: the pool's rate",
    )  # fmt: skip
    sizing.add_argument("--prefill-tokens-per-second", type=_count, metavar="N")
    sizing.add_argument("--retries", type=int, default=0, metavar="N", help="of what was shed")
    parser.set_defaults(run=commands.simulate)


def _positive(text: str) -> float:
    """An argument that is a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _count(text: str) -> int:
    """An argument that is a whole number above 0."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")


def _add_workers(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--workers", type=_workers, default=1, metavar="N", help=f"{what} (default 1)"
    )


def _workers(text: str) -> int:
    """An argument that is a number of workers."""
    count = _count(text)
    if count > MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_WORKERS}")
    return count


def _add_envoy(parser: argparse.ArgumentParser, *, listen: str) -> None:
    parser.add_argument(
        "--access-log", action="store_true", help="Envoy writes a JSON line per request to stdout"
    )
    parser.add_argument("--backend", required=True, metavar="URL", help="http://HOST:PORT")
    parser.add_argument("--listen", type=_address, default=listen, metavar="HOST:PORT")
    parser.add_argument(
        "--profile", choices=[profile.value for profile in Profile], default=Profile.PORTABLE.value
    )


def _address_or_socket(text: str) -> str:
    """An argument of the form HOST:PORT or unix:/PATH."""
    return text if text.startswith("unix:/") else _address(text)


def _address(text: str) -> str:
    """An argument of the form HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return text


def _label(text: str) -> tuple[str, str]:
    """An argument of the form KEY=VALUE."""
    key, _, value = text.partition("=")
    if not key or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value
