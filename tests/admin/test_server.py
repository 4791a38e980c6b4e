"""The listener: where it binds, that it stops, and what it logs."""

import logging

import aiohttp
import pytest

from envoy_tokenpools.admin.server import AdminServer
from envoy_tokenpools.metrics import PrometheusObserver
from tests.support.reports import FakeReporter

LOOPBACK = "127.0.0.1"


@pytest.fixture
def server(reporter: FakeReporter, metrics: PrometheusObserver) -> AdminServer:
    """Not started."""
    return AdminServer(reporter, metrics)


async def status(port: int, path: str) -> int:
    """Ask once, on a connection of its own."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{LOOPBACK}:{port}{path}") as answer,
    ):
        return answer.status


async def test_it_serves_on_the_port_that_it_returns_until_it_is_stopped(
    server: AdminServer,
) -> None:
    """Port 0 picks a free one; after `stop` nobody answers there."""
    port = await server.start(LOOPBACK, 0)
    assert port > 0
    assert await status(port, "/healthz") == 200
    await server.stop()
    with pytest.raises(aiohttp.ClientConnectorError):
        await status(port, "/healthz")


async def test_drain_turns_readiness_off_and_nothing_else(server: AdminServer) -> None:
    """The probe fails while scrapes go on."""
    port = await server.start(LOOPBACK, 0)
    try:
        assert await status(port, "/readyz") == 200
        server.drain()
        assert await status(port, "/readyz") == 503
        assert await status(port, "/metrics") == 200
    finally:
        await server.stop()


async def test_a_taken_port_is_an_error_that_leaves_nothing_open(
    server: AdminServer, reporter: FakeReporter, metrics: PrometheusObserver
) -> None:
    """The second listener raises; it may be stopped all the same, and the first goes on."""
    port = await server.start(LOOPBACK, 0)
    second = AdminServer(reporter, metrics)
    try:
        with pytest.raises(OSError, match="address already in use"):
            await second.start(LOOPBACK, port)
        await second.stop()
        assert await status(port, "/healthz") == 200
    finally:
        await server.stop()


async def test_stop_without_start_does_nothing(server: AdminServer) -> None:
    """A shutdown after a failed start-up calls it."""
    await server.stop()


async def test_an_idle_connection_does_not_hold_up_the_stop(server: AdminServer) -> None:
    """A browser that keeps its connection open is closed, not waited for."""
    port = await server.start(LOOPBACK, 0)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://{LOOPBACK}:{port}/state") as answer:
            await answer.read()
        await server.stop()
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"http://{LOOPBACK}:{port}/state")


async def test_requests_are_not_logged(
    server: AdminServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Probes and scrapes would drown everything else."""
    caplog.set_level(logging.DEBUG)
    port = await server.start(LOOPBACK, 0)
    try:
        await status(port, "/healthz")
        await status(port, "/nowhere")
    finally:
        await server.stop()
    assert [record for record in caplog.records if record.name.startswith("aiohttp")] == []
