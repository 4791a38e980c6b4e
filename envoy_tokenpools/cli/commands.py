"""
What each command does. A command takes the parsed arguments and returns the exit status.
"""

import argparse
import logging
import os
from dataclasses import replace

from envoy_tokenpools.cli.multiple import serve_as_worker, serve_with_workers
from envoy_tokenpools.cli.process import (
    EXIT_FAILED,
    Signals,
    complain,
    freeze,
    host_port,
    reloader,
    run_loop,
    say,
)
from envoy_tokenpools.config import describe, read_config
from envoy_tokenpools.envoyconf.bootstrap import build_bootstrap
from envoy_tokenpools.envoyconf.istio import IstioGateway, istio_envoy_filter
from envoy_tokenpools.envoyconf.options import EnvoyOptions, Profile
from envoy_tokenpools.envoyconf.render import render_yaml, to_plain
from envoy_tokenpools.server import FilterServer, Listen
from envoy_tokenpools.standalone import Standalone

log = logging.getLogger(__name__)


def check(arguments: argparse.Namespace) -> int:
    """Validate a configuration and describe it."""
    config = read_config(arguments.config, os.environ)
    say(describe(config))
    return 0


def envoy_config(arguments: argparse.Namespace) -> int:
    """Print an Envoy bootstrap, or an EnvoyFilter for Istio."""
    config = read_config(arguments.config, os.environ)
    options = _envoy_options(arguments).following(config)
    document = to_plain(build_bootstrap(options))
    if arguments.format == "istio":
        gateway = IstioGateway(
            namespace=arguments.namespace,
            labels=dict(arguments.label or [("istio", "ingressgateway")]),
        )
        document = istio_envoy_filter(replace(options, keep_content_length=False), gateway)
    say(render_yaml(document).rstrip())
    return 0


def serve(arguments: argparse.Namespace) -> int:
    """Run the filter for an Envoy that exists already."""
    if arguments.worker is not None:
        return serve_as_worker(arguments)
    if arguments.workers > 1:
        return serve_with_workers(arguments)

    async def serve() -> None:
        signals = Signals()
        config = read_config(arguments.config, os.environ)
        listen = Listen(arguments.ext_proc, *host_port(arguments.admin))
        server = FilterServer(config, listen)
        await server.start()
        freeze()
        log.info(
            "serving",
            extra={"ext_proc": arguments.ext_proc, "port": server.ext_proc_port}
            | {"admin_port": server.admin_port},
        )
        try:
            await signals.until_stopped(reloader(server, arguments.config))
        finally:
            await server.stop()
        log.info("stopped")

    return run_loop(serve())


def run(arguments: argparse.Namespace) -> int:
    """Run the filter and a real Envoy in front of a backend."""

    async def run() -> None:
        signals = Signals()
        config = read_config(arguments.config, os.environ)
        options = _envoy_options(arguments)
        listen = Listen("127.0.0.1:0", *host_port(arguments.admin))
        both = Standalone(config, options, listen, envoy_log_level=arguments.envoy_log_level)
        await both.start()
        freeze()
        say(f"Send requests to {both.url}/v1  (backend: {arguments.backend})")
        admin_host = arguments.admin.rpartition(":")[0]
        say(f"Look at the pools at http://{admin_host}:{both.filter.admin_port}/")
        try:
            await signals.until_stopped(reloader(both.filter, arguments.config), both.watch())
        finally:
            await both.stop()

    return run_loop(run())


def demo(arguments: argparse.Namespace) -> int:
    """See it work."""
    # The laboratory needs an optional package (rich): the other commands must do without.
    from envoy_tokenpools.lab.demo import DemoOptions, demo  # noqa: PLC0415

    options = DemoOptions(seconds=arguments.seconds, plain=arguments.plain)

    async def keep() -> None:
        await Signals().until_stopped()

    return run_loop(demo(options, say=say, keep=keep if arguments.keep else None))


def experiment(arguments: argparse.Namespace) -> int:
    """Measure protection and fairness on a real Envoy."""
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
        replicas=arguments.replicas,
        state=arguments.state,
    )
    return run_loop(experiment(options, say=say))


def simulate(arguments: argparse.Namespace) -> int:
    """Run a scenario, or replay a traffic log, in virtual time."""
    from envoy_tokenpools.lab import simulate, sizing  # noqa: PLC0415  as above

    if arguments.scenario is not None:
        options = simulate.SimulateOptions(
            arguments.scenario, arguments.run_named, arguments.json, arguments.plot
        )
        simulate.simulate_scenario(options, say=say)
        return 0
    if arguments.config is None or arguments.trace is None:
        complain("name a SCENARIO, or --config with --trace")
        return EXIT_FAILED
    sized = sizing.size(
        read_config(arguments.config, os.environ),
        arguments.trace,
        pool_name=arguments.pool,
        slots=arguments.slots,
        tokens_per_second=arguments.tokens_per_second,
        prefill_tokens_per_second=arguments.prefill_tokens_per_second,
        retries=arguments.retries,
    )
    simulate.show_sizing(sized)
    return 0


def _envoy_options(arguments: argparse.Namespace) -> EnvoyOptions:
    host, port = host_port(arguments.listen)
    ext_proc = getattr(arguments, "ext_proc", "127.0.0.1:50051")
    is_unix = ext_proc.startswith("unix:")
    ext_proc_host, ext_proc_port = ("127.0.0.1", 50051) if is_unix else host_port(ext_proc)
    return EnvoyOptions(
        backend_url=arguments.backend,
        listen_host=host,
        listen_port=port,
        ext_proc_host=ext_proc_host,
        ext_proc_port=ext_proc_port,
        ext_proc_unix_path=ext_proc.removeprefix("unix:") if is_unix else None,
        workers=getattr(arguments, "workers", 1),
        admin_port=getattr(arguments, "envoy_admin_port", 0),
        profile=Profile(arguments.profile),
        access_log=arguments.access_log,
    )
