"""A real Envoy is started, watched, drained and stopped, and nothing of it is left behind."""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from envoy_tokenpools.envoyconf import child as child_module
from envoy_tokenpools.envoyconf.child import EnvoyChild
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from envoy_tokenpools.errors import EnvoyError
from tests.envoyconf.ext_proc_stub import BackendStub, ExtProcStub


def _options(**changes: object) -> EnvoyOptions:
    """Loopback and free ports; there is no backend and no filter unless they are given."""
    values: dict[str, Any] = {
        "backend_url": "http://127.0.0.1:9",
        "ext_proc_port": 9,
        "listen_host": "127.0.0.1",
        "listen_port": 0,
        "admin_port": 0,
    }
    return EnvoyOptions(**{**values, **changes})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _left_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def _is_private(folder: Path) -> bool:
    return folder.stat().st_mode & 0o077 == 0


def _script(folder: Path, body: str) -> Path:
    path = folder / "envoy"
    path.write_text(f"#!/bin/sh\n{body}\n", "utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the child may leave files, to see that it leaves none."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
async def backend() -> AsyncIterator[BackendStub]:
    """A backend that is up."""
    stub = BackendStub()
    await stub.start()
    yield stub
    await stub.stop()


@pytest.fixture
async def ext_proc() -> AsyncIterator[ExtProcStub]:
    """A filter that lets everything pass."""
    stub = ExtProcStub()
    await stub.start()
    yield stub
    await stub.stop()


async def test_it_serves_when_start_returns_and_leaves_nothing(temporary_folder: Path) -> None:
    """Ports that the system chose are known, and the end is clean."""
    async with EnvoyChild(_options(), concurrency=1) as child:
        process = psutil.Process(child.pid)
        assert process.name() == "envoy"
        (folder,) = _left_in(temporary_folder)
        assert _is_private(folder)
        async with aiohttp.ClientSession() as session:
            answer = await session.get(f"http://127.0.0.1:{child.listen_port}/")
            assert answer.status == 503
            assert child.admin_url is not None
            ready = await session.get(f"{child.admin_url}/ready")
            assert (await ready.text()).strip() == "LIVE"
    assert not process.is_running()
    assert _left_in(temporary_folder) == []
    assert await child.wait() == 0


async def test_it_starts_without_an_admin_interface() -> None:
    """Then a connection that is accepted is the sign."""
    port = _free_port()
    async with EnvoyChild(_options(listen_port=port, admin_host=None), concurrency=1) as child:
        assert child.admin_url is None
        assert child.listen_port == port
        async with aiohttp.ClientSession() as session:
            answer = await session.get(f"http://127.0.0.1:{port}/")
            assert answer.status == 503


async def test_an_unexpected_end_is_noticed(temporary_folder: Path) -> None:
    """`wait` returns when the process dies, and `stop` still cleans up."""
    async with EnvoyChild(_options(), concurrency=1) as child:
        os.kill(child.pid, signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL
    assert _left_in(temporary_folder) == []


async def test_a_drain_lets_requests_finish_and_takes_no_more(
    backend: BackendStub, ext_proc: ExtProcStub
) -> None:
    """Requests in flight get their answer; new connections are refused meanwhile."""
    backend.may_answer.clear()
    options = _options(backend_url=f"http://127.0.0.1:{backend.port}", ext_proc_port=ext_proc.port)
    async with EnvoyChild(options, concurrency=1) as child, aiohttp.ClientSession() as session:
        in_flight = asyncio.create_task(session.get(f"http://127.0.0.1:{child.listen_port}/"))
        await backend.was_asked.wait()
        stopping = asyncio.create_task(child.stop(drain_ms=30_000))
        async with asyncio.timeout(10):
            while await child_module._accepts("127.0.0.1", child.listen_port):
                assert not stopping.done()
        assert not in_flight.done()
        backend.may_answer.set()
        assert (await in_flight).status == 200
        await stopping
    assert await child.wait() == 0


async def test_a_drain_ends_at_its_deadline(backend: BackendStub, ext_proc: ExtProcStub) -> None:
    """A request that never finishes does not keep Envoy alive."""
    backend.may_answer.clear()
    options = _options(backend_url=f"http://127.0.0.1:{backend.port}", ext_proc_port=ext_proc.port)
    async with EnvoyChild(options, concurrency=1) as child, aiohttp.ClientSession() as session:
        in_flight = asyncio.create_task(session.get(f"http://127.0.0.1:{child.listen_port}/"))
        await backend.was_asked.wait()
        await child.stop(drain_ms=50)
        with pytest.raises(aiohttp.ClientError):
            await in_flight
    assert await child.wait() == 0


async def test_a_taken_port_is_refused() -> None:
    """Two Envoys would share a port in silence; the second one is not started."""
    async with EnvoyChild(_options(), concurrency=1) as first:
        second = EnvoyChild(_options(listen_port=first.listen_port))
        with pytest.raises(
            EnvoyError, match=f"cannot listen on 127.0.0.1 port {first.listen_port}"
        ):
            await second.start()


async def test_an_end_while_starting_quotes_the_log(tmp_path: Path, temporary_folder: Path) -> None:
    """The error holds the status and what the program said."""
    binary = _script(tmp_path, "echo 'no such field: nonsense' >&2; exit 3")
    with pytest.raises(EnvoyError, match=r"ended with status 3(.|\n)*no such field: nonsense"):
        await EnvoyChild(_options(), binary=binary).start()
    assert _left_in(temporary_folder) == []


async def test_a_program_that_never_serves_and_ignores_sigterm_is_killed(
    tmp_path: Path, temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline of the start holds, and so does that of the end."""
    monkeypatch.setattr(child_module, "_KILL_AFTER_S", 0.1)
    binary = _script(tmp_path, "trap '' TERM; echo deaf >&2; exec sleep 60")
    child = EnvoyChild(_options(), binary=binary, start_timeout_ms=1_500)
    with pytest.raises(EnvoyError, match=r"did not serve within 1.5 s(.|\n)*deaf"):
        await child.start()
    assert await child.wait() == -signal.SIGKILL
    assert _left_in(temporary_folder) == []


async def test_log_lines_are_relayed(caplog: pytest.LogCaptureFixture) -> None:
    """What Envoy says can be read in our log, and of late also from the child."""
    caplog.set_level("INFO", logger=child_module.__name__)
    async with EnvoyChild(_options(), concurrency=1, log_level="info") as child:
        pid = child.pid
    relayed = [record for record in caplog.records if record.__dict__.get("envoy_pid") == pid]
    assert any("starting main dispatch loop" in record.message for record in relayed)
    assert "exiting" in child.log_tail()


async def test_it_dies_with_its_parent() -> None:
    """A parent that is killed leaves no orphan that would hold the port."""
    program = (
        "import os, subprocess, sys\n"
        "launch = [sys.executable, '-I', '-S', '-c', sys.argv[1], str(os.getpid())]\n"
        "child = subprocess.Popen([*launch, '/bin/sleep', '60'], stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, child_module._LAUNCHER, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    orphan = psutil.Process(int(await parent.stdout.readline()))
    async with asyncio.timeout(10):
        while orphan.name() != "sleep":
            await asyncio.to_thread(orphan.ppid)
    parent.kill()
    await parent.wait()
    # What collects the dead orphan is not ours: gone, or dead and not yet collected.
    async with asyncio.timeout(10):
        while orphan.is_running() and orphan.status() != psutil.STATUS_ZOMBIE:
            await asyncio.to_thread(os.sched_yield)
