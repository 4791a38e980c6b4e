"""
The admin's routes. All are GET (and HEAD): nothing here changes anything.
"""

import asyncio
import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Protocol

import msgspec
from aiohttp import hdrs, web

from envoy_tokenpools import __version__
from envoy_tokenpools.admin.state import state_document
from envoy_tokenpools.observer import PoolReport, Reporter

MAX_REQUEST_ID_CHARS = 256
"""No longer id is ever remembered."""

_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


@dataclass(slots=True)
class Drain:
    """Whether the process is about to stop: alive, but no longer ready."""

    started: bool = False


class Rendering(Protocol):
    """What is counted, of one process or of several."""

    def render(self, reports: Sequence[PoolReport] = (), accept: str = "") -> tuple[bytes, str]:
        """The exposition, with the gauges of `reports`, and its content type."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to a probe."""

    is_good: bool
    text: str


GOOD = Verdict(is_good=True, text="ok")
ALONE = Verdict(is_good=True, text="ok, but the shared store does not answer")


class UnansweredError(Exception):
    """Whoever had to be asked did not answer."""


class Source(Protocol):
    """Whom the routes ask: this process, or others."""

    async def reports(self) -> Sequence[PoolReport]:
        """
        The pools, up to date.

        Raises:
            UnansweredError: nobody answered.
        """
        ...

    async def explanation(self, request_id: str) -> object | None:
        """
        The newest decision on a request of this id; None if there is none that is known.

        Raises:
            UnansweredError: nobody knows one, but not everybody answered.
        """
        ...

    async def readiness(self) -> Verdict:
        """Whether traffic should be sent here."""
        ...

    async def health(self) -> Verdict:
        """Whether all is alive; if not, a restart is wanted."""
        ...


def admin_app(
    reporter: Reporter, metrics: Rendering, drain: Drain | None = None
) -> web.Application:
    """
    The application of one process.

    Args:
        reporter: gives account of the pools; asked at each scrape and each look at the state.
        metrics: rendered at `/metrics`.
        drain: from its start on, `/readyz` answers 503.
    """
    return app_of(_ThisProcess(reporter), metrics, drain or Drain())


def app_of(source: Source, metrics: Rendering, drain: Drain) -> web.Application:
    """The application with its routes."""
    routes = _Routes(source, metrics, drain)
    app = web.Application()
    app.router.add_get("/", routes.page)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_get("/healthz", routes.health)
    app.router.add_get("/readyz", routes.readiness)
    app.router.add_get("/state", routes.state)
    app.router.add_get("/explain", routes.explain)
    app.on_response_prepare.append(_add_headers)
    return app


class _ThisProcess:
    """A reporter as the source."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    async def reports(self) -> Sequence[PoolReport]:
        await self._reporter.refresh()
        return self._reporter.report()

    async def explanation(self, request_id: str) -> object | None:
        return self._reporter.explain(request_id)

    async def readiness(self) -> Verdict:
        if not self._reporter.is_ready:
            return Verdict(is_good=False, text="not ready")
        return GOOD if self._reporter.store_answers else ALONE

    async def health(self) -> Verdict:
        return GOOD  # it answers


class _Routes:
    def __init__(self, source: Source, metrics: Rendering, drain: Drain) -> None:
        self._source = source
        self._metrics = metrics
        self._drain = drain
        page = files("envoy_tokenpools.admin").joinpath("page.html").read_text("utf-8")
        self._page = page
        self._page_policy = _content_policy(page)

    async def metrics(self, request: web.Request) -> web.Response:
        """What Prometheus scrapes."""
        try:
            reports = await self._source.reports()
        except UnansweredError:
            reports = ()  # what was counted is known all the same
        # Thousands of series take tens of milliseconds; in a thread, decisions need not wait for the last of them.
        body, content_type = await asyncio.to_thread(
            self._metrics.render, reports, request.headers.get(hdrs.ACCEPT, "")
        )
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    async def health(self, _: web.Request) -> web.Response:
        """That the process lives and its event loop turns."""
        return _probed(await self._source.health())

    async def readiness(self, _: web.Request) -> web.Response:
        """Whether traffic should be sent here."""
        if self._drain.started:
            return _probed(Verdict(is_good=False, text="draining"))
        return _probed(await self._source.readiness())

    async def state(self, _: web.Request) -> web.Response:
        """The pools as JSON."""
        try:
            return _json(state_document(__version__, await self._source.reports()))
        except UnansweredError as error:
            return _json({"error": str(error)}, status=503)

    async def explain(self, request: web.Request) -> web.Response:
        """Why the request of an id was decided on as it was, as JSON."""
        ids = request.query.getall("request_id", [])
        if len(ids) != 1 or not 0 < len(ids[0]) <= MAX_REQUEST_ID_CHARS:
            message = f"Name one request: /explain?request_id=ID, of at most {MAX_REQUEST_ID_CHARS} characters."
            return _json({"error": message}, status=400)
        try:
            explanation = await self._source.explanation(ids[0])
        except UnansweredError as error:
            return _json({"error": str(error)}, status=503)
        if explanation is None:
            message = (
                "No decision on a request of this id is known here: it was never asked for at this replica,"
                " was answered before its entitlement and pool were known, or is forgotten."
            )
            return _json({"error": message}, status=404)
        return _json(explanation)

    async def page(self, _: web.Request) -> web.Response:
        """The page that shows the state."""
        policy = {"content-security-policy": self._page_policy}
        return web.Response(text=self._page, content_type="text/html", headers=policy)


def _probed(verdict: Verdict) -> web.Response:
    return web.Response(text=f"{verdict.text}\n", status=200 if verdict.is_good else 503)


def _json(document: object, *, status: int = 200) -> web.Response:
    body = msgspec.json.encode(document)
    return web.Response(body=body, status=status, content_type="application/json")


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers[hdrs.SERVER] = "envoy-tokenpools"  # not the versions of what it is made of
    response.headers[hdrs.CACHE_CONTROL] = "no-store"
    response.headers["x-content-type-options"] = "nosniff"


def _content_policy(page: str) -> str:
    """A policy that lets the page run its own inline style and script, ask this server, and nothing else."""
    sources: dict[str, list[str]] = {"style": [], "script": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources[kind].append(f"'sha256-{digest}'")
    return (
        f"default-src 'none'; style-src {' '.join(sources['style'])};"
        f" script-src {' '.join(sources['script'])}; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
