"""
The command line: reads arguments, calls what they name, and turns errors into one clear line and an exit status.
"""

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from envoy_tokenpools import __version__
from envoy_tokenpools.config import describe, read_config
from envoy_tokenpools.envoyconf.bootstrap import build_bootstrap
from envoy_tokenpools.envoyconf.istio import IstioGateway, istio_envoy_filter
from envoy_tokenpools.envoyconf.options import EnvoyOptions, Profile
from envoy_tokenpools.envoyconf.render import render_yaml, to_plain
from envoy_tokenpools.errors import ConfigError, TokenpoolsError
from envoy_tokenpools.logs import configure_logs
from envoy_tokenpools.server import FilterServer, Listen
from envoy_tokenpools.standalone import Standalone

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the command in `argv` (the process's arguments if None); returns the exit status."""
    arguments = build_parser().parse_args(argv)
    quiet = "warning" if arguments.run in (_demo, _experiment, _simulate) else "info"
    configure_logs(arguments.log_level or quiet)
    try:
        status: int = arguments.run(arguments)
    except ConfigError as error:
        _complain(f"{len(error.faults)} fault(s) in the configuration:\n{error}")
        return EXIT_FAILED
    except (TokenpoolsError, OSError) as error:
        _complain(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def _complain(text: str) -> None:
    print(f"envoy-tokenpools: {text}", file=sys.stderr)


def _say(text: str) -> None:
    print(text, flush=True)


# ---------------------------------------------------------------------- commands


def _check(arguments: argparse.Namespace) -> int:
    config = read_config(arguments.config, os.environ)
    _say(describe(config))
    return 0


def _envoy_config(arguments: argparse.Namespace) -> int:
    config = read_config(arguments.config, os.environ)
    options = _envoy_options(arguments).following(config)
    document = to_plain(build_bootstrap(options))
    if arguments.format == "istio":
        gateway = IstioGateway(
            namespace=arguments.namespace,
            labels=dict(arguments.label or [("istio", "ingressgateway")]),
        )
        document = istio_envoy_filter(replace(options, keep_content_length=False), gateway)
    _say(render_yaml(document).rstrip())
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    async def serve() -> None:
        signals = _Signals()
        config = read_config(arguments.config, os.environ)
        server = FilterServer(config, _listen(arguments))
        await server.start()
        _freeze()
        log.info(
            "serving",
            extra={"ext_proc": arguments.ext_proc, "port": server.ext_proc_port}
            | {"admin_port": server.admin_port},
        )
        try:
            await signals.until_stopped(_reloader(server, arguments.config))
        finally:
            await server.stop()
        log.info("stopped")

    return _run_loop(serve())


def _run(arguments: argparse.Namespace) -> int:
    async def run() -> None:
        signals = _Signals()
        config = read_config(arguments.config, os.environ)
        options = _envoy_options(arguments)
        listen = Listen("127.0.0.1:0", *_host_port(arguments.admin))
        both = Standalone(config, options, listen, envoy_log_level=arguments.envoy_log_level)
        await both.start()
        _freeze()
        _say(f"Send requests to {both.url}/v1  (backend: {arguments.backend})")
        admin_host = arguments.admin.rpartition(":")[0]
        _say(f"Look at the pools at http://{admin_host}:{both.filter.admin_port}/")
        try:
            await signals.until_stopped(_reloader(both.filter, arguments.config), both.watch())
        finally:
            await both.stop()

    return _run_loop(run())


def _demo(arguments: argparse.Namespace) -> int:
    # The laboratory needs an optional package (rich): the other commands must do without.
    from envoy_tokenpools.lab.demo import DemoOptions, demo  # noqa: PLC0415

    options = DemoOptions(seconds=arguments.seconds, plain=arguments.plain)

    async def keep() -> None:
        await _Signals().until_stopped()

    return _run_loop(demo(options, say=_say, keep=keep if arguments.keep else None))


def _experiment(arguments: argparse.Namespace) -> int:
    # The laboratory needs optional packages (rich, matplotlib): the other commands must do without.
    from envoy_tokenpools.lab.experiment import ExperimentOptions, experiment  # noqa: PLC0415

    options = ExperimentOptions(
        arguments.scenario,
        runs=arguments.run_named,
        time_scale=arguments.time_scale,
        backend_url=arguments.backend,
        model=arguments.model,
        tokens_per_second=arguments.tokens_per_second,
        trace=arguments.trace,
        out=arguments.out,
    )
    return _run_loop(experiment(options, say=_say))


def _simulate(arguments: argparse.Namespace) -> int:
    from envoy_tokenpools.lab import simulate  # noqa: PLC0415  as above

    if arguments.scenario is not None:
        options = simulate.SimulateOptions(
            arguments.scenario, arguments.run_named, arguments.json, arguments.plot
        )
        simulate.simulate_scenario(options, say=_say)
        return 0
    if arguments.config is None or arguments.trace is None:
        _complain("name a SCENARIO, or --config with --trace")
        return EXIT_FAILED
    config = read_config(arguments.config, os.environ)
    sizing = simulate.SizeOptions(
        arguments.trace,
        pool=arguments.pool,
        slots=arguments.slots,
        tokens_per_second=arguments.tokens_per_second,
        prefill_tokens_per_second=arguments.prefill_tokens_per_second,
        retries=arguments.retries,
    )
    simulate.simulate_trace(config, sizing)
    return 0


def _freeze() -> None:
    """
    Keep the collector off what lives as long as the process.

    Measured under load: a full collection, every 4 s, took 115 ms and takes 0.7 ms then.
    """
    gc.collect()
    gc.freeze()


# ---------------------------------------------------------------------- signals


class _Signals:
    """SIGTERM, SIGINT and SIGHUP, caught from before anything is started until the process ends."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._hangup = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping)
        loop.add_signal_handler(signal.SIGHUP, self._hangup.set)

    def _stopping(self) -> None:
        """Whoever signals twice means it: the second one ends the process at once."""
        if self._stop.is_set():
            os._exit(EXIT_FAILED)
        self._stop.set()

    async def until_stopped(
        self,
        on_hangup: Callable[[], Awaitable[None]] | None = None,
        *watched: Coroutine[Any, Any, None],
    ) -> None:
        """Return when told to stop; SIGHUP calls `on_hangup`; whatever one of `watched` raises is raised here."""
        running = [self._stop.wait(), *watched]
        if on_hangup is not None:
            running.append(self._each_hangup(on_hangup))
        tasks = [asyncio.ensure_future(one) for one in running]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _each_hangup(self, on_hangup: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._hangup.wait()
            self._hangup.clear()
            await on_hangup()


def _reloader(server: FilterServer, path: Path) -> Callable[[], Awaitable[None]]:
    """Reads the configuration again; a faulty one is reported and the last good one stays in force."""

    async def reload() -> None:
        try:
            # Thousands of entitlements take seconds to read, and requests go on meanwhile.
            config = await asyncio.to_thread(read_config, path, os.environ)
            await server.reload(config)
            log.info("configuration reloaded")
        except ConfigError as error:
            server.config_refused()
            log.error("configuration refused", extra={"faults": [str(f) for f in error.faults]})  # noqa: TRY400

    return reload


def _run_loop(main_task: Coroutine[Any, Any, None]) -> int:
    uvloop.run(main_task)
    return 0


# ---------------------------------------------------------------------- arguments


def _envoy_options(arguments: argparse.Namespace) -> EnvoyOptions:
    host, port = _host_port(arguments.listen)
    ext_proc = getattr(arguments, "ext_proc", "127.0.0.1:50051")
    is_unix = ext_proc.startswith("unix:")
    ext_proc_host, ext_proc_port = ("127.0.0.1", 50051) if is_unix else _host_port(ext_proc)
    return EnvoyOptions(
        backend_url=arguments.backend,
        listen_host=host,
        listen_port=port,
        ext_proc_host=ext_proc_host,
        ext_proc_port=ext_proc_port,
        ext_proc_unix_path=ext_proc.removeprefix("unix:") if is_unix else None,
        admin_port=getattr(arguments, "envoy_admin_port", 0),
        profile=Profile(arguments.profile),
        access_log=arguments.access_log,
    )


def _listen(arguments: argparse.Namespace) -> Listen:
    return Listen(arguments.ext_proc, *_host_port(arguments.admin))


def _host_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


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
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="see it work: simulated backend, real Envoy, mixed traffic"
    )
    demo.add_argument("--seconds", type=int, default=20, help="how long traffic runs (default 20)")
    demo.add_argument("--keep", action="store_true", help="stay up afterwards, for curl")
    demo.add_argument("--plain", action="store_true", help="no live table, only the summary")
    demo.set_defaults(run=_demo)

    _add_experiment(commands)
    _add_simulate(commands)

    run = commands.add_parser("run", help="the filter and a real Envoy in front of a backend")
    _add_config(run)
    _add_envoy(run, listen="0.0.0.0:8080")
    run.add_argument("--admin", type=_address, default="127.0.0.1:9090", metavar="HOST:PORT")
    run.add_argument("--envoy-log-level", default="warning")
    run.set_defaults(run=_run)

    serve = commands.add_parser("serve", help="the filter only, for an Envoy that exists already")
    _add_config(serve)
    serve.add_argument(
        "--ext-proc",
        type=_address_or_socket,
        default="127.0.0.1:50051",
        metavar="ADDR",
        help="HOST:PORT or unix:/PATH",
    )
    serve.add_argument("--admin", type=_address, default="127.0.0.1:9090", metavar="HOST:PORT")
    serve.set_defaults(run=_serve)

    check = commands.add_parser("check", help="validate a configuration; names every fault")
    check.add_argument("config", type=Path, metavar="FILE")
    check.set_defaults(run=_check)

    envoy = commands.add_parser("envoy-config", help="print an Envoy configuration for a backend")
    _add_config(envoy)
    _add_envoy(envoy, listen="0.0.0.0:8080")
    envoy.add_argument(
        "--ext-proc", type=_address_or_socket, default="127.0.0.1:50051", metavar="ADDR"
    )
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
    envoy.set_defaults(run=_envoy_config)
    return parser


def _add_experiment(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
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
    parser.set_defaults(run=_experiment)


def _add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
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
    sizing.add_argument("--prefill-tokens-per-second", type=_count, default=8_000, metavar="N")
    sizing.add_argument("--retries", type=int, default=0, metavar="N", help="of what was shed")
    parser.set_defaults(run=_simulate)


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


def _add_envoy(parser: argparse.ArgumentParser, *, listen: str) -> None:
    parser.add_argument(
        "--access-log", action="store_true", help="Envoy writes a JSON line per request to stdout"
    )
    parser.add_argument("--backend", required=True, metavar="URL", help="http://HOST:PORT")
    parser.add_argument("--listen", type=_address, default=listen, metavar="HOST:PORT")
    parser.add_argument(
        "--profile", choices=[profile.value for profile in Profile], default=Profile.PORTABLE.value
    )
