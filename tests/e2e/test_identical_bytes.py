"""
What clients and backends send each other is the same with the filter as without it, but for what it says it changes.
"""

import asyncio
import gzip
import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import brotli
import httpx

from tests.support import captures
from tests.support.replay import Received, ReplayBackend
from tests.support.stack import (
    AUTHORIZATION,
    GENEROUS,
    NOTHING_IN_USE,
    settled_state,
    standalone,
)
from tests.support.streams import chunk, stream_of, total

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

EXCHANGES = 500
AT_A_TIME = 10
SEED = 11

_ASKED_FOR = b',"stream_options":{"include_usage":true}'
_ENCODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "br": brotli.compress,
    "zstd": zstd.compress,
}
_TEXTS = (
    "Hello",
    "你好",
    "👍👍",
    " ",
    "\n",
    '"quoted"',
    "\\",
    "<|endoftext|>",
    "data: x\n\n",
    "é" * 50,
)
_RECORDED = [
    recorded
    for recorded in map(captures.load, captures.response_names())
    if recorded.request is not None and recorded.status == 200
]


@dataclass(frozen=True, slots=True)
class _Case:
    """
    One exchange.

    Attributes:
        path: the endpoint.
        request: what the client sends, encoded as it says.
        request_encoding: the encoding of that, or nothing.
        forwarded: what the backend is to get.
        status: of the answer.
        content_type: of the answer.
        encoding: of the answer, or nothing.
        answer: what the backend sends.
        delivered: what the client is to get.
        framing: how the backend tells the end: by its length, by chunks, or by closing.
        pieces: sizes of what it writes at a time, over and over.
    """

    path: str
    request: bytes
    request_encoding: str
    forwarded: bytes
    status: int
    content_type: str
    encoding: str
    answer: bytes
    delivered: bytes
    framing: str
    pieces: tuple[int, ...]


def _case(rng: random.Random) -> _Case:
    recorded = rng.choice(_RECORDED) if rng.random() < 0.3 else None
    if recorded is not None and recorded.request is not None:
        fields = dict(recorded.request)
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        answer, is_stream = recorded.body, recorded.is_stream
    else:
        fields, path, is_stream = _made_up_request(rng), "/v1/chat/completions", rng.random() < 0.7
        answer = _made_up_stream(rng) if is_stream else _made_up_body(rng)
    if is_stream:
        fields["stream"] = True
    plain = _spelled(fields, rng)
    request_encoding = rng.choice(("", "", "", "gzip"))
    request = gzip.compress(plain) if request_encoding else plain
    asks = is_stream and "stream_options" not in fields and not request_encoding
    encoding = rng.choice(("", "", "gzip", "br", "zstd"))
    sent = _ENCODERS[encoding](answer) if encoding else answer
    return _Case(
        path=path,
        request=request,
        request_encoding=request_encoding,
        forwarded=_asking(request) if asks else request,
        status=rng.choice((200, 200, 200, 200, 400, 500)),
        content_type="text/event-stream; charset=utf-8" if is_stream else "application/json",
        encoding=encoding,
        answer=sent,
        delivered=_without_usage_chunk(answer) if asks and not encoding else sent,
        framing=rng.choice(("length", "chunks", "close")),
        pieces=tuple(rng.choice((1, 7, 60, 500, 5_000, 60_000)) for _ in range(3)),
    )


def _made_up_request(rng: random.Random) -> dict[str, Any]:
    messages = [
        {"role": rng.choice(("user", "assistant", "system")), "content": _text(rng)}
        for _ in range(rng.randint(1, 4))
    ]
    fields: dict[str, Any] = {"model": "m", "messages": messages}
    odd = {"temperature": 0.10, "max_tokens": 10.0, "user": "ü", "stop": ["a"], "seed": 2**63}
    for name in rng.sample(list(odd), rng.randint(0, len(odd))):
        fields[name] = odd[name]
    if rng.random() < 0.3:
        fields["stream_options"] = rng.choice(
            ({"include_usage": True}, {"include_usage": False}, {}, None)
        )
    return fields


def _spelled(fields: dict[str, Any], rng: random.Random) -> bytes:
    separators = rng.choice(((",", ":"), (", ", ": "), (" ,\n", "\t: ")))
    text = json.dumps(fields, ensure_ascii=rng.random() < 0.5, separators=separators)
    return (text + rng.choice(("", "\n", "  "))).encode()


def _text(rng: random.Random) -> str:
    return "".join(rng.choices(_TEXTS, k=rng.choice((1, 5, 200))))


def _made_up_stream(rng: random.Random) -> bytes:
    events: list[object] = [chunk({"content": _text(rng)}) for _ in range(rng.randrange(30))]
    if rng.random() < 0.7:
        events.append(total(5, len(events)))
    if rng.random() < 0.8:
        events.append("[DONE]")
    stream = stream_of(*events)
    if rng.random() < 0.2:
        stream = stream.replace(b"\n\n", b"\n\n: keep-alive\n\n")
    if rng.random() < 0.2:
        stream = stream.replace(b"\n", b"\r\n")
    return stream[: rng.randrange(len(stream) + 1)] if rng.random() < 0.1 else stream


def _made_up_body(rng: random.Random) -> bytes:
    message = {"role": "assistant", "content": _text(rng)}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    usage = {"usage": {"prompt_tokens": 5, "completion_tokens": 7}}
    return json.dumps(body | (usage if rng.random() < 0.7 else {})).encode()


def _asking(request: bytes) -> bytes:
    end = request.rindex(b"}")
    return request[:end] + _ASKED_FOR + request[end:]


def _without_usage_chunk(stream: bytes) -> bytes:
    """The stream without the events that hold usage and no choice."""
    blank_line = b"\r\n\r\n" if b"\r\n" in stream else b"\n\n"
    return b"".join(
        event
        for event in _events(stream, blank_line)
        if not _is_usage_chunk(event.strip().removeprefix(b"data: "))
    )


def _events(stream: bytes, blank_line: bytes) -> list[bytes]:
    parts = stream.split(blank_line)
    return [part + blank_line for part in parts[:-1]] + parts[-1:]


def _is_usage_chunk(data: bytes) -> bool:
    try:
        message = json.loads(data)
    except ValueError:
        return False
    return message["choices"] == [] and message.get("usage") is not None


class _Backend:
    """Answers each request with what its case says."""

    def __init__(self, cases: list[_Case]) -> None:
        self._cases = cases

    async def __call__(self, request: Received, writer: asyncio.StreamWriter) -> None:
        case = self._cases[int(request.headers["x-case"])]
        head = f"HTTP/1.1 {case.status} X\r\ncontent-type: {case.content_type}\r\nconnection: close\r\n"
        if case.encoding:
            head += f"content-encoding: {case.encoding}\r\n"
        if case.framing == "length":
            head += f"content-length: {len(case.answer)}\r\n"
        elif case.framing == "chunks":
            head += "transfer-encoding: chunked\r\n"
        writer.write(head.encode() + b"\r\n")
        at = turn = 0
        while at < len(case.answer):
            piece = case.answer[at : at + case.pieces[turn % len(case.pieces)]]
            at, turn = at + len(piece), turn + 1
            writer.write(
                b"%x\r\n%b\r\n" % (len(piece), piece) if case.framing == "chunks" else piece
            )
            await writer.drain()
        if case.framing == "chunks":
            writer.write(b"0\r\n\r\n")


async def _play(client: httpx.AsyncClient, url: str, number: int, case: _Case) -> None:
    headers = AUTHORIZATION | {"content-type": "application/json", "x-case": str(number)}
    headers["accept-encoding"] = "gzip, br, zstd"
    if case.request_encoding:
        headers["content-encoding"] = case.request_encoding
    async with client.stream(
        "POST", url + case.path, content=case.request, headers=headers
    ) as answer:
        delivered = b"".join([piece async for piece in answer.aiter_raw()])
    assert answer.status_code == case.status, case
    assert delivered == case.delivered, case
    assert answer.headers["content-type"] == case.content_type, case
    assert answer.headers.get("content-encoding", "") == case.encoding, case
    length = answer.headers.get("content-length")
    assert length is None or int(length) == len(delivered), case


async def test_five_hundred_exchanges_are_the_same_to_both_sides() -> None:
    """Status, type and every byte; but usage is asked for where nothing was said of it, and its chunk withheld."""
    rng = random.Random(SEED)
    cases = [_case(rng) for _ in range(EXCHANGES)]
    withheld = sum(case.delivered != case.answer for case in cases)
    asked = sum(case.forwarded != case.request for case in cases)
    assert withheld >= 20
    assert asked > withheld
    backend = ReplayBackend(_Backend(cases))
    try:
        async with (
            standalone(GENEROUS, await backend.start()) as both,
            httpx.AsyncClient(timeout=30) as client,
        ):
            left = iter(enumerate(cases))

            async def one_after_the_other() -> None:
                for number, case in left:
                    await _play(client, both.url, number, case)

            await asyncio.gather(*(one_after_the_other() for _ in range(AT_A_TIME)))
            assert (await settled_state(both))["in_use"] == NOTHING_IN_USE
    finally:
        await backend.stop()
    assert len(backend.received) == EXCHANGES
    for request in backend.received:
        case = cases[int(request.headers["x-case"])]
        assert request.body == case.forwarded, case
        assert request.headers.get("content-encoding", "") == case.request_encoding
