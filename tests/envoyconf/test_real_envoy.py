"""What the configuration promises, on a real Envoy between a filter and a backend that are stubs."""

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    HeadersResponse,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from yarl import URL

from envoy_tokenpools.envoyconf.child import EnvoyChild
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from tests.envoyconf.ext_proc_stub import BackendStub, ExtProcStub, carry_on, headers_of
from tests.support.ports import neighbouring_ports

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
MAX_BODY_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Rig:
    """An Envoy with what is before and behind it."""

    envoy: EnvoyChild
    ext_proc: ExtProcStub
    backend: BackendStub
    client: aiohttp.ClientSession

    async def send(
        self, method: str, path: str, **arguments: Any
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """One request with its path exactly as written; the response and its body."""
        url = URL(f"http://127.0.0.1:{self.envoy.listen_port}{path}", encoded=True)
        async with self.client.request(method, url, **arguments) as response:
            return response, await response.read()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_rig() -> AsyncIterator[Rig]:
    """One Envoy for all tests of this file."""
    ext_proc, backend = ExtProcStub(), BackendStub()
    await ext_proc.start()
    await backend.start()
    options = EnvoyOptions(
        backend_url=f"http://127.0.0.1:{backend.port}",
        listen_host="127.0.0.1",
        listen_port=0,
        admin_port=0,
        ext_proc_port=ext_proc.port,
        max_body_bytes=MAX_BODY_BYTES,
    )
    async with (
        EnvoyChild(options, concurrency=1) as envoy,
        aiohttp.ClientSession(skip_auto_headers=["accept-encoding"]) as client,
    ):
        yield Rig(envoy, ext_proc, backend, client)
    await ext_proc.stop()
    await backend.stop()


@pytest.fixture
def rig(module_rig: Rig) -> Rig:
    """The shared Envoy, with stubs as if new."""
    module_rig.ext_proc.answer = carry_on
    module_rig.ext_proc.seen.clear()
    module_rig.backend.requests.clear()
    module_rig.backend.status = 200
    return module_rig


def _unread(message: ProcessingRequest) -> ProcessingResponse:
    """The answer that lets a request pass without its bodies."""
    if message.request_headers is None:
        return carry_on(message)
    return ProcessingResponse(
        request_headers=HeadersResponse(),
        mode_override=ProcessingMode(
            request_body_mode=ProcessingModeBodySendMode.NONE,
            response_header_mode=ProcessingModeHeaderSendMode.SKIP,
            response_body_mode=ProcessingModeBodySendMode.NONE,
        ),
    )


def _shed(message: ProcessingRequest) -> ProcessingResponse:
    """The answer that refuses."""
    del message
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=StatusCode.TooManyRequests), body=b'{"error":"ours"}'
        )
    )


async def test_the_filter_sees_only_the_headers_it_needs(rig: Rig) -> None:
    """Pseudo-headers are matched like others; cookies and the host stay in Envoy."""
    headers = {"authorization": "Bearer k", "cookie": "a=b", "x-stainless-retry-count": "1"}
    await rig.send("POST", CHAT, data=b"{}", headers=headers)
    seen = headers_of(rig.ext_proc.request_headers())
    seen.pop("x-request-id")
    assert seen == {
        ":method": "POST",
        ":path": CHAT,
        "authorization": "Bearer k",
        "content-length": "2",
        "content-type": "application/octet-stream",
        "x-stainless-retry-count": "1",
    }


async def test_the_backends_answer_is_not_changed(rig: Rig) -> None:
    """Nothing is added to its headers, nothing taken away, and its length stays."""
    response, body = await rig.send("POST", CHAT, data=b"{}")
    assert json.loads(body) == {"received": 2}
    assert response.headers["server"] == "the-backend"
    names = sorted(name.lower() for name in response.headers)
    assert names == ["content-length", "content-type", "date", "server"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat%2Fcompletions",
        "/v1/%63hat/completions",
        "//v1///chat/completions",
        "/v1/./x/../chat/completions",
        "/v1/x/%2e%2e/chat/completions",
        "/v1/x%2F..%2fchat/completions",
        "/v1/chat%5Ccompletions",
    ],
)
async def test_no_spelling_of_a_path_goes_past_the_metering(rig: Rig, path: str) -> None:
    """The filter and the backend see one path, and it is the plain one."""
    response, _ = await rig.send("POST", path, data=b"{}")
    assert response.status == 200
    assert headers_of(rig.ext_proc.request_headers())[":path"] == CHAT
    assert [request.raw_path for request in rig.backend.requests] == [CHAT]


async def test_a_client_cannot_set_our_headers_or_envoys(rig: Rig) -> None:
    """Names that the filter, the engine or Envoy trust are taken off, whatever their case."""
    forged = {
        "X-Tokenpools-Entitlement": "dedicated",
        "x-llm-d-inference-objective": "high",
        "x-gateway-inference-fairness-id": "a",
        "x-envoy-upstream-rq-timeout-ms": "1",
    }
    await rig.send("POST", CHAT, data=b"{}", headers={**forged, "x-other": "stays"})
    arrived = rig.backend.requests[0].headers
    assert [name for name in forged if name in arrived] == []
    assert arrived["x-other"] == "stays"


async def test_a_client_cannot_make_envoy_retry(rig: Rig) -> None:
    """One metered request is one request to the backend."""
    rig.backend.status = 500
    headers = {"x-envoy-retry-on": "5xx", "x-envoy-max-retries": "3"}
    response, _ = await rig.send("POST", CHAT, data=b"{}", headers=headers)
    assert response.status == 500
    assert len(rig.backend.requests) == 1


async def test_the_filters_refusal_reaches_the_client_as_it_is(rig: Rig) -> None:
    """Envoy's own error bodies are not put over it, and the backend is not asked."""
    rig.ext_proc.answer = _shed
    response, body = await rig.send("POST", CHAT, data=b"{}")
    assert (response.status, body) == (429, b'{"error":"ours"}')
    assert rig.backend.requests == []


async def test_a_body_of_the_limit_is_read_whole(rig: Rig) -> None:
    """The filter gets it in one message."""
    _, body = await rig.send("POST", CHAT, data=b"x" * MAX_BODY_BYTES)
    assert json.loads(body) == {"received": MAX_BODY_BYTES}
    bodies = [each.request_body for each in rig.ext_proc.seen if each.request_body is not None]
    assert [(len(each.body), each.end_of_stream) for each in bodies] == [(MAX_BODY_BYTES, True)]


async def test_a_body_far_above_the_limit_is_a_413_that_clients_can_read(rig: Rig) -> None:
    """The error has OpenAI's shape and the backend is not asked."""
    response, body = await rig.send("POST", CHAT, data=b"x" * (4 * MAX_BODY_BYTES))
    assert response.status == 413
    assert response.content_type == "application/json"
    assert json.loads(body)["error"]["code"] == "request_too_large"
    assert rig.backend.requests == []


@pytest.mark.parametrize("path", ["/v1/files", "/v1/audio/transcriptions", "/v1/uploads/u/parts"])
async def test_an_upload_above_the_limit_passes_unread(rig: Rig, path: str) -> None:
    """The filter decides from the headers; the body never waits in a buffer."""
    rig.ext_proc.answer = _unread
    size = 32 * MAX_BODY_BYTES
    _, body = await rig.send("POST", path, data=io.BytesIO(b"x" * size))
    assert json.loads(body) == {"received": size}
    assert len(rig.ext_proc.seen) == 1


async def test_a_websocket_passes(rig: Rig) -> None:
    """The filter sees the upgrade and lets it through."""
    rig.ext_proc.answer = _unread
    url = f"http://127.0.0.1:{rig.envoy.listen_port}/v1/realtime"
    async with rig.client.ws_connect(url) as socket:
        await socket.send_str("hello")
        assert await socket.receive_str() == "hello"
    assert headers_of(rig.ext_proc.request_headers())["upgrade"] == "websocket"


async def test_a_filter_that_is_down_is_a_503_and_used_again_at_once(rig: Rig) -> None:
    """Nothing passes unmetered meanwhile, and nobody has to do anything afterwards."""
    await rig.ext_proc.stop()
    response, body = await rig.send("POST", CHAT, data=b"{}")
    assert response.status == 503
    assert response.headers["retry-after"] == "1"
    assert json.loads(body)["error"]["code"] == "admission_unavailable"
    assert rig.backend.requests == []
    await rig.ext_proc.start()
    response, _ = await rig.send("POST", CHAT, data=b"{}")
    assert response.status == 200


async def test_what_a_dead_worker_would_have_got_the_others_get(rig: Rig) -> None:
    """No request fails that comes after its death, and when it is back it is used again."""
    async with _two_workers(rig.backend) as (other, workers):
        dead, alive = workers
        for _ in range(20):
            assert (await other.send("POST", CHAT, data=b"{}"))[0].status == 200
        assert dead.seen
        assert alive.seen
        await dead.stop()
        statuses = [(await other.send("POST", CHAT, data=b"{}"))[0].status for _ in range(200)]
        assert statuses == [200] * 200
        await dead.start()
        dead.seen.clear()
        async with asyncio.timeout(20):
            while not dead.seen:
                assert (await other.send("POST", CHAT, data=b"{}"))[0].status == 200
        for worker in workers:
            await worker.stop()
        assert (await other.send("POST", CHAT, data=b"{}"))[0].status == 503


async def test_a_request_that_a_worker_has_answered_meets_no_other(rig: Rig) -> None:
    """It fails with its worker: nothing is decided twice."""
    async with _two_workers(rig.backend) as (other, workers):
        rig.backend.was_asked.clear()
        rig.backend.may_answer.clear()
        caught = asyncio.create_task(other.send("POST", CHAT, data=b"{}"))
        await rig.backend.was_asked.wait()
        (holder,) = (worker for worker in workers if worker.seen)
        await holder.stop()
        rig.backend.may_answer.set()
        assert (await caught)[0].status == 503
        assert sum(bool(worker.seen) for worker in workers) == 1


@contextlib.asynccontextmanager
async def _two_workers(
    backend: BackendStub,
) -> AsyncIterator[tuple[Rig, tuple[ExtProcStub, ExtProcStub]]]:
    """An Envoy in front of `backend` with two filters at neighbouring ports."""
    async with contextlib.AsyncExitStack() as stack:
        workers = ExtProcStub(), ExtProcStub()
        workers[0].port = neighbouring_ports()
        workers[1].port = workers[0].port + 1
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
        options = EnvoyOptions(
            backend_url=f"http://127.0.0.1:{backend.port}",
            listen_host="127.0.0.1",
            listen_port=0,
            admin_port=0,
            ext_proc_port=workers[0].port,
            workers=2,
        )
        envoy = await stack.enter_async_context(EnvoyChild(options, concurrency=1))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Rig(envoy, workers[0], backend, client), workers


async def test_a_backend_that_is_down_is_a_503_that_clients_can_read(rig: Rig) -> None:
    """The error has OpenAI's shape; the filter is told, so that it can settle."""
    options = EnvoyOptions(
        backend_url="http://127.0.0.1:9",
        listen_host="127.0.0.1",
        listen_port=0,
        admin_port=0,
        ext_proc_port=rig.ext_proc.port,
    )
    async with EnvoyChild(options, concurrency=1) as envoy:
        other = Rig(envoy, rig.ext_proc, rig.backend, rig.client)
        response, body = await other.send("POST", CHAT, data=b"{}")
    assert response.status == 503
    assert json.loads(body)["error"]["code"] == "backend_unavailable"
    answered = [each.response_headers for each in rig.ext_proc.seen if each.response_headers]
    assert headers_of(answered[0])[":status"] == "503"
