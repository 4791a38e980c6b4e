"""
`serve` with several workers: the process that watches them, and each of them.
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from envoy_tokenpools.cli.process import Signals, freeze, host_port, reloading, run_loop
from envoy_tokenpools.config import Config, load_config, read_config
from envoy_tokenpools.envoyconf.options import worker_addresses
from envoy_tokenpools.errors import ConfigError, Fault
from envoy_tokenpools.server import FilterServer, Listen
from envoy_tokenpools.workers import (
    WorkerCommand,
    Workers,
    abandon,
    admin_socket,
    configurations,
    counts_folder,
    require_shared,
)
from envoy_tokenpools.workers_metrics import count_in_files

log = logging.getLogger(__name__)


def serve_with_workers(arguments: argparse.Namespace) -> int:
    """Watch over several workers until told to stop."""
    addresses = _addresses(arguments)

    async def serve() -> int:
        signals = Signals()
        text, config = _read(arguments.config)
        require_shared(config)
        workers = Workers(text, config, _command(arguments, addresses), count=arguments.workers)
        admin_port = await workers.start(*host_port(arguments.admin))
        signals.at_once = workers.kill

        def when_up() -> None:
            log.info("all workers serve", extra={"ext_proc": addresses, "admin_port": admin_port})

        async def reload() -> None:
            with reloading(workers):
                workers.reload(*await asyncio.to_thread(_read, arguments.config))
                log.info("configuration handed to the workers")

        try:
            await signals.until_stopped(reload, workers.watch(when_up))
        finally:
            status = await workers.stop()
        log.info("stopped", extra={"status": status})
        return status

    return run_loop(serve())


def serve_as_worker(arguments: argparse.Namespace) -> int:
    """Serve as one of several, until whoever started this process says stop or is gone."""
    number, folder = int(arguments.worker[0]), Path(arguments.worker[1])
    _mark_logs(number)
    count_in_files(counts_folder(folder), number)

    async def serve() -> None:
        signals = Signals()
        texts = configurations(await _standard_input())
        text = await anext(texts, None)
        if text is None:
            return
        config = load_config(text, env=os.environ)
        listen = Listen(arguments.ext_proc, admin_socket=admin_socket(folder, number))
        server = FilterServer(config, listen)
        await server.start()
        freeze()
        log.info("serving", extra={"ext_proc": arguments.ext_proc, "port": server.ext_proc_port})

        async def obey() -> bool:
            """Whether there is nobody left to obey."""
            is_orphan = False
            try:
                async for text in texts:
                    with reloading(server):
                        again = await asyncio.to_thread(load_config, text, env=os.environ)
                        await server.reload(again)
                        log.info("configuration reloaded")
                is_orphan = True
            except Exception:
                log.exception("cannot go on")
            signals.stop()
            return is_orphan

        obeying = asyncio.create_task(obey())
        try:
            await signals.until_stopped()
        finally:
            await server.stop()
            if obeying.done() and obeying.result():
                abandon(folder, number)
            obeying.cancel()
        log.info("stopped")

    return run_loop(serve())


def _addresses(arguments: argparse.Namespace) -> Sequence[str]:
    """Where the workers listen; ConfigError if Envoy could not know."""
    addresses = worker_addresses(arguments.ext_proc, arguments.workers)
    for address in addresses:
        if not address.startswith("unix:") and not 0 < host_port(address)[1] <= 65_535:
            message = f"{address} is no port that Envoy could be told beforehand"
            raise ConfigError([Fault("--ext-proc", message)])
    return addresses


def _command(arguments: argparse.Namespace, addresses: Sequence[str]) -> WorkerCommand:
    """Starts the same program again, as a worker."""
    level = ("--log-level", arguments.log_level) if arguments.log_level else ()

    def command(number: int, folder: Path) -> Sequence[str]:
        return (
            # Without -P modules would be looked for in whatever folder this was started in.
            *(sys.executable, "-P", "-m", "envoy_tokenpools", *level),
            *("serve", "--config", str(arguments.config), "--ext-proc", addresses[number]),
            *("--worker", str(number), str(folder)),
        )

    return command


def _read(path: Path) -> tuple[str, Config]:
    """The configuration as it is written, and read."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        read_config(path, os.environ)  # says what is wrong with it
        raise
    return text, load_config(text, env=os.environ)


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


def _mark_logs(worker: int) -> None:
    """Let every line say which worker wrote it."""

    def mark(record: logging.LogRecord) -> bool:
        record.worker = worker
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(mark)
