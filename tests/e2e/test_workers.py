"""
`serve --workers 2` as an operator runs it: two processes, one Redis, one real Envoy.
"""

import asyncio
import contextlib
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from envoy_tokenpools.envoyconf.child import EnvoyChild
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from tests.support.ports import neighbouring_ports
from tests.support.processes import Command, command
from tests.support.redis_server import redis_process
from tests.support.replay import Received, ReplayBackend, json_response
from tests.support.scrapes import parse_text
from tests.support.stack import AUTHORIZATION

SEQUENCES = 6
CONFIG = f"""
state: STATE
server: {{lease_ttl: 5s, drain: 20s, unknown_endpoints: pass, store_deadline: 500ms}}
pools:
  - name: pool
    models: [m]
    capacity: {{tokens_per_second: 1M, kv_cache: 64GiB, concurrency: {SEQUENCES}}}
    kv_bytes_per_token: 144KiB
    tick: 1s
    entitlements:
      - name: tenant
        class: spot
        keys: [{{plain: key}}]
"""
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
ANSWER = json_response(b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}')
WITHIN_S = 30.0


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = WITHIN_S) -> None:
    """Poll until it holds."""
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.05)


class Backend:
    """Answers at once, or, while `holds` is set, when it is told to."""

    def __init__(self) -> None:
        self.holds = False
        self.go = asyncio.Event()
        self.held = 0

    async def respond(self, _: Received, writer: asyncio.StreamWriter) -> None:
        """Once `go` is set, where this one is held."""
        if self.holds:
            self.held += 1
            await self.go.wait()
        writer.write(ANSWER)


@dataclass(frozen=True, slots=True)
class Stage:
    """
    All that runs.

    Attributes:
        serve: the supervisor.
        file: its configuration.
        backend: behind Envoy.
        url: of the chat endpoint.
        admin: of the supervisor.
        arguments: of the command, to start it again.
    """

    serve: Command
    file: Path
    backend: Backend
    url: str
    admin: str
    arguments: tuple[str | Path, ...]

    async def ask(self, request_id: str | None = None) -> int:
        """The status of one request."""
        headers = AUTHORIZATION | ({"x-request-id": request_id} if request_id else {})
        async with httpx.AsyncClient(timeout=WITHIN_S) as client:
            return (await client.post(self.url, content=BODY, headers=headers)).status_code

    async def page(self, path: str) -> httpx.Response:
        """An admin page."""
        async with httpx.AsyncClient() as client:
            return await client.get(self.admin + path)

    async def pool(self) -> dict[str, Any]:
        """The pool's state."""
        found: dict[str, Any] = (await self.page("/state")).json()["pools"][0]
        return found

    async def counts(self) -> Counter[tuple[str, frozenset[tuple[str, str]]]]:
        """All counters and the counts of all histograms."""
        return Counter(
            {
                (sample.name, frozenset(sample.labels.items())): int(sample.value)
                for family in parse_text((await self.page("/metrics")).text)
                for sample in family.samples
                if sample.name.startswith("tokenpools_")
                and sample.name.endswith(("_total", "_count", "_bucket"))
            }
        )

    async def total(self, name: str, **labels: str) -> int:
        """The sum of the series of a counter that carry these labels."""
        return sum(
            value
            for (found, series), value in (await self.counts()).items()
            if found == name and labels.items() <= dict(series).items()
        )

    async def is_ready(self) -> bool:
        """Whether all workers are."""
        return (await self.page("/readyz")).status_code == 200

    async def is_empty(self) -> bool:
        """Whether nothing is held."""
        return bool((await self.pool())["in_use"]["in_flight"] == 0)

    async def holds(self, count: int) -> None:
        """Wait until the backend has so many requests in hand."""

        async def so_many() -> bool:
            return self.backend.held == count

        await until(so_many)

    def workers(self) -> list[psutil.Process]:
        """The worker processes, by number."""
        children = psutil.Process(self.serve.process.pid).children()
        return sorted(children, key=lambda child: child.cmdline()[-2])


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """A configuration file that names a Redis of its own."""
    with redis_process() as redis:
        file = tmp_path / "pools.yaml"
        file.write_text(CONFIG.replace("STATE", redis.url))
        yield file


@contextlib.asynccontextmanager
async def staged(file: Path, socket_file: Path | None = None) -> AsyncIterator[Stage]:
    """Everything up and ready, at neighbouring ports or at socket files."""
    async with contextlib.AsyncExitStack() as stack:
        backend = Backend()
        replay = ReplayBackend(backend.respond)
        backend_url = await replay.start()
        stack.push_async_callback(replay.stop)
        port = neighbouring_ports()
        address = f"unix:{socket_file}" if socket_file else f"127.0.0.1:{port}"
        where = ("--ext-proc", address, "--admin", "127.0.0.1:0")
        arguments = ("serve", "--config", file, "--workers", "2", *where)
        serve = await stack.enter_async_context(command(*arguments))
        line = json.loads(await serve.line_with("all workers serve"))
        options = EnvoyOptions(
            backend_url=backend_url,
            listen_host="127.0.0.1",
            listen_port=0,
            admin_port=0,
            ext_proc_port=port,
            ext_proc_unix_path=str(socket_file) if socket_file else None,
            workers=2,
        )
        envoy = await stack.enter_async_context(
            EnvoyChild(options, log_level="error", concurrency=2)
        )
        stage = Stage(
            serve,
            file,
            backend,
            f"http://127.0.0.1:{envoy.listen_port}/v1/chat/completions",
            f"http://127.0.0.1:{line['admin_port']}",
            arguments,
        )
        await until(stage.is_ready)
        yield stage
        backend.go.set()


async def test_two_workers_share_one_pool_exactly(config: Path) -> None:
    """However requests fall to the workers, as many run as fit, no more and no fewer; all is seen in one place."""
    async with staged(config) as stage:
        stage.backend.holds = True
        asked = [asyncio.create_task(stage.ask(f"id-{number}")) for number in range(4 * SEQUENCES)]
        shed = 4 * SEQUENCES - SEQUENCES

        async def all_decided() -> bool:
            return sum(task.done() for task in asked) == shed and stage.backend.held == SEQUENCES

        await until(all_decided)
        pool = await stage.pool()
        assert pool["in_use"]["concurrency"] == SEQUENCES
        stage.backend.go.set()
        statuses = Counter([await task for task in asked])
        assert statuses == {200: SEQUENCES, 429: shed}
        requests = "tokenpools_requests_total"
        assert await stage.total(requests, outcome="admitted") == SEQUENCES
        assert await stage.total(requests, outcome="shed") == shed
        assert await stage.total("tokenpools_decision_seconds_count") == 4 * SEQUENCES
        await until(stage.is_empty)
        explained = [
            (await stage.page(f"/explain?request_id=id-{number}")).json()["outcome"]
            for number in range(4 * SEQUENCES)
        ]
        assert Counter(explained) == {"admitted": SEQUENCES, "shed": shed}
        assert (await stage.page("/explain?request_id=nobody")).status_code == 404


async def test_a_killed_worker_costs_the_requests_that_it_held_and_nothing_else(
    config: Path,
) -> None:
    """Others go on and new ones are served; no count goes down; it comes back, and so do its leases."""
    async with staged(config) as stage:
        stage.backend.holds = True
        held = [asyncio.create_task(stage.ask()) for _ in range(SEQUENCES)]

        await stage.holds(SEQUENCES)
        before = await stage.counts()
        stage.backend.holds = False
        first, second = stage.workers()
        first.kill()
        later = [await stage.ask() for _ in range(50)]
        assert later[0] == 429, "the pool is full, of leases of the dead one too"
        assert set(later) <= {429, 200}, "until these have expired"
        lost = [task.result() for task in held if task.done()]
        assert set(lost) <= {503}
        await until(stage.is_ready)
        after = await stage.counts()
        assert [series for series, count in before.items() if after[series] < count] == []
        assert await stage.total("tokenpools_worker_restarts_total", worker="0") == 1
        again, same = stage.workers()
        assert (again.pid != first.pid, same.pid) == (True, second.pid)
        stage.backend.go.set()
        assert Counter([await task for task in held]) == {
            503: len(lost),
            200: SEQUENCES - len(lost),
        }
        await until(stage.is_empty)
        endings = "tokenpools_completions_total"
        assert await stage.total(endings, ending="expired") == len(lost)
        served = SEQUENCES - len(lost) + later.count(200)
        assert await stage.total(endings, ending="completed") == served
        assert {await stage.ask() for _ in range(50)} == {200}
        admitted = await stage.total("tokenpools_requests_total", outcome="admitted")
        assert admitted == len(lost) + served + 50


async def test_requests_flow_on_while_workers_are_killed(config: Path) -> None:
    """One after the other, with requests at all times: only those that the dead one had in hand fail."""
    async with staged(config) as stage:
        statuses: Counter[int] = Counter()
        over = asyncio.Event()

        async def client() -> None:
            while not over.is_set():
                statuses[await stage.ask()] += 1

        clients = [asyncio.create_task(client()) for _ in range(3)]
        for number in range(2):
            count = statuses.total()

            async def some_more(count: int = count) -> bool:
                return statuses.total() > count + 50

            await until(some_more)
            stage.workers()[number].kill()
            await stage.serve.line_with("a worker died")
            await until(stage.is_ready)
        over.set()
        await asyncio.gather(*clients)
        assert set(statuses) <= {200, 429, 503}
        assert statuses[503] <= len(clients) * 2, statuses
        assert statuses[429] == 0 or statuses[200] > statuses[429]
        await until(stage.is_empty)
        admitted = await stage.total("tokenpools_requests_total", outcome="admitted")
        assert statuses[200] <= admitted <= statuses[200] + statuses[503]


async def test_sigterm_lets_open_requests_of_all_workers_end(config: Path) -> None:
    """Readiness turns at once; what is in flight is answered whole; then all ends with status 0."""
    async with staged(config) as stage:
        stage.backend.holds = True
        held = [asyncio.create_task(stage.ask()) for _ in range(SEQUENCES)]

        async def is_draining() -> bool:
            return (await stage.page("/readyz")).text == "draining\n"

        await stage.holds(SEQUENCES)
        workers = stage.workers()
        stage.serve.send(signal.SIGTERM)
        await until(is_draining)
        assert (await stage.page("/healthz")).status_code == 200
        assert await stage.ask() == 503
        stage.backend.go.set()
        assert [await task for task in held] == [200] * SEQUENCES
        assert await stage.serve.ended() == 0
        assert not any(worker.is_running() for worker in workers)


async def test_a_second_signal_ends_all_at_once(config: Path) -> None:
    """With requests that never end."""
    async with staged(config) as stage:
        stage.backend.holds = True
        stuck = asyncio.create_task(stage.ask())

        async def is_draining() -> bool:
            return not await stage.is_ready()

        await stage.holds(1)
        workers = stage.workers()
        stage.serve.send(signal.SIGTERM)
        await until(is_draining)
        stage.serve.send(signal.SIGTERM)
        assert await stage.serve.ended(5.0) == 1
        assert await stuck == 503

        async def all_gone() -> bool:
            return not any(map(_runs, workers))

        await until(all_gone, 5.0)


async def test_sighup_is_one_reload_of_all_workers(config: Path) -> None:
    """A broken file is refused once, and a worker that is started again does not read it either."""
    async with staged(config) as stage:
        text = stage.file.read_text()
        stage.file.write_text(text.replace(f"concurrency: {SEQUENCES}", "concurrency: 9"))
        stage.serve.send(signal.SIGHUP)

        async def has_nine() -> bool:
            return bool((await stage.pool())["capacity"]["concurrency"] == 9)

        await until(has_nine)
        stage.file.write_text(text.replace("class: spot", "class: platinum"))
        stage.serve.send(signal.SIGHUP)
        assert "class" in await stage.serve.line_with("configuration refused")
        reloads = "tokenpools_config_reloads_total"
        assert await stage.total(reloads, result="success") == 1
        assert await stage.total(reloads, result="failure") == 1
        stage.file.write_text(text.replace("/0", "/1"))
        stage.serve.send(signal.SIGHUP)
        await stage.serve.line_with("a restart is needed")
        stage.workers()[0].kill()
        await stage.serve.line_with("a worker died")
        await until(stage.is_ready)
        assert await has_nine()
        assert await stage.ask() == 200


async def test_workers_do_not_outlive_a_killed_supervisor(config: Path) -> None:
    """They end what they have, and the next supervisor serves at the same ports meanwhile."""
    async with staged(config) as stage:
        stage.backend.holds = True
        held = asyncio.create_task(stage.ask())

        await stage.holds(1)
        workers = stage.workers()
        stage.serve.send(signal.SIGKILL)

        async def one_is_gone() -> bool:
            return sum(map(_runs, workers)) == 1

        await until(one_is_gone, 10.0)
        async with command(*stage.arguments) as second:
            await second.line_with("all workers serve")
            stage.backend.holds = False

            async def serves() -> bool:
                return await stage.ask() == 200

            await until(serves)
            stage.backend.go.set()
            assert await held == 200

            async def all_gone() -> bool:
                return not any(map(_runs, workers))

            await until(all_gone)
            second.send(signal.SIGTERM)
            assert await second.ended() == 0


async def test_workers_may_listen_on_socket_files(config: Path, tmp_path: Path) -> None:
    """Each on its own, and again when it was killed."""
    async with staged(config, tmp_path / "ext") as stage:
        assert {await stage.ask() for _ in range(20)} == {200}
        stage.workers()[1].kill()
        await stage.serve.line_with("a worker died")
        assert {await stage.ask() for _ in range(20)} == {200}
        await until(stage.is_ready)
        assert {await stage.ask() for _ in range(20)} == {200}


async def test_what_is_printed_for_envoy_names_every_worker(config: Path) -> None:
    """`envoy-config` and `serve` agree on addresses when given the same arguments."""
    arguments = ("--ext-proc", "127.0.0.1:50100", "--workers", "3")
    backend = ("--backend", "http://10.0.0.7:8000")
    async with command("envoy-config", "--config", config, *backend, *arguments) as printed:
        assert await printed.ended() == 0
    text = "\n".join(printed.lines)
    assert all(f"port_value: {port}" in text for port in (50_100, 50_101, 50_102))
    assert "50103" not in text


def _runs(process: psutil.Process) -> bool:
    """Whether it does; what collects a dead orphan is not ours."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
