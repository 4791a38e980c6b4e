"""
`serve`, `run`, `demo`, `check` and `envoy-config` as an operator runs them.
"""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from envoy_tokenpools.envoyconf.child import EnvoyChild
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from tests.support.processes import Command, command
from tests.support.replay import Received, ReplayBackend, Responder, always, json_response
from tests.support.stack import AUTHORIZATION, GENEROUS

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
ANSWER = json_response(b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}')


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration file of a generous pool."""
    file = tmp_path / "pools.yaml"
    file.write_text(GENEROUS)
    return file


async def _serving_ports(running: Command) -> tuple[int, int]:
    """ext_proc and admin port that `serve` logs."""
    line = json.loads(await running.line_with('"serving"'))
    return line["port"], line["admin_port"]


async def _ask(url: str, timeout_s: float = 10.0) -> int:
    async with httpx.AsyncClient(timeout=timeout_s) as client:
        answer = await client.post(url, content=BODY, headers=AUTHORIZATION)
        return answer.status_code


def _serve(config: Path, port: int = 0) -> AbstractAsyncContextManager[Command]:
    address = f"127.0.0.1:{port}"
    return command("serve", "--config", config, "--ext-proc", address, "--admin", "127.0.0.1:0")


@dataclass(frozen=True, slots=True)
class _Served:
    """A filter that runs as a process of its own behind a real Envoy."""

    command: Command
    port: int
    admin: str
    url: str

    async def drains(self) -> None:
        """Wait until it says that it is not ready any more."""
        async with httpx.AsyncClient() as client:
            while (await client.get(f"{self.admin}/readyz")).status_code != 503:
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def _served(config: Path, respond: Responder) -> AsyncIterator[_Served]:
    backend = ReplayBackend(respond)
    backend_url = await backend.start()
    try:
        async with _serve(config) as running:
            port, admin = await _serving_ports(running)
            options = EnvoyOptions(
                backend_url=backend_url,
                listen_host="127.0.0.1",
                listen_port=0,
                ext_proc_port=port,
                admin_port=0,
            )
            async with EnvoyChild(options, log_level="error") as envoy:
                url = f"http://127.0.0.1:{envoy.listen_port}/v1/chat/completions"
                yield _Served(running, port, f"http://127.0.0.1:{admin}", url)
    finally:
        await backend.stop()


class _Held:
    """A responder that holds its first answer back until `go` is set."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, _: Received, writer: asyncio.StreamWriter) -> None:
        if not self.arrived.is_set():
            self.arrived.set()
            await self.go.wait()
        writer.write(ANSWER)


async def test_a_killed_filter_means_503_and_a_restarted_one_serves_again(config: Path) -> None:
    """SIGKILL during requests: they get 503; the restarted filter serves without a manual step."""
    held = _Held()
    async with _served(config, held) as served:
        caught = asyncio.create_task(_ask(served.url))
        await held.arrived.wait()
        served.command.send(signal.SIGKILL)
        await served.command.ended()
        assert await caught == 503
        assert await _ask(served.url) == 503
        async with _serve(config, served.port) as second:
            await _serving_ports(second)
            statuses = [await _ask(served.url)]
            while statuses[-1] != 200 and len(statuses) < 100:
                await asyncio.sleep(0.05)
                statuses.append(await _ask(served.url))
            assert statuses[-1] == 200, statuses
            second.send(signal.SIGTERM)
            assert await second.ended() == 0


async def test_sigterm_lets_an_open_stream_end_and_settles_it(config: Path) -> None:
    """`serve` drains: the request in flight is answered whole, then the process ends with status 0."""
    held = _Held()
    async with _served(config, held) as served:
        open_request = asyncio.create_task(_ask(served.url))
        await held.arrived.wait()
        served.command.send(signal.SIGTERM)
        await served.drains()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{served.admin}/healthz")).status_code == 200
        held.go.set()
        assert await open_request == 200
        assert await served.command.ended() == 0


async def test_a_second_signal_ends_the_filter_at_once(config: Path) -> None:
    """With a request that never ends, one SIGTERM drains and a second one exits."""
    held = _Held()
    async with _served(config, held) as served:
        stuck = asyncio.create_task(_ask(served.url))
        await held.arrived.wait()
        served.command.send(signal.SIGTERM)
        await served.drains()
        served.command.send(signal.SIGTERM)
        assert await served.command.ended(5.0) == 1
        assert await stuck == 503


async def test_sighup_takes_a_new_configuration_and_refuses_a_broken_one(config: Path) -> None:
    """A reload shows in `/state`; a faulty file is logged with its fault and the old one stays."""
    async with _serve(config) as filter_:
        _, admin = await _serving_ports(filter_)
        config.write_text(GENEROUS.replace("concurrency: 1000", "concurrency: 500"))
        filter_.send(signal.SIGHUP)
        await filter_.line_with("configuration reloaded")
        config.write_text(GENEROUS.replace("class: elastic", "class: platinum"))
        filter_.send(signal.SIGHUP)
        assert "class" in await filter_.line_with("configuration refused")
        async with httpx.AsyncClient() as client:
            state = (await client.get(f"http://127.0.0.1:{admin}/state")).json()
            metrics = (await client.get(f"http://127.0.0.1:{admin}/metrics")).text
        assert state["pools"][0]["capacity"]["concurrency"] == 500
        assert 'tokenpools_config_reloads_total{result="success"} 1.0' in metrics
        assert 'tokenpools_config_reloads_total{result="failure"} 1.0' in metrics
        filter_.send(signal.SIGTERM)
        assert await filter_.ended() == 0


async def test_run_starts_envoy_again_when_it_dies_and_leaves_nothing_behind(config: Path) -> None:
    """`run` serves at the address it prints, survives the death of its Envoy, and ends cleanly."""
    backend = ReplayBackend(always(ANSWER))
    backend_url = await backend.start()
    async with command(
        "run",
        "--config",
        config,
        "--backend",
        backend_url,
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "127.0.0.1:0",
    ) as run:
        line = await run.line_with("Send requests to")
        url = line.split()[3] + "/chat/completions"
        assert await _ask(url) == 200
        children = psutil.Process(run.process.pid).children(recursive=True)
        envoys = [child for child in children if "envoy" in child.name()]
        assert len(envoys) == 1
        envoys[0].kill()
        await run.line_with("Envoy died")
        for _ in range(100):
            try:
                if await _ask(url) == 200:
                    break
            except httpx.HTTPError:
                await asyncio.sleep(0.05)
        assert await _ask(url) == 200
        children = psutil.Process(run.process.pid).children(recursive=True)
        run.send(signal.SIGTERM)
        assert await run.ended() == 0
        assert not [child for child in children if child.is_running()]
    await backend.stop()


async def test_the_demo_keeps_its_promises() -> None:
    """`demo` ends with status 0, which it does only if guaranteed was never shed and all leases are settled."""
    async with command("demo", "--plain", "--seconds", "5") as demo:
        assert await demo.ended(90.0) == 0, "\n".join(demo.lines)
        text = "\n".join(demo.lines)
    assert "search-prod (guaranteed) was never refused" in text
    assert "every lease was settled" in text
    assert "batch (spot) got what was left, refused" in text


async def test_check_names_every_fault_with_its_path(config: Path) -> None:
    """`check` accepts a good file and lists all faults of a bad one, with exit status 1."""
    async with command("check", config) as good:
        assert await good.ended() == 0
    config.write_text(
        GENEROUS.replace("class: elastic", "class: platinum").replace("tick: 1s", "tick: 1")
    )
    async with command("check", config) as bad:
        assert await bad.ended() == 1
    text = "\n".join(bad.lines)
    assert "pools[0].entitlements[0].class" in text
    assert "pools[0].tick" in text


async def test_envoy_config_prints_a_bootstrap(config: Path) -> None:
    """`envoy-config` prints YAML that names the backend and the filter."""
    async with command(
        "envoy-config", "--config", config, "--backend", "http://10.0.0.7:8000"
    ) as printed:
        assert await printed.ended() == 0
    text = "\n".join(printed.lines)
    assert "10.0.0.7" in text
    assert "envoy.filters.http.ext_proc" in text
