"""
The admin's routes. All are GET (and HEAD): nothing here changes anything.
"""

import asyncio
import base64
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files

import msgspec
from aiohttp import hdrs, web

from envoy_tokenpools import __version__
from envoy_tokenpools.admin.state import state_document
from envoy_tokenpools.metrics import PrometheusObserver
from envoy_tokenpools.observer import Reporter

MAX_REQUEST_ID_CHARS = 256
"""No longer id is ever remembered."""

_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


@dataclass(slots=True)
class Drain:
    """Whether the process is about to stop: alive, but no longer ready."""

    started: bool = False


def admin_app(
    reporter: Reporter, metrics: PrometheusObserver, drain: Drain | None = None
) -> web.Application:
    """
    The application with its routes.

    Args:
        reporter: gives account of the pools; asked at each scrape and each look at the state.
        metrics: rendered at `/metrics`.
        drain: from its start on, `/readyz` answers 503.
    """
    routes = _Routes(reporter, metrics, drain or Drain())
    app = web.Application()
    app.router.add_get("/", routes.page)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_get("/healthz", routes.health)
    app.router.add_get("/readyz", routes.readiness)
    app.router.add_get("/state", routes.state)
    app.router.add_get("/explain", routes.explain)
    app.on_response_prepare.append(_add_headers)
    return app


class _Routes:
    def __init__(self, reporter: Reporter, metrics: PrometheusObserver, drain: Drain) -> None:
        self._reporter = reporter
        self._metrics = metrics
        self._drain = drain
        page = files("envoy_tokenpools.admin").joinpath("page.html").read_text("utf-8")
        self._page = page
        self._page_policy = _content_policy(page)

    async def metrics(self, request: web.Request) -> web.Response:
        """What Prometheus scrapes."""
        await self._reporter.refresh()
        # Thousands of series take tens of milliseconds; in a thread, decisions need not wait for the last of them.
        body, content_type = await asyncio.to_thread(
            self._metrics.render, self._reporter.report(), request.headers.get(hdrs.ACCEPT, "")
        )
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    async def health(self, _: web.Request) -> web.Response:
        """That the process lives and its event loop turns."""
        return web.Response(text="ok\n")

    async def readiness(self, _: web.Request) -> web.Response:
        """Whether traffic should be sent here."""
        if self._drain.started:
            return web.Response(status=503, text="draining\n")
        if not self._reporter.is_ready:
            return web.Response(status=503, text="not ready\n")
        return web.Response(text="ok\n")

    async def state(self, _: web.Request) -> web.Response:
        """The pools as JSON."""
        await self._reporter.refresh()
        return _json(state_document(__version__, self._reporter.report()))

    async def explain(self, request: web.Request) -> web.Response:
        """Why the request of an id was decided on as it was, as JSON."""
        ids = request.query.getall("request_id", [])
        if len(ids) != 1 or not 0 < len(ids[0]) <= MAX_REQUEST_ID_CHARS:
            message = f"Name one request: /explain?request_id=ID, of at most {MAX_REQUEST_ID_CHARS} characters."
            return _json({"error": message}, status=400)
        explanation = self._reporter.explain(ids[0])
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
