"""The supervisor: it starts its workers, starts again those that die, and leaves nothing behind."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from envoy_tokenpools import workers as workers_module
from envoy_tokenpools.cli import build_parser
from envoy_tokenpools.cli.multiple import _command
from envoy_tokenpools.clock import ManualClock
from envoy_tokenpools.config import Config, ServerSettings, load_config
from envoy_tokenpools.errors import ConfigError, WorkerError
from envoy_tokenpools.workers import (
    MAX_RESTARTS,
    RESTART_WINDOW_MS,
    WorkerCommand,
    Workers,
    abandon,
    admin_socket,
    configurations,
    counts_folder,
    require_shared,
)
from tests.support.ports import neighbouring_ports
from tests.support.processes import command
from tests.support.stack import GENEROUS

LOOPBACK = "127.0.0.1"
WITHIN_S = 20.0

PROGRAM = """
import asyncio, os, signal, sys
number, folder, log = int(sys.argv[1]), sys.argv[2], sys.argv[3]
behaviour = sys.argv[4]

def say(text):
    with open(log, "a") as file:
        print(number, text, file=file)

async def answer(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 3\\r\\nconnection: close\\r\\n\\r\\nok\\n")
    await writer.drain()
    writer.close()

async def main():
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    def stop(why):
        say(why)
        if behaviour != "deaf" and not over.done():
            over.set_result(None)
    if behaviour != "young":
        loop.add_signal_handler(signal.SIGTERM, stop, "SIGTERM")
    pipe = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe), sys.stdin)
    async def read():
        while True:
            try:
                size = int.from_bytes(await pipe.readexactly(8), "big")
                text = (await pipe.readexactly(size)).decode()
                say(text if len(text) < 100 else f"{text[:2]} x {len(text)}")
            except asyncio.IncompleteReadError:
                stop("end")
                return
    reading = asyncio.create_task(read())
    path = f"{folder}/admin.{number}"
    if os.path.exists(path):
        os.unlink(path)
    await asyncio.start_unix_server(answer, path)
    say(f"up {os.getpid()}")
    await over

if behaviour == "dies":
    sys.exit(3)
asyncio.run(main())
sys.exit(4 if behaviour == "status" and number == 1 else 0)
"""
"""A worker without a filter: it writes down what it is told."""

CONFIG = Config(state="redis://one", pools={}, pool_of_model={}, default_pool=None, keys={})


class Told:
    """What the workers have written down."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.touch()

    @property
    def lines(self) -> list[str]:
        """All of it, each line with the number of its worker."""
        return self._file.read_text().splitlines()

    def pids(self, worker: int) -> list[int]:
        """The processes that came up as this worker, one after the other."""
        return [int(line.split()[2]) for line in self.lines if line.startswith(f"{worker} up ")]

    async def line(self, text: str, times: int = 1) -> None:
        """Wait until a line is there so many times."""
        await until(lambda: self.lines.count(text) >= times)


@pytest.fixture
def told(tmp_path: Path) -> Told:
    """Nothing yet."""
    return Told(tmp_path / "told")


@pytest.fixture(autouse=True)
def temporary_folder(told: Told, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the supervisor may leave files, to see that it leaves none; short, as socket files want it."""
    del told  # pytest's own folders come first
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def left_in(folder: Path) -> list[Path]:
    """All that is there."""
    return list(folder.iterdir())


def is_private(folder: Path) -> bool:
    """Whether only this user may look into it."""
    return folder.stat().st_mode & 0o077 == 0


def program(told: Told, behaviour: str = "") -> WorkerCommand:
    """The command of workers of this behaviour."""

    def start(number: int, folder: Path) -> Sequence[str]:
        script = (sys.executable, "-I", "-S", "-c", PROGRAM)
        return (*script, str(number), str(folder), str(told._file), behaviour)

    return start


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Poll until `condition` holds."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(0.02)


class Watched:
    """A supervisor that runs."""

    def __init__(self, workers: Workers, port: int) -> None:
        self.workers = workers
        self.port = port
        self.up = asyncio.Event()
        self.watching = asyncio.create_task(workers.watch(self.up.set))

    async def all_up(self) -> None:
        """Wait until all workers have come up, or the first failure."""
        coming = asyncio.create_task(self.up.wait())
        await asyncio.wait(
            [coming, self.watching], timeout=WITHIN_S, return_when=asyncio.FIRST_COMPLETED
        )
        coming.cancel()
        if self.watching.done():
            await self.watching
        assert self.up.is_set()

    async def get(self, path: str) -> tuple[int, str]:
        """Status and text of an admin page."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{LOOPBACK}:{self.port}{path}") as answer,
        ):
            return answer.status, await answer.text()

    async def is_ready(self) -> bool:
        """Whether all workers are."""
        return (await self.get("/readyz"))[0] == 200

    async def stop(self) -> int:
        """As the command does it."""
        self.watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.watching
        return await asyncio.wait_for(self.workers.stop(), WITHIN_S)


@contextlib.asynccontextmanager
async def watched(
    command: WorkerCommand,
    *,
    text: str = "first",
    config: Config = CONFIG,
    clock: ManualClock | None = None,
) -> AsyncIterator[Watched]:
    """Two workers, ended in any case."""
    workers = Workers(text, config, command, count=2, clock=clock)
    running = Watched(workers, await workers.start(LOOPBACK, 0))
    try:
        yield running
    finally:
        running.watching.cancel()
        with contextlib.suppress(asyncio.CancelledError, WorkerError):
            await running.watching
        workers.kill()
        await workers.stop()


async def test_it_serves_when_all_have_come_up_and_ends_with_them(
    told: Told, temporary_folder: Path
) -> None:
    """Each gets the configuration and one SIGTERM; no process and no file is left."""
    async with watched(program(told)) as running:
        await running.all_up()
        assert await running.get("/readyz") == (200, "ok\n")
        assert sorted(line for line in told.lines if " up " not in line) == ["0 first", "1 first"]
        pids = [*told.pids(0), *told.pids(1)]
        assert len(pids) == 2
        (folder,) = left_in(temporary_folder)
        assert is_private(folder)
        assert await running.stop() == 0
    assert told.lines.count("0 SIGTERM") == told.lines.count("1 SIGTERM") == 1
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert left_in(temporary_folder) == []


async def test_a_worker_that_is_killed_is_started_again_and_the_others_go_on(told: Told) -> None:
    """It gets the configuration in force, and the restart is counted."""
    async with watched(program(told)) as running:
        await running.all_up()
        running.workers.reload("second", CONFIG)
        os.kill(told.pids(0)[0], signal.SIGKILL)
        await until(lambda: len(told.pids(0)) == 2)
        await until(running.is_ready)
        assert len(told.pids(1)) == 1
        await told.line("0 second")
        await told.line("1 second")
        assert (await running.get("/healthz"))[0] == 200
        _, metrics = await running.get("/metrics")
        assert 'tokenpools_worker_restarts_total{worker="0"} 1.0' in metrics
        assert 'tokenpools_worker_restarts_total{worker="1"} 0.0' in metrics
        assert 'tokenpools_config_reloads_total{result="success"} 1.0' in metrics
        assert await running.stop() == 0


async def test_a_worker_that_dies_too_often_ends_the_supervisor(told: Told) -> None:
    """Five times a minute it is started again; deaths of long ago, and of others, do not count."""
    clock = ManualClock()
    async with watched(program(told), clock=clock) as running:
        await running.all_up()

        async def die(worker: int) -> None:
            count = len(told.pids(worker))
            os.kill(told.pids(worker)[-1], signal.SIGKILL)
            await until(lambda: len(told.pids(worker)) > count or running.watching.done())

        for _ in range(MAX_RESTARTS):
            await die(0)
        await die(1)
        clock.advance(RESTART_WINDOW_MS)
        for _ in range(MAX_RESTARTS):
            await die(0)
        await die(0)
        with pytest.raises(WorkerError, match=r"worker 0 died 6 times within a minute.* status -9"):
            await running.watching


async def test_a_worker_that_never_serves_is_an_error_at_once(told: Told) -> None:
    """Whatever keeps it from that, it would keep it from that again."""
    async with watched(program(told, "dies")) as running:
        with pytest.raises(WorkerError, match="ended with status 3 before it served"):
            await running.all_up()


async def test_a_reload_reaches_all_and_must_not_change_the_store(told: Told) -> None:
    """Workers that run would keep the old one, and those started later would have the new one."""
    async with watched(program(told)) as running:
        await running.all_up()
        other = Config(state="redis://two", pools={}, pool_of_model={}, default_pool=None, keys={})
        with pytest.raises(ConfigError, match="state: cannot be changed while workers run"):
            running.workers.reload("other", other)
        running.workers.config_refused()
        text = "ä" * 1_000_000
        running.workers.reload(text, CONFIG)
        await told.line("0 ää x 1000000")
        await told.line("1 ää x 1000000")
        assert not any("other" in line for line in told.lines)
        _, metrics = await running.get("/metrics")
        assert 'tokenpools_config_reloads_total{result="success"} 1.0' in metrics
        assert 'tokenpools_config_reloads_total{result="failure"} 1.0' in metrics
        assert await running.stop() == 0


async def test_the_exit_status_is_the_worst_of_all(told: Told) -> None:
    """One that failed to end well is not hidden by those that did."""
    async with watched(program(told, "status")) as running:
        await running.all_up()
        assert await running.stop() == 4


async def test_a_worker_that_is_not_far_enough_to_obey_has_ended_well(told: Told) -> None:
    """A stop may come while one is being started again."""
    async with watched(program(told, "young")) as running:
        await running.all_up()
        assert await running.stop() == 0


async def test_a_worker_that_does_not_end_is_killed_when_patience_is(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status is that of a shell, so that it cannot be taken for a good one."""
    monkeypatch.setattr(workers_module, "STOP_MARGIN_S", 0.2)
    impatient = replace(CONFIG, server=ServerSettings(drain_ms=0))
    async with watched(program(told, "deaf"), config=impatient) as running:
        await running.all_up()
        assert await running.stop() == 128 + signal.SIGKILL


async def test_an_end_at_once_leaves_nothing(told: Told, temporary_folder: Path) -> None:
    """Not even of workers that obey no signal."""
    async with watched(program(told, "deaf")) as running:
        await running.all_up()
        running.workers.kill()
        pids = [*told.pids(0), *told.pids(1)]
        await until(lambda: not any(_lives(pid) for pid in pids))
        assert left_in(temporary_folder) == []


async def test_a_taken_admin_port_is_an_error_that_leaves_nothing(
    told: Told, temporary_folder: Path
) -> None:
    """Before any worker is started."""
    with socket.create_server((LOOPBACK, 0)) as taken:
        workers = Workers("text", CONFIG, program(told), count=2)
        with pytest.raises(OSError, match="in use"):
            await workers.start(LOOPBACK, taken.getsockname()[1])
    assert left_in(temporary_folder) == []
    assert told.lines == []


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from envoy_tokenpools.config import Config
from envoy_tokenpools.workers import Workers
config = Config(state="redis://one", pools={}, pool_of_model={}, default_pool=None, keys={})
def command(number, folder):
    return (sys.executable, "-I", "-S", "-c", sys.argv[1], str(number), str(folder), sys.argv[2], "")
async def main():
    workers = Workers("text", config, command, count=3)
    await workers.start("127.0.0.1", 0)
    await workers.watch(lambda: print("up", flush=True))
import uvloop
uvloop.run(main())
"""


async def test_workers_of_a_killed_supervisor_learn_it_from_the_pipe(told: Told) -> None:
    """None of them holds the end of another one's pipe open."""
    supervisor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SUPERVISOR, PROGRAM, str(told._file)),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"TMPDIR": tempfile.gettempdir()},
    )
    assert supervisor.stdout is not None
    assert await asyncio.wait_for(supervisor.stdout.readline(), WITHIN_S) == b"up\n"
    pids = [pid for worker in range(3) for pid in told.pids(worker)]
    assert len(pids) == 3
    supervisor.kill()
    await supervisor.wait()
    for worker in range(3):
        await told.line(f"{worker} end")
    await until(lambda: not any(_lives(pid) for pid in pids))


def _lives(pid: int) -> bool:
    """Whether it runs; one that is dead may wait to be collected by whoever is responsible."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


# What a worker is told


async def test_texts_arrive_whole_however_they_are_cut() -> None:
    """And what is cut off by the end is none."""
    sent = b"".join(workers_module._message(text) for text in ("", "one", "zwei €" * 1_000))
    for size in (1, 7, 4_096, len(sent)):
        pipe = asyncio.StreamReader()
        for start in range(0, len(sent), size):
            pipe.feed_data(sent[start : start + size])
        pipe.feed_data(b"\0\0\0\0\0\0\0\5cut")
        pipe.feed_eof()
        got = [text async for text in configurations(pipe)]
        assert got == ["", "one", "zwei €" * 1_000]


def test_workers_without_a_supervisor_remove_the_folder_together(temporary_folder: Path) -> None:
    """Each what is its own; the last one the rest."""
    counts = counts_folder(temporary_folder / "shared")
    counts.mkdir(parents=True)
    for worker in (1, 11):
        admin_socket(temporary_folder / "shared", worker).touch()
        (counts / f"counter_{worker}.db").touch()
    abandon(temporary_folder / "shared", 1)
    assert [file.name for file in counts.iterdir()] == ["counter_11.db"]
    abandon(temporary_folder / "shared", 11)
    assert not (temporary_folder / "shared").exists()


# The real worker


def worker_command(ports: Sequence[int]) -> WorkerCommand:
    """The product's own, at these ports."""
    arguments = build_parser().parse_args(["serve", "--config", "unread.yaml", "--workers", "2"])
    return _command(arguments, [f"{LOOPBACK}:{port}" for port in ports])


async def health(port: int) -> int:
    """What the health service of a worker says."""
    async with grpc.aio.insecure_channel(f"{LOOPBACK}:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        status: int = answer.status
        return status


async def test_real_workers_serve_reload_and_come_back(temporary_folder: Path) -> None:
    """The books are each one's own here, as nothing else can be had without a server."""
    first = neighbouring_ports()
    ports = (first, first + 1)
    config = load_config(GENEROUS, env={})
    async with watched(worker_command(ports), text=GENEROUS, config=config) as running:
        await running.all_up()
        for port in ports:
            assert await health(port) == health_pb2.HealthCheckResponse.SERVING
        status, state = await running.get("/state")
        assert (status, json.loads(state)["pools"][0]["capacity"]["concurrency"]) == (200, 1_000)
        smaller = GENEROUS.replace("concurrency: 1000", "concurrency: 600")
        running.workers.reload(smaller, load_config(smaller, env={}))

        async def has_reloaded() -> bool:
            _, state = await running.get("/state")
            capacity = json.loads(state)["pools"][0]["capacity"]
            return bool(capacity["concurrency"] == 600)

        await until(has_reloaded)
        pids = running.workers._pids()
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: running.workers._pids().get(0) not in {None, pids[0]})
        assert await asyncio.wait_for(health(ports[0]), WITHIN_S) == (
            health_pb2.HealthCheckResponse.SERVING
        )
        await until(running.is_ready)
        assert await has_reloaded()
        assert await running.stop() == 0
    assert left_in(temporary_folder) == []


# What cannot be


def test_books_that_cannot_be_shared_are_refused() -> None:
    """The message says what to do."""
    require_shared(CONFIG)
    with pytest.raises(ConfigError, match=r"state: .* redis:// .* --workers"):
        require_shared(load_config(GENEROUS, env={}))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--workers", "2"), "name a redis:// server, or leave out --workers"),
        (("--workers", "2", "--ext-proc", f"{LOOPBACK}:0"), "no port that Envoy could be told"),
        (("--workers", "3", "--ext-proc", f"{LOOPBACK}:65534"), "65536 is no port"),
        (("--workers", "0"), "not a whole number above 0"),
        (("--workers", "1000"), "more than 128"),
    ],
)
async def test_the_command_line_says_what_is_wrong(
    tmp_path: Path, arguments: Sequence[str], complaint: str
) -> None:
    """And starts nothing."""
    file = tmp_path / "pools.yaml"
    file.write_text(GENEROUS)
    async with command(
        "serve", "--config", file, "--admin", f"{LOOPBACK}:0", *arguments
    ) as refused:
        assert await refused.ended() in {1, 2}
    assert complaint in "\n".join(refused.lines)
