"""What the service holds while a backend works: not the bodies that went by."""

import tracemalloc
from collections.abc import Callable
from typing import NoReturn

import grpc
import pytest

from envoy_tokenpools.config import ServerSettings
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.extproc.service import ExtProcService
from envoy_tokenpools.extproc.wire import parse_request
from tests.support.extproc import Message, chat, post_rh, rb, sb, sh
from tests.support.gate import GateDesk
from tests.support.pools import amount, entitlement, pool
from tests.support.streams import S

SSE = "text/event-stream"
POOL = pool(amount(), entitlement("a", ServiceClass.SPOT))
LARGE = 4 * 1024 * 1024


class MeasuringStream:
    """
    Hands out messages, and measures at each further read how much memory is held more than at the first.

    Messages are made where they are read, so that nobody else holds their bodies.
    """

    def __init__(self, *messages: Callable[[], Message]) -> None:
        self._messages = iter(messages)
        self._start_bytes: int | None = None
        self.held_bytes: list[int] = []
        self.replies = 0

    async def read(self) -> object:
        """The next message; a large one is dropped by everybody else here."""
        held_bytes, _ = tracemalloc.get_traced_memory()
        if self._start_bytes is None:
            self._start_bytes = held_bytes
        else:
            self.held_bytes.append(held_bytes - self._start_bytes)
        make = next(self._messages, None)
        return grpc.aio.EOF if make is None else parse_request(bytes(make()))

    async def write(self, _: bytes) -> None:
        """Count the reply."""
        self.replies += 1

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """No exchange here ends like that."""
        raise AssertionError(code, details)


@pytest.mark.parametrize("rewritten", [False, True])
async def test_a_large_body_is_let_go_before_the_answer_is_waited_for(*, rewritten: bool) -> None:
    """Neither the message nor what was made of it lives while the backend works, which takes minutes."""
    desk = await GateDesk.open(POOL, server=ServerSettings(max_body_bytes=2 * LARGE))
    stream = MeasuringStream(
        post_rh,
        lambda: rb(chat("x" * LARGE, stream=rewritten, max_tokens=1)),
        lambda: sh(200, SSE),
        lambda: sb(b": ping\n\n" * (LARGE // 8)),
        lambda: sb(S, eos=True),
    )
    tracemalloc.start()
    try:
        service = ExtProcService(desk.gate, desk.clock)
        await service._process(None, stream)
    finally:
        tracemalloc.stop()
    assert stream.replies == len(stream.held_bytes) == 5
    assert max(stream.held_bytes) < LARGE // 8
    await service.settled()
    assert await desk.total() == InUse()
    assert len(desk.observer.settlements) == 1
