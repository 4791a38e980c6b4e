"""
The admin of several workers: each of them is asked on a socket file of its own, and their answers are merged.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from envoy_tokenpools.admin.app import (
    GOOD,
    Drain,
    Rendering,
    UnansweredError,
    Verdict,
    app_of,
)
from envoy_tokenpools.admin.merge import complaint, merged_reports, newest_explanation
from envoy_tokenpools.admin.server import AppServer
from envoy_tokenpools.admin.state import read_reports
from envoy_tokenpools.observer import PoolReport

log = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
"""Of one question: a worker that hangs must not hold up a scrape until Prometheus gives up (10 s)."""

SILENT = "does not answer"
AWAY = "is not running"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker said."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """One line."""
        return self.body.decode("utf-8", "replace").strip()


class FanOut:
    """The workers as the source of the admin's routes."""

    def __init__(self, sockets: Sequence[Path], running: Callable[[], Collection[int]]) -> None:
        """
        Nobody is asked yet.

        Args:
            sockets: where each worker's own admin listens.
            running: the workers that have come up and live.
        """
        self._sockets = sockets
        self._running = running

    async def ask(self, worker: int, path: str, **parameters: str) -> Answer | None:
        """The answer of one worker; None if there is none."""
        connector = aiohttp.UnixConnector(str(self._sockets[worker]))
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as session,
                session.get(f"http://worker{path}", params=parameters) as answer,
            ):
                return Answer(answer.status, await answer.read())
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def reports(self) -> Sequence[PoolReport]:
        """One report per pool; see `merged_reports`."""
        reports = []
        for worker, answer in (await self._ask_running("/state")).items():
            if answer is None or answer.status != 200:
                continue
            try:
                reports.append(read_reports(answer.body))
            except msgspec.MsgspecError:
                log.exception("a worker's state cannot be read", extra={"worker": worker})
        if not reports:
            raise UnansweredError("No worker answers.")
        return merged_reports(reports)

    async def explanation(self, request_id: str) -> object | None:
        """Of the worker that decided last."""
        answers = await self._ask_running("/explain", request_id=request_id)
        known = [
            msgspec.json.decode(answer.body, type=dict)
            for answer in answers.values()
            if answer is not None and answer.status == 200
        ]
        silent = {worker: SILENT for worker, answer in answers.items() if answer is None}
        if not known and silent:
            raise UnansweredError(f"No decision is known, but {complaint(silent)}.")
        return newest_explanation(known)

    async def readiness(self) -> Verdict:
        """All have to be ready; those that are not are named. What one of them remarks counts for all."""
        answers = await self._ask_running("/readyz")
        troubles = {worker: AWAY for worker in range(len(self._sockets)) if worker not in answers}
        remark = GOOD
        for worker, answer in answers.items():
            if answer is None:
                troubles[worker] = SILENT
            elif answer.status != 200:
                troubles[worker] = f"is {answer.text}"
            elif answer.text != GOOD.text:
                remark = Verdict(is_good=True, text=answer.text)
        return Verdict(is_good=False, text=complaint(troubles)) if troubles else remark

    async def health(self) -> Verdict:
        """Those that hang are named; those that are away are being started."""
        answers = await self._ask_running("/healthz")
        silent = {worker: SILENT for worker, answer in answers.items() if answer is None}
        return Verdict(is_good=False, text=complaint(silent)) if silent else GOOD

    async def _ask_running(self, path: str, **parameters: str) -> Mapping[int, Answer | None]:
        """The answers of all workers that run, asked at the same time."""
        workers = sorted(self._running())
        answers = await asyncio.gather(
            *(self.ask(worker, path, **parameters) for worker in workers)
        )
        return dict(zip(workers, answers, strict=True))


def fan_out_server(workers: FanOut, metrics: Rendering) -> AppServer:
    """The listener in front of all workers."""
    drain = Drain()
    return AppServer(app_of(workers, metrics, drain), drain)
