"""Several replicas of the filter in one run: where they keep their books, and what is seen of them."""

import contextlib
import io
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from rich.console import Console

from envoy_tokenpools.cli import build_parser, main
from envoy_tokenpools.clock import SystemClock
from envoy_tokenpools.config import EMBEDDED, parse_address
from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import NEW_STANDING
from envoy_tokenpools.errors import ConfigError, StoreError
from envoy_tokenpools.gate.gate import STORE_AWAY
from envoy_tokenpools.lab.books import MAX_REPLICAS, check_books, own_books
from envoy_tokenpools.lab.experiment_table import report
from envoy_tokenpools.lab.record import Decisions, read_records, write_records
from envoy_tokenpools.lab.replicas import Replicas, replicas
from envoy_tokenpools.lab.sampling import sample_of
from envoy_tokenpools.lab.scenario import Scenario
from envoy_tokenpools.lab.scenario_file import shipped_scenarios
from envoy_tokenpools.observer import Decided, Outcome
from envoy_tokenpools.server import FilterServer, Listen
from envoy_tokenpools.store.factory import open_store
from tests.support.records import record
from tests.support.redis_server import free_port, redis_process
from tests.support.reports import QWEN, SEARCH
from tests.support.scrapes import tell
from tests.support.shared_redis import shared_server

SERVER = "redis://127.0.0.1:1"


async def keys_of(url: str) -> list[bytes]:
    """All keys that the books at `url` consist of."""
    client = Redis.from_url(shared_server())
    try:
        return [key async for key in client.scan_iter(f"{parse_address(url).prefix}*")]
    finally:
        await client.aclose()


# ---------------------------------------------------------------------- where the books are


def test_several_replicas_need_a_server() -> None:
    """What one process keeps is not shared; a lone replica may do without."""
    check_books(EMBEDDED, 1)
    check_books(SERVER, 1)
    check_books(SERVER, 3)
    with pytest.raises(ConfigError, match=r"--state: 3 replicas need a server .* redis://"):
        check_books(EMBEDDED, 3)
    with pytest.raises(ConfigError, match=f"--replicas: 17 is more than {MAX_REPLICAS}"):
        check_books(SERVER, 17)


@pytest.mark.parametrize("state", ["etcd://127.0.0.1", "redis://", f"{SERVER}?prefix=a b"])
def test_a_faulty_url_is_told(state: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match=r"^--state: "):
        check_books(state, 1)


def test_the_command_tells_what_is_missing(capfd: pytest.CaptureFixture[str]) -> None:
    """One line, and a failure."""
    assert main(["experiment", "fair-share", "--replicas", "2"]) == 1
    assert "--state: 2 replicas need a server" in capfd.readouterr().err


def test_the_command_line_names_the_replicas_and_their_server() -> None:
    """One replica with books of its own, if nothing is said."""
    parse = build_parser().parse_args
    plain = parse(["experiment", "mixed"])
    assert (plain.replicas, plain.state) == (1, EMBEDDED)
    several = parse(["experiment", "mixed", "--replicas", "3", "--state", SERVER])
    assert (several.replicas, several.state) == (3, SERVER)


async def test_the_embedded_books_are_always_ones_own() -> None:
    """Nothing has to be kept apart."""
    async with own_books(EMBEDDED, "pool") as url:
        assert url == EMBEDDED


async def test_each_run_has_books_of_its_own_and_leaves_none() -> None:
    """Under the prefix that was given; all else about the server stays."""
    given = f"{shared_server()}?db=0&prefix=mine"
    async with own_books(given, "pool") as one, own_books(given, "pool") as other:
        prefixes = {parse_address(url).prefix for url in (one, other)}
        assert len(prefixes) == 2
        assert all(prefix.startswith("mine-") for prefix in prefixes)
        assert replace(parse_address(one), prefix="mine") == parse_address(given)
        store = open_store(one, SystemClock(), deadline_ms=5_000)
        await store.open("pool", "a configuration")
        await store.close()
        assert await keys_of(one)
        assert not await keys_of(other)
    assert not await keys_of(one)


async def test_books_that_cannot_be_thrown_away_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A run that is over is not lost for it."""
    with redis_process() as server:
        async with own_books(server.url, "pool"):
            server.kill()
    assert [one.message for one in caplog.records if one.levelno == logging.WARNING] == [
        "the books of a run stay on the server"
    ]


def test_a_reload_leaves_the_books_where_they_are() -> None:
    """A change of capacity changes nothing else."""
    scenario = shipped_scenarios("fair-share")[0].keeping_books_at(SERVER)
    assert scenario.config_for(8).state == SERVER
    assert scenario.scaled(0.1).config.state == SERVER


# ---------------------------------------------------------------------- the replicas


@contextlib.asynccontextmanager
async def started(scenario: Scenario, folder: Path) -> AsyncIterator[Replicas]:
    """Two replicas without an Envoy."""
    servers: Sequence[FilterServer] = [
        FilterServer(scenario.config, Listen(f"unix:{folder}/{name}", admin_port=None))
        for name in "ab"
    ]
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        yield Replicas(servers, "")


async def test_replicas_whose_server_is_away_do_not_start() -> None:
    """Else they would decide alone, and nothing would be shown."""
    away = f"redis://127.0.0.1:{free_port()}"
    scenario = shipped_scenarios("fair-share")[0].keeping_books_at(away)
    with pytest.raises(StoreError, match="does not answer"):
        async with replicas(scenario.config, 2, "http://127.0.0.1:1"):
            raise AssertionError("unreachable")


async def test_a_change_of_capacity_reaches_all_replicas(tmp_path: Path) -> None:
    """Each reports what is usable now, whichever is asked to read the books."""
    written = shipped_scenarios("fair-share")[0]
    async with own_books(shared_server(), written.pool.name) as state:
        scenario = written.keeping_books_at(state)
        async with started(scenario, tmp_path) as both:
            for first in (0, 1, 2):
                reports = await both.reports(first)
                assert [one.usable.concurrency for one in reports] == [16, 16]
            await both.reload(scenario.config_for(8))
            reports = await both.reports(1)
            assert [one.usable.concurrency for one in reports] == [8, 8]
            assert [one.capacity.concurrency for one in reports] == [8, 8]
            assert both.decisions() == [Decisions(0), Decisions(0)]


def decided(outcome: Outcome, reason: str = "") -> Decided:
    """An event of some request."""
    return Decided(outcome, reason, "pool", "chat", ServiceClass.ELASTIC)


async def test_what_each_replica_decided_is_counted(tmp_path: Path) -> None:
    """A request once, though it may be ended later; and whether the books had answered."""
    async with started(shipped_scenarios("fair-share")[0], tmp_path) as both:
        one, other = (server.gate.observer for server in both.servers)
        tell(
            one,
            [
                decided(Outcome.ADMITTED),
                decided(Outcome.EVICTED, "evicted"),
                decided(Outcome.ADMITTED, STORE_AWAY),
                decided(Outcome.REJECTED, STORE_AWAY),
            ],
        )
        tell(other, [decided(Outcome.SHED, "pool_contended")])
        assert both.decisions() == [Decisions(3, alone=2), Decisions(1)]


async def test_what_one_replica_publishes_all_report(tmp_path: Path) -> None:
    """A debt is the pool's: whoever looks sees it."""
    written = shipped_scenarios("fair-share")[0]
    async with (
        own_books(shared_server(), written.pool.name) as state,
        started(written.keeping_books_at(state), tmp_path) as both,
    ):
        leading, other = (server.gate.house for server in both.servers)
        (live,) = leading.pools()
        standing = replace(NEW_STANDING, debt=0.25)
        live.tick = replace(live.tick, standings={**live.tick.standings, "synth": standing})
        live.is_published = False
        await leading.round()
        await other.round()
        for first in (0, 1):
            pool = (await both.reports(first))[0]
            assert {one.name: one.debt for one in pool.entitlements}["synth"] == 0.25


# ---------------------------------------------------------------------- what is recorded


def test_a_sample_has_who_waits_in_any_replica() -> None:
    """What all share is one replica's; who waits, waits in one of them."""
    other = replace(
        QWEN, usable=Resources.NONE, entitlements=(replace(SEARCH, waiting=4, debt=9.0),)
    )
    sample = sample_of(QWEN, 7, others=[other, other])
    assert sample.usable == QWEN.usable.concurrency
    assert sample.standings["search"].waiting == SEARCH.waiting + 8
    assert sample.standings["search"].debt == SEARCH.debt
    assert sample_of(QWEN, 7).standings["search"].waiting == SEARCH.waiting


def test_a_record_says_who_decided(tmp_path: Path) -> None:
    """One that was written when nobody counted is read all the same."""
    run = msgspec.structs.replace(record(), decisions=[Decisions(5), Decisions(7, alone=2)])
    path = tmp_path / "small.json"
    write_records(path, {"run": run})
    assert read_records(path) == {"run": run}
    raw = msgspec.json.decode(path.read_bytes())
    del raw["runs"][0]["decisions"]
    path.write_bytes(msgspec.json.encode(raw))
    assert read_records(path)["run"].decisions == []


def told(*decisions: Decisions) -> str:
    """The report of a run in which the replicas decided so much, as printed."""
    run = msgspec.structs.replace(record(run="main"), decisions=list(decisions))
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(report({"main": run}, []))
    return console.export_text()


def test_who_decided_is_told_of_several_replicas() -> None:
    """And of one that did without its books for a while."""
    assert "decisions by" not in told()
    assert "decisions by" not in told(Decisions(5))
    assert "main decisions by 2 replica(s): 5, 7\n" in told(Decisions(5), Decisions(7))
    troubled = told(Decisions(5, alone=2))
    assert "main decisions by 1 replica(s): 5; 2 of them without the shared books" in troubled
