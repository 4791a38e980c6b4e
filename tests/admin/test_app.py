"""The admin's routes as a client sees them."""

from dataclasses import replace

import pytest
from aiohttp.test_utils import TestClient
from aiohttp.web import Application, Request

from envoy_tokenpools import __version__
from envoy_tokenpools.admin.app import Drain
from envoy_tokenpools.metrics import PrometheusObserver
from envoy_tokenpools.observer import Decided, Outcome
from tests.support.reports import SHED, FakeReporter

Client = TestClient[Request, Application]

PATHS = ("/", "/metrics", "/healthz", "/readyz", "/state", "/explain?request_id=8f3c")


async def test_metrics_have_the_counters_and_fresh_gauges(
    client: Client, reporter: FakeReporter, metrics: PrometheusObserver
) -> None:
    """A scrape refreshes the report before it renders it."""
    metrics.decided(Decided(Outcome.ADMITTED, pool="qwen", entitlement="search"))
    answer = await client.get("/metrics")
    text = await answer.text()
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'tokenpools_weight{entitlement="search",pool="qwen"} 333.25\n' in text
    assert 'tokenpools_requests_total{entitlement="search",outcome="admitted",pool="qwen"' in text
    assert reporter.refreshes == 1


async def test_metrics_are_openmetrics_for_a_scraper_that_asks_for_it(client: Client) -> None:
    """The Accept header reaches the renderer."""
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    answer = await client.get("/metrics", headers={"accept": accept})
    expected = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert answer.headers["content-type"] == expected
    assert (await answer.text()).endswith("# EOF\n")


async def test_state_is_the_fresh_report_as_json(client: Client, reporter: FakeReporter) -> None:
    """Each look refreshes the report."""
    answer = await client.get("/state")
    document = await answer.json()
    assert answer.content_type == "application/json"
    assert document["version"] == __version__
    assert [pool["name"] for pool in document["pools"]] == ["qwen"]
    assert document["pools"][0]["models"] == ["Qwen/Qwen3-8B", "qwen3-8b"]
    reporter.fresh = ()
    assert (await (await client.get("/state")).json())["pools"] == []


async def test_a_decision_is_explained_by_the_id_of_its_request(client: Client) -> None:
    """Every field under its name: they are an interface. Enums are their values, what is not known is null."""
    answer = await client.get("/explain", params={"request_id": "8f3c"})
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert await answer.json() == {
        "request_id": "8f3c",
        "at_ms": 70_000,
        "age_ms": 2_500,
        "pool": "qwen",
        "entitlement": "batch",
        "service_class": "spot",
        "state": "Bound",
        "mode": "enforce",
        "outcome": "shed",
        "reason": "pool_contended",
        "rule": "rule 5b: the pool has no free capacity for it",
        "priority": {
            "weight": 0.25,
            "factors": {"service_class": 1.0, "slo": 0.5, "burst": 0.5, "debt": 1.0},
            "debt": 0.0,
            "burst": 1.0,
            "slo_target_ms": None,
            "mean_slo_ms": 500.0,
        },
        "cost": {"prompt_tokens": 30, "output_tokens": 70, "kv_bytes": 400, "concurrency": 2},
        "usable": {"tokens_per_second": 200, "kv_bytes": 14_000, "concurrency": 14},
        "share": {"tokens_per_second": 5, "kv_bytes": 500, "concurrency": 1},
        "guarantee": {"tokens_per_second": 0, "kv_bytes": 0, "concurrency": 0},
        "limits": {"tokens_per_second": None, "kv_bytes": None, "concurrency": 4},
        "inside_share": None,
        "inside_guarantee": False,
        "shortage": {
            "resource": "concurrency",
            "need": 2,
            "available": 1,
            "retry_after_ms": 850,
        },
        "waited_ms": 0,
        "ended": None,
    }


@pytest.mark.parametrize("request_id", ["b2d9", "<script>alert(1)</script>", "ü", "x" * 256])
async def test_an_unknown_request_is_a_404_in_json_that_repeats_nothing(
    client: Client, request_id: str
) -> None:
    """It says what may be the reason."""
    answer = await client.get("/explain", params={"request_id": request_id})
    assert (answer.status, answer.content_type) == (404, "application/json")
    text = await answer.text()
    assert "forgotten" in text
    assert request_id not in text


@pytest.mark.parametrize(
    "query",
    ["", "?request_id=", "?request_id=a&request_id=b", "?id=8f3c", f"?request_id={'x' * 257}"],
)
async def test_a_question_that_names_no_request_is_a_400_in_json(
    client: Client, query: str
) -> None:
    """Missing, empty, twice, or longer than any that is remembered."""
    answer = await client.get(f"/explain{query}")
    assert (answer.status, answer.content_type) == (400, "application/json")
    assert "/explain?request_id=" in (await answer.json())["error"]


async def test_an_id_with_markup_comes_back_as_json_and_nothing_else(
    client: Client, reporter: FakeReporter
) -> None:
    """A client may have chosen it; no browser takes the answer for a page."""
    odd = "<img src=x onerror=alert(1)>&\"'"
    reporter.explanations[odd] = replace(SHED, request_id=odd)
    answer = await client.get("/explain", params={"request_id": odd})
    assert answer.content_type == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert (await answer.json())["request_id"] == odd


async def test_ready_follows_the_reporter(client: Client, reporter: FakeReporter) -> None:
    """503 while no decisions can be made, 200 again when they can."""
    assert (await client.get("/readyz")).status == 200
    reporter.is_ready = False
    answer = await client.get("/readyz")
    assert (answer.status, await answer.text()) == (503, "not ready\n")
    reporter.is_ready = True
    assert (await client.get("/readyz")).status == 200


async def test_who_decides_without_the_shared_store_is_ready_and_says_so(
    client: Client, reporter: FakeReporter
) -> None:
    """It serves, and somebody should look at the store."""
    reporter.store_answers = False
    answer = await client.get("/readyz")
    assert answer.status == 200
    assert await answer.text() == "ok, but the shared store does not answer\n"
    reporter.is_ready = False
    assert (await client.get("/readyz")).status == 503


async def test_a_draining_process_is_alive_but_not_ready(client: Client, drain: Drain) -> None:
    """Readiness ends with the start of the drain; health, state and metrics do not."""
    drain.started = True
    answer = await client.get("/readyz")
    assert (answer.status, await answer.text()) == (503, "draining\n")
    for path in ("/healthz", "/state", "/metrics"):
        assert (await client.get(path)).status == 200


async def test_health_does_not_depend_on_the_store(client: Client, reporter: FakeReporter) -> None:
    """A lost store is no reason to restart the process."""
    reporter.is_ready = False
    answer = await client.get("/healthz")
    assert (answer.status, await answer.text()) == (200, "ok\n")
    assert reporter.refreshes == 0


@pytest.mark.parametrize("path", PATHS)
async def test_every_route_answers_head_and_refuses_to_be_written_to(
    client: Client, path: str
) -> None:
    """HEAD has no body; other methods get a short 405 that names what is allowed."""
    head = await client.head(path)
    assert (head.status, await head.read()) == (200, b"")
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        answer = await client.request(method, path)
        assert answer.status == 405
        assert answer.content_type == "text/plain"
        assert len(await answer.read()) < 100
        assert set(answer.headers["allow"].split(",")) == {"GET", "HEAD"}


@pytest.mark.parametrize(
    "path", ["/favicon.ico", "/state/", "/metrics/x", "/..%2fetc", "/<script>"]
)
async def test_any_other_path_is_a_small_plain_404(client: Client, path: str) -> None:
    """The path is not repeated in the answer."""
    answer = await client.get(path)
    assert answer.status == 404
    assert answer.content_type == "text/plain"
    assert await answer.text() == "404: Not Found"


@pytest.mark.parametrize("path", [*PATHS, "/nowhere"])
async def test_no_answer_is_cached_sniffed_shared_or_tells_library_versions(
    client: Client, path: str
) -> None:
    """Other origins get no leave to read, whatever they ask for."""
    answer = await client.get(path, headers={"origin": "https://elsewhere.example"})
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["server"] == "envoy-tokenpools"
    assert [name for name in answer.headers if name.lower().startswith("access-control")] == []
