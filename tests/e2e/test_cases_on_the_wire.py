"""The cases that a real Envoy takes part in: bodies, disconnects, upgrades, compression and sizes, byte for byte."""

import gzip
import json
from collections.abc import Awaitable, Callable
from functools import partial

import psutil
import pytest

from tests.support.cases import ENCODINGS, FRAME
from tests.support.cases_wire import (
    Answered,
    Rig,
    chunked,
    h2_request,
    head_of,
    raw_request,
)
from tests.support.extproc import CHAT, HI, chat
from tests.support.replay import always, json_response
from tests.support.stack import metric_lines, total
from tests.support.streams import S

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_BODY = 8 * 1024 * 1024
"""The default of `server.max_body`."""

JSON = ("content-type", "application/json")
TOKENS = "tokenpools_tokens_total"
REQUESTS = "tokenpools_requests_total"


def length(body: bytes) -> tuple[str, str]:
    """The header that says how long it is."""
    return "content-length", str(len(body))


def streamed(*pieces: bytes, ends: bool = True, headers: str = "") -> bytes:
    """A stream as a backend sends it."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{headers}transfer-encoding: chunked\r\n\r\n"
    return head.encode() + chunked(*pieces, ends=ends)


def rise(before: dict[str, float], after: dict[str, float], name: str, *labels: str) -> float:
    """By how much a metric has risen."""
    return total(after, name, *labels) - total(before, name, *labels)


def charged(before: dict[str, float], after: dict[str, float]) -> tuple[float, float]:
    """Prompt and completion tokens that were charged meanwhile."""
    prompt, completion = (
        rise(before, after, TOKENS, f'kind="{kind}"') for kind in ("prompt", "completion")
    )
    return prompt, completion


async def test_an_upload_reaches_the_backend_byte_for_byte(rig: Rig) -> None:
    """Case 2: 20 KB of a form are forwarded as they are, at the flat cost."""
    form = b"--zz\r\n" + bytes(range(256)) * 80 + b"\r\n--zz--\r\n"
    before = await metric_lines(rig.both)
    rig.backend.respond = always(json_response(b'{"text":""}'))
    answer = await rig.post(
        form, "/v1/audio/transcriptions", content_type="multipart/form-data; boundary=zz"
    )
    assert answer.status_code == 200
    assert rig.backend.received[-1].body == form
    await rig.at_rest()
    assert charged(before, await metric_lines(rig.both)) == (1_024 + 1 + FRAME, 0)


BROKEN = {
    "a": b'{"model":"m","messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "b": b'{"model":"\xff\xfe"}',
    "c": b'{"model":"\xc0\xaf"}',
    "d": b"\xef\xbb\xbf" + HI,
    "e": HI.decode().encode("utf-16"),
    "f": b'{"a":1}{"b":2}',
    "g": b"[]",
    "h": b'"x"',
    "i": b"",
    "j": b'{"messages":"hi"}',
    "k": HI.replace(b'"hi"', b'"h\0i"'),
}


async def test_broken_bodies_are_a_400_and_the_next_request_is_served(rig: Rig) -> None:
    """Case 9: an error of OpenAI's shape for each of them, which never reaches the backend."""
    for name, body in BROKEN.items():
        answer = await rig.post(body, content_type="application/json")
        assert answer.status_code == 400, name
        assert answer.json()["error"]["type"] == "invalid_request_error", name
        assert rig.backend.received == [], name
        assert (await rig.post(HI)).status_code == 200, name
        rig.backend.received.clear()
    await rig.at_rest()


async def test_a_compressed_request_goes_on_as_it_came(rig: Rig) -> None:
    """Case 11: gzip, br, zstd and two gzips: bytes and header unchanged, two tokens of content."""
    hello = chat("Hello world", model="new-1")
    bodies = {name: encode(hello) for name, encode in ENCODINGS.items()}
    for encoding, body in {**bodies, "gzip, gzip": gzip.compress(bodies["gzip"])}.items():
        before = await metric_lines(rig.both)
        assert (await rig.post(body, content_encoding=encoding)).status_code == 200
        sent = rig.backend.received[-1]
        assert (sent.body, sent.headers["content-encoding"]) == (body, encoding)
        await rig.quiet()
        after = await metric_lines(rig.both)
        assert rise(before, after, TOKENS, 'kind="estimated_prompt"') == 2 + FRAME
    await rig.at_rest()


async def test_what_does_not_decode_is_refused_and_a_bomb_costs_one_body(rig: Rig) -> None:
    """Case 11: unsupported 415, truncated 400, 100 MB of zeros 413 without the memory that they would take."""
    packed = gzip.compress(chat("Hello world"))
    for encoding, body, status in (
        ("compress", b"\x1f\x9d", 415),
        ("gzip", packed[:-9], 400),
        ("gzip", gzip.compress(bytes(100_000_000)), 413),
    ):
        rss = psutil.Process().memory_info().rss
        answer = await rig.post(body, content_encoding=encoding)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert psutil.Process().memory_info().rss - rss < 3 * MAX_BODY
    assert rig.backend.received == []
    await rig.at_rest()


def of_size(size: int, letters: bytes = b"a") -> bytes:
    """A chat of exactly this many bytes."""
    body = chat("")
    more = size - len(body)
    return body.replace(b'""', b'"' + (letters * (more // len(letters) + 1))[:more] + b'"')


async def test_bodies_up_to_the_limit_are_served_and_larger_ones_are_a_413(rig: Rig) -> None:
    """Case 12: no hidden limit at 32 KiB, 1 MiB or 4 MiB; above ours 413 with JSON, declared or not."""
    for size in (32_768, 32_769, 4_194_104, 4_194_305, 6_133_409):
        body = of_size(size, b"a" if size < 5_000_000 else b"words ")
        assert (await rig.post(body)).status_code == 200
        assert rig.backend.received[-1].body == body
    body = of_size(1_048_576)
    pieces = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
    answer = await raw_request(
        rig.port, head_of(CHAT, JSON, ("transfer-encoding", "chunked")), chunked(*pieces)
    )
    assert (answer.status, rig.backend.received[-1].body) == (200, body)
    too_large = of_size(MAX_BODY + 1)
    for framing, sent in (
        (length(too_large), too_large),
        (("transfer-encoding", "chunked"), chunked(too_large)),
    ):
        answer = await raw_request(rig.port, head_of(CHAT, JSON, framing), sent)
        assert answer.status in (413, 0)  # Envoy may close while we still send
        if answer.status:
            assert json.loads(answer.body)["error"]["code"] == "request_too_large"
    await rig.at_rest()


TWO_KEYS = [("authorization", "Bearer vip")]
SAME_KEY = [("authorization", "Bearer key")]
TWO_API_KEYS = [("x-api-key", "vip"), ("x-api-key", "key")]
CERTIFICATE = [("x-forwarded-client-cert", "URI=spiffe://vip")]
TENANTS = [("x-tenant-id", "vip"), ("x-tenant-id", "tenant")]
CLASS = [("x-priority-class", "critical"), ("x-tokenpools-entitlement", "vip")]
BRACES = [("x-tenant-id", "}{vip:")]
ODD_CASE = [("X-Tenant-ID", "vip"), ("X-TOKENPOOLS-Entitlement", "vip")]
BLANK = [("x-tenant-id ", "vip")]
NUL = [("x-tenant-id", "vip\0")]
LINES = [("x-tenant-id", "vip\r\nauthorization: Bearer vip")]
LONG = [("x-tenant-id", "v" * 1_000_000)]


@pytest.mark.parametrize(
    ("version", "headers", "status"),
    [
        *((v, h, 400) for v in (1, 2) for h in (TWO_KEYS, SAME_KEY, TWO_API_KEYS)),
        *((v, h, 200) for v in (1, 2) for h in (CERTIFICATE, TENANTS, CLASS, BRACES)),
        (1, ODD_CASE, 200),
        (1, LINES, 400),
        *((1, h, 0) for h in (BLANK, NUL, LONG)),
        *((2, h, 0) for h in (NUL, LINES)),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_no_header_makes_somebody_else_of_a_caller(
    rig: Rig, version: int, headers: list[tuple[str, str]], status: int
) -> None:
    """Case 13: the key alone decides who pays; two of them are refused, and so is what is no header at all."""
    before = await metric_lines(rig.both)
    if version == 1:
        head = head_of(CHAT, JSON, length(HI), *headers)
        answer = await raw_request(rig.port, head + HI)
    else:
        pseudo = [(":method", "POST"), (":scheme", "http"), (":authority", "test"), (":path", CHAT)]
        answer = await h2_request(rig.port, [*pseudo, JSON, SAME_KEY[0], *headers], HI)
    if status:
        assert answer.status == status
    else:
        assert answer.status in (0, 400, 431)  # Envoy's own, if it says anything
    arrived = [request.headers for request in rig.backend.received]
    assert len(arrived) == (status == 200)
    assert not [headers for headers in arrived if "x-tokenpools-entitlement" in headers]
    await rig.quiet()
    after = await metric_lines(rig.both)
    assert rise(before, after, REQUESTS, 'entitlement="vip"') == 0
    assert rise(before, after, REQUESTS, 'entitlement="tenant"') == (status == 200)
    await rig.at_rest()


async def test_two_keys_in_a_request_that_is_not_metered_are_not_ours(rig: Rig) -> None:
    """Case 13: it passes as it came."""
    head = head_of("/v1/models", ("authorization", "Bearer b"), method="GET")
    assert (await raw_request(rig.port, head)).status == 200


USED = b'{"choices":[{"index":0,"message":{"content":"Hello world"},"finish_reason":"stop"}],%b"id":"x"}'
WITH_USAGE = USED % b'"usage":{"prompt_tokens":5,"completion_tokens":7,"total_tokens":12},'


@pytest.mark.parametrize(
    ("model", "data", "tokens"),
    [("m", WITH_USAGE, (5, 7)), ("new-2", USED % b"", (1 + FRAME, 2))],
)
async def test_an_answer_in_pieces_is_read_whole(
    rig: Rig, model: str, data: bytes, tokens: tuple[int, int]
) -> None:
    """Case 26: JSON that comes byte by byte, or in two pieces, to a request for a stream too."""
    for pieces in ([data[:40], data[40:]], [data[at : at + 1] for at in range(len(data))]):
        for asked in (
            chat("hi", model=model),
            chat("hi", model=model, stream=True, stream_options={"include_usage": True}),
        ):
            before = await metric_lines(rig.both)
            raw = streamed(*pieces).replace(b"text/event-stream", b"application/json")
            rig.backend.respond = always(raw)
            assert (await rig.post(asked)).content == data
            await rig.quiet()
            assert charged(before, await metric_lines(rig.both)) == tokens
    await rig.at_rest()


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_a_compressed_stream_reaches_the_client_compressed(rig: Rig, encoding: str) -> None:
    """Case 27: the very bytes, with their header, in the pieces of the backend; usage is read from them."""
    packed = ENCODINGS[encoding](S)
    asked = chat("hi", stream=True, stream_options={"include_usage": True})
    for pieces in ([packed], [packed[:20], packed[20:100], packed[100:]]):
        before = await metric_lines(rig.both)
        rig.backend.respond = always(streamed(*pieces, headers=f"content-encoding: {encoding}\r\n"))
        head = head_of(CHAT, JSON, length(asked), ("accept-encoding", "gzip, br"))
        answer = await raw_request(rig.port, head + asked)
        assert (answer.body, answer.header("content-encoding")) == (packed, encoding)
        assert rig.backend.received[-1].headers["accept-encoding"] == "gzip, br"
        await rig.quiet()
        assert charged(before, await metric_lines(rig.both)) == (26, 9)
    await rig.at_rest()


async def test_a_compressed_error_and_an_unreadable_answer(rig: Rig) -> None:
    """Case 27: an error of 500 costs nothing; what cannot be decoded costs what was reserved, and is told."""
    error = gzip.compress(b'{"error":{"message":"out of memory"}}')
    raw = json_response(error, "500 Internal Server Error")
    rig.backend.respond = always(raw.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n", 1))
    before = await metric_lines(rig.both)
    answer = await raw_request(rig.port, head_of(CHAT, JSON, length(HI)) + HI)
    assert (answer.status, answer.body) == (500, error)
    assert answer.header("content-encoding") == "gzip"
    await rig.quiet()
    assert charged(before, await metric_lines(rig.both)) == (0, 0)
    rig.backend.respond = always(streamed(S, headers="content-encoding: aws-chunked\r\n"))
    asked = chat("hi", model="new-3")
    answer = await raw_request(rig.port, head_of(CHAT, JSON, length(asked)) + asked)
    assert (answer.body, answer.header("content-encoding")) == (S, "aws-chunked")
    await rig.quiet()
    after = await metric_lines(rig.both)
    assert charged(before, after) == (1 + FRAME, 256)
    assert rise(before, after, TOKENS, 'source="estimated"', 'kind="completion"') == 256
    await rig.at_rest()


PLAIN = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
ASKING = PLAIN[:-1] + b',"stream_options":{"include_usage":true}}'


async def test_a_changed_body_has_its_own_length_however_it_was_framed(rig: Rig) -> None:
    """Case 45: 71 bytes become 111, declared, chunked and over HTTP/2 with trailers; the connection's headers stay."""
    assert (len(PLAIN), len(ASKING)) == (71, 111)
    usage_chunk = S[S.index(b'data: {"id":"c1"', S.index(b" world")) : S.index(b"data: [DONE]")]
    rig.backend.respond = always(streamed(S, headers="connection: close\r\n"))
    key = ("authorization", "Bearer key")
    pseudo = [(":method", "POST"), (":scheme", "http"), (":authority", "test"), (":path", CHAT)]
    declared = head_of(CHAT, JSON, length(PLAIN))
    in_pieces = head_of(CHAT, JSON, ("transfer-encoding", "chunked"))
    requests: list[Callable[[], Awaitable[Answered]]] = [
        partial(raw_request, rig.port, declared + PLAIN),
        partial(raw_request, rig.port, in_pieces, chunked(PLAIN[:10], PLAIN[10:])),
        partial(h2_request, rig.port, [*pseudo, JSON, key], PLAIN),
        partial(h2_request, rig.port, [*pseudo, JSON, key], PLAIN, [("x-checksum", "abc")]),
    ]
    for request in requests:
        answer = await request()
        assert (answer.status, answer.body) == (200, S.replace(usage_chunk, b""))
        sent = rig.backend.received[-1]
        assert sent.body == ASKING
        assert sent.headers.get("content-length") == "111"
        assert "transfer-encoding" not in sent.headers
        await rig.quiet()
    await rig.at_rest()
