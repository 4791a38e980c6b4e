"""A client of the application, in front of a reporter that is told what to report."""

from collections.abc import AsyncIterator

import pytest
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.web import Application, Request

from envoy_tokenpools.admin.app import Drain, admin_app
from envoy_tokenpools.metrics import PrometheusObserver
from tests.support.reports import FakeReporter


@pytest.fixture
def reporter() -> FakeReporter:
    """One pool with one entitlement, ready."""
    return FakeReporter()


@pytest.fixture
def metrics() -> PrometheusObserver:
    """Nothing counted yet."""
    return PrometheusObserver()


@pytest.fixture
def drain() -> Drain:
    """Not draining."""
    return Drain()


@pytest.fixture
async def client(
    reporter: FakeReporter, metrics: PrometheusObserver, drain: Drain
) -> AsyncIterator[TestClient[Request, Application]]:
    """Asks the application over loopback."""
    async with TestClient(TestServer(admin_app(reporter, metrics, drain))) as asking:
        yield asking
