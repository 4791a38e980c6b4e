"""The cases of Envoys that are configured as somebody else would: other modes, an observer, a short patience."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)

from envoy_tokenpools.core.admission import Claim, Settlement
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from envoy_tokenpools.store.base import Reply, Store
from tests.support.cases_wire import ONE, Rig, altered_envoy, h2_request, rigged
from tests.support.extproc import CHAT, chat
from tests.support.replay import always
from tests.support.stack import metric_lines, total
from tests.support.streams import S

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = "tokenpools_tokens_total"
ASKED = chat(stream=True, stream_options={"include_usage": True}, model="one")
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + S
FLAT = 1_024

BodyMode = ProcessingModeBodySendMode
HeaderMode = ProcessingModeHeaderSendMode


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[Rig]:
    """One filter and one backend, for Envoys of every kind."""
    async with rigged() as rig:
        rig.backend.respond = always(STREAM)
        yield rig


def beside(rig: Rig, message_timeout_ms: int = 5_000) -> EnvoyOptions:
    """Another Envoy between the same filter and backend."""
    return EnvoyOptions(
        backend_url=rig.both._options.backend_url,
        listen_host="127.0.0.1",
        listen_port=0,
        admin_port=0,
        ext_proc_port=rig.both.filter.ext_proc_port,
        message_timeout_ms=message_timeout_ms,
    )


def modes(
    request_body: BodyMode,
    response_body: BodyMode,
    trailers: HeaderMode = HeaderMode.SKIP,
) -> ProcessingMode:
    """Headers both ways, and these."""
    return ProcessingMode(
        request_header_mode=HeaderMode.SEND,
        request_body_mode=request_body,
        request_trailer_mode=trailers,
        response_header_mode=HeaderMode.SEND,
        response_body_mode=response_body,
        response_trailer_mode=trailers,
    )


def hidden(processor: ExternalProcessor) -> None:
    """No bodies, and no way to ask for them."""
    processor.processing_mode = modes(BodyMode.NONE, BodyMode.NONE)
    processor.allow_mode_override = False


def hidden_request(processor: ExternalProcessor) -> None:
    """No request bodies, and no way to ask for them."""
    processor.processing_mode = modes(BodyMode.NONE, BodyMode.STREAMED)
    processor.allow_mode_override = False


def on_demand(processor: ExternalProcessor) -> None:
    """No bodies unless they are asked for."""
    processor.processing_mode = modes(BodyMode.NONE, BodyMode.NONE)


def observing(processor: ExternalProcessor) -> None:
    """Whatever we say is not waited for."""
    processor.processing_mode = modes(BodyMode.STREAMED, BodyMode.STREAMED)
    processor.observability_mode = True


def eager(processor: ExternalProcessor) -> None:
    """The body is sent before the head was answered."""
    processor.processing_mode = modes(BodyMode.STREAMED, BodyMode.STREAMED)
    processor.send_body_without_waiting_for_header_response = True


def trailing(processor: ExternalProcessor) -> None:
    """Trailers are sent as well."""
    processor.processing_mode = modes(BodyMode.BUFFERED, BodyMode.STREAMED, HeaderMode.SEND)


def streaming(processor: ExternalProcessor) -> None:
    """The same with pieces of the body."""
    processor.processing_mode = modes(BodyMode.STREAMED, BodyMode.STREAMED, HeaderMode.SEND)


async def charged_by(
    rig: Rig, port: int, trailers: list[tuple[str, str]]
) -> tuple[bytes, list[float]]:
    """What a client gets of one request, and what it is charged."""
    before = await metric_lines(rig.both)
    head = [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "test"),
        (":path", CHAT),
        ("content-type", "application/json"),
        ("authorization", "Bearer key"),
    ]
    answer = await h2_request(port, head, ASKED, trailers)
    assert answer.status == 200
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 5
    while True:
        await rig.quiet(5)
        after = await metric_lines(rig.both)
        name = "tokenpools_completions_total"
        if total(after, name) > total(before, name):
            break
        assert loop.time() < deadline, "nothing was settled"
        await asyncio.sleep(0.02)
    rises = [
        total(after, TOKENS, f'kind="{kind}"') - total(before, TOKENS, f'kind="{kind}"')
        for kind in ("prompt", "completion")
    ]
    return answer.body, rises


@pytest.mark.parametrize(
    ("alter", "charged"),
    [
        (hidden, [FLAT, 0]),
        (hidden_request, [26, 9]),
        (on_demand, [26, 9]),
        (observing, [26, 9]),
        (eager, [26, 9]),
        (trailing, [26, 9]),
        (streaming, [26, 9]),
    ],
)
async def test_every_envoy_is_answered_and_charged(
    rig: Rig, alter: Callable[[ExternalProcessor], None], charged: list[int]
) -> None:
    """Case 44: no spurious reply, no wait without end, the client's bytes are the backend's, and one charge."""
    async with altered_envoy(beside(rig), alter) as envoy:
        for trailers in ([], [("x-checksum", "abc")]):
            body, rises = await charged_by(rig, envoy.listen_port, trailers)
            assert body == S
            assert rises == charged
            assert rig.backend.received[-1].body == ASKED
        await rig.quiet()


class SlowStore:
    """A store at the end of a line of 300 ms: what was sent arrives, whether or not anybody still waits for it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.reserved = asyncio.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def reserve(self, pool: str, claim: Claim) -> Reply:
        """See `Store`."""
        return await asyncio.shield(asyncio.create_task(self._reserve(pool, claim)))

    async def settle(self, pool: str, lease_id: str, tokens: int) -> Settlement | None:
        """See `Store`."""
        await asyncio.sleep(0.3)
        return await self._store.settle(pool, lease_id, tokens)

    async def _reserve(self, pool: str, claim: Claim) -> Reply:
        await asyncio.sleep(0.3)
        reply = await self._store.reserve(pool, claim)
        self.reserved.set()
        return reply


async def test_a_decision_that_comes_too_late_holds_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 48: Envoy gives up after 200 ms; the reservation that is made after 300 ms is undone within a second."""
    gate = rig.both.filter.gate
    slow = SlowStore(gate._store)

    def as_usual(_: ExternalProcessor) -> None:
        pass

    async with altered_envoy(beside(rig, message_timeout_ms=200), as_usual) as envoy:
        with monkeypatch.context() as patch:
            patch.setattr(gate, "_store", slow)
            patch.setattr(gate._reservations, "_store", slow)
            url = f"http://127.0.0.1:{envoy.listen_port}{CHAT}"
            answer = await rig.client.post(
                url, content=ONE, headers={"authorization": "Bearer key"}
            )
            assert answer.status_code in (503, 504)
            await asyncio.wait_for(slow.reserved.wait(), 2)
            await rig.quiet()
            await gate.close()
        await rig.at_rest()
