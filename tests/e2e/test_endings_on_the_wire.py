"""The cases of how requests begin, wait, are refused and end, on a real Envoy."""

import asyncio
import contextlib
import json
import re
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from envoy_tokenpools.clock import SystemClock
from tests.support.cases import FRAME
from tests.support.cases_wire import (
    ANSWER,
    ONE,
    WITHIN_S,
    Rig,
    chunked,
    head_of,
    raw_request,
)
from tests.support.extproc import CHAT, HI, chat
from tests.support.replay import Received, always
from tests.support.scrapes import parse_text
from tests.support.stack import metric_lines, total
from tests.support.streams import S, chunk, stream_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = ("content-type", "application/json")
TOKENS = "tokenpools_tokens_total"
REQUESTS = "tokenpools_requests_total"
COMPLETIONS = "tokenpools_completions_total"
HELLO = stream_of(chunk({"content": "Hello"}))
STREAM_ONE = chat(stream=True, stream_options={"include_usage": True}, model="one")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def request_head(body: bytes, *more: tuple[str, str]) -> bytes:
    """The head of a chat with this body."""
    return head_of(CHAT, JSON, ("content-length", str(len(body))), *more)


def unfinished(*pieces: bytes) -> Callable[[Received, asyncio.StreamWriter], Awaitable[None]]:
    """A backend that sends these bytes and then nothing more, nor an end."""

    async def respond(_: Received, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
        await writer.drain()
        await asyncio.Event().wait()

    return respond


@contextlib.asynccontextmanager
async def connected(
    rig: Rig, sent: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that has sent these bytes, and leaves at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(sent)
    await writer.drain()
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def holder(rig: Rig) -> AsyncIterator[None]:
    """A client that holds the only place of model `one`."""
    rig.backend.respond = unfinished()
    async with connected(rig, request_head(ONE) + ONE):
        await rig.held(1)
        yield


STAGES = {
    "head": (request_head(STREAM_ONE), unfinished(), b"", 0, None),
    "body": (request_head(STREAM_ONE) + STREAM_ONE, unfinished(), b"", 1, (1 + FRAME, 0)),
    "answer": (
        request_head(STREAM_ONE) + STREAM_ONE,
        unfinished(HEAD),
        b"\r\n\r\n",
        1,
        (1 + FRAME, 0),
    ),
    "delta": (
        request_head(STREAM_ONE) + STREAM_ONE,
        unfinished(HEAD, chunked(HELLO, ends=False)),
        b"Hello",
        1,
        (1 + FRAME, 1),
    ),
    "event": (
        request_head(STREAM_ONE) + STREAM_ONE,
        unfinished(HEAD, chunked(HELLO, S[:20], ends=False)),
        S[:20],
        1,
        (1 + FRAME, 1),
    ),
    "done": (
        request_head(STREAM_ONE) + STREAM_ONE,
        unfinished(HEAD, chunked(S, ends=False)),
        b"[DONE]",
        1,
        (26, 9),
    ),
}
"""What a client sends, what it gets, what it reads before it leaves, the requests held by then, and their charge."""


@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_leaves_frees_its_place(rig: Rig, stage: str) -> None:
    """Case 37: wherever it leaves, the next one is served, and what was delivered is charged; time after time."""
    sent, respond, awaited, held, charged = STAGES[stage]
    for _ in range(8):
        before = await metric_lines(rig.both)
        rig.backend.respond = respond
        async with connected(rig, sent) as (reader, _):
            await rig.held(held)
            if awaited:
                await asyncio.wait_for(reader.readuntil(awaited), WITHIN_S)
        await rig.quiet()
        after = await metric_lines(rig.both)
        rises = [
            total(after, TOKENS, f'kind="{kind}"') - total(before, TOKENS, f'kind="{kind}"')
            for kind in ("prompt", "completion")
        ]
        assert rises == list(charged or (0, 0))
        assert total(after, COMPLETIONS) - total(before, COMPLETIONS) == held
        rig.backend.respond = always(ANSWER)
        assert (await rig.post(ONE)).status_code == 200
    await rig.at_rest()


@pytest.mark.parametrize(
    "sent",
    [
        head_of(CHAT, JSON, ("content-length", "10")),
        head_of(CHAT, JSON, ("transfer-encoding", "chunked")) + chunked(ONE, ends=False),
        request_head(ONE + b" " * 50) + ONE,
        head_of(CHAT, JSON, ("upgrade", "websocket")).replace(b"n: close", b"n: upgrade") + ONE,
    ],
    ids=["declared", "chunked", "short", "upgrade"],
)
async def test_a_body_that_does_not_end_holds_nothing(rig: Rig, sent: bytes) -> None:
    """Case 41: nothing is reserved while Envoy waits, the backend is not asked, others are served."""
    async with connected(rig, sent) as (reader, _):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readuntil(b"HTTP/1.1 200"), 0.3)
        await rig.quiet()
        assert rig.backend.received == []
        assert (await rig.post(ONE)).status_code == 200
    await rig.at_rest()


async def test_who_asks_for_leave_to_send_is_judged_by_the_length(rig: Rig) -> None:
    """Case 41: `expect: 100-continue` with 11 MB is a 413 unsent; with less it waits, and holds nothing."""
    expects = ("expect", "100-continue")
    async with holder(rig):
        too_large = head_of(CHAT, JSON, ("content-length", "11000000"), expects)
        answer = await raw_request(rig.port, too_large)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (
            413,
            "request_too_large",
        )
        async with connected(rig, head_of(CHAT, JSON, ("content-length", "1000000"), expects)):
            await asyncio.sleep(0.2)
            await rig.held(1)
        answer = await raw_request(rig.port, request_head(ONE, expects) + ONE)
        assert answer.status == 429
    await rig.at_rest()


async def test_what_has_no_body_does_not_wait_for_one(rig: Rig) -> None:
    """Case 42: GET and HEAD pass in a few milliseconds, with their headers; an empty chat is a 400."""
    clock = SystemClock()
    took_ms = []
    for _ in range(20):
        started_ms = clock.now_ms()
        answer = await rig.client.get(rig.both.url + "/v1/models")
        took_ms.append(clock.now_ms() - started_ms)
        assert answer.status_code == 200
    assert statistics.median(took_ms) < 50
    rig.backend.respond = always(b"HTTP/1.1 200 OK\r\ncontent-length: 512\r\n\r\n")
    answer = await rig.client.head(rig.both.url + "/")
    assert (answer.status_code, answer.headers["content-length"]) == (200, "512")
    empty = await raw_request(rig.port, head_of(CHAT, JSON, ("content-length", "0")))
    assert (empty.status, json.loads(empty.body)["error"]["code"]) == (400, "invalid_json")
    await rig.at_rest()


async def test_a_websocket_is_neither_awaited_nor_watched(rig: Rig) -> None:
    """Case 42: bytes go both ways at once, nothing is reserved, one bypassed request is counted."""
    before = await metric_lines(rig.both)
    upgrade = head_of("/v1/realtime?model=one", ("upgrade", "websocket"), method="GET")
    upgrade = upgrade.replace(b"connection: close", b"connection: upgrade")
    async with connected(rig, upgrade) as (reader, writer):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)
        assert head.startswith(b"HTTP/1.1 101")
        for frame in (b"\x81\x05hello", b"\x82\x04" + bytes(4)):
            writer.write(frame)
            assert await asyncio.wait_for(reader.readexactly(len(frame)), WITHIN_S) == frame
        await rig.quiet()
    await rig.at_rest()
    after = await metric_lines(rig.both)
    bypassed = [total(metrics, REQUESTS, 'outcome="bypassed"') for metrics in (before, after)]
    assert bypassed[1] - bypassed[0] == 1
    assert rig.backend.upgrades[-1]["upgrade"] == "websocket"


async def test_a_shed_request_is_counted_once_and_told_when_to_come_back(rig: Rig) -> None:
    """Case 47: one request, one 429, no settlement, no charge, though Envoy shows us our own answer."""
    async with holder(rig):
        before = await metric_lines(rig.both)
        answer = await rig.post(ONE)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        after = await metric_lines(rig.both)
        changed = {name for name in after if after[name] != before.get(name, 0)}
        changed = {name for name in changed if name.startswith("tokenpools")}
        assert {name.partition("{")[0] for name in changed} <= {
            REQUESTS,
            TOKENS,
            "tokenpools_decision_seconds_bucket",
            "tokenpools_decision_seconds_count",
            "tokenpools_decision_seconds_sum",
        }
        assert total(after, REQUESTS) - total(before, REQUESTS) == 1
        shed = 'outcome="shed"'
        assert total(after, REQUESTS, shed) - total(before, REQUESTS, shed) == 1
        assert all('kind="estimated_prompt"' in name for name in changed if TOKENS in name)
    await rig.at_rest()


async def test_the_wait_of_a_429_is_one_that_clients_obey(rig: Rig) -> None:
    """Case 55: whole seconds, at least one; milliseconds that agree; JSON; each header once."""
    async with holder(rig):
        answer = await raw_request(rig.port, request_head(ONE) + ONE)
    assert (answer.status, answer.header("content-type")) == (429, "application/json")
    seconds, ms = answer.header("retry-after") or "", answer.header("retry-after-ms") or ""
    assert re.fullmatch("[1-9][0-9]*", seconds)
    assert re.fullmatch("[1-9][0-9]*", ms)
    assert int(ms) <= 1_000 * int(seconds) <= 120_000
    error = json.loads(answer.body)["error"]
    assert all(error[name] for name in ("message", "type", "code"))
    await rig.at_rest()


ROUNDS = 1_000
ODD_MODELS = ['quote"d', "back\\slash", "new\nline", "x" * 10_240]


async def scraped(rig: Rig) -> str:
    """The exposition, which must parse."""
    url = f"http://127.0.0.1:{rig.both.filter.admin_port}/metrics"
    text = (await rig.client.get(url)).text
    assert list(parse_text(text))
    return text


async def test_no_client_makes_series(rig: Rig) -> None:
    """Case 57: a thousand models, tenants and paths make no series and less than 5 KB."""

    async def ask(number: int) -> None:
        model = ODD_MODELS[number % 4] if number < 4 else f"junk-{number}"
        body = json.dumps(json.loads(HI) | {"model": model})
        headers = {"x_tenant_id": f"tenant-{number}", "authorization": "Bearer key"}
        await rig.post(body.encode(), f"{CHAT}?i={number}", **headers)
        await rig.post(b"{}", f"/v1/x?i={number}", **headers)

    for number in range(4):
        await ask(number)
    unknown = await rig.client.post(rig.both.url + CHAT, content=HI)
    assert unknown.status_code == 401
    await rig.quiet()
    before = await scraped(rig)
    for start in range(0, ROUNDS, 20):
        await asyncio.gather(*(ask(number) for number in range(start, start + 20)))
    await rig.quiet()
    after = await scraped(rig)
    assert after.count("\n") == before.count("\n")
    assert len(after) - len(before) < 5 * 1_024
    assert not [word for word in ("junk", "tenant-", "/v1/", "quote") if word in after]
    await rig.at_rest()
