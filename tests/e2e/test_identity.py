"""
What a client gets through Envoy and the filter is what the backend sent.
"""

import asyncio
import json

import httpx
import pytest

from tests.support.captures import FOLDER, Recorded, load, response_names
from tests.support.replay import Received, ReplayBackend, always
from tests.support.stack import (
    AUTHORIZATION,
    GENEROUS,
    NOTHING_IN_USE,
    UNTOUCHED,
    metric_lines,
    settled_state,
    standalone,
    total,
)

ENDPOINT = {True: "/v1/completions", False: "/v1/chat/completions"}


def _request_of(recorded: Recorded) -> tuple[str, bytes]:
    """The path and body that were recorded, or ones that pass the gate just as well."""
    is_completion = recorded.name.startswith("completions")
    file = FOLDER / f"{recorded.name}.request.json"
    body = file.read_bytes() if file.exists() else b""
    names_a_maximum_twice = recorded.name == "chat_stream_tool_auto"  # which is refused with 400
    if body and not recorded.name.startswith("err_") and not names_a_maximum_twice:
        return ENDPOINT[is_completion], body
    plain = (
        b'{"model":"tiny","prompt":"x"}'
        if is_completion
        else b'{"model":"tiny","messages":[{"role":"user","content":"x"}]}'
    )
    return ENDPOINT[is_completion], plain


def _reported(recorded: Recorded) -> list[int] | None:
    """Prompt and completion tokens of the last usage in a body, read without our own meter."""
    events = recorded.body.split(b"\n\n") if recorded.is_stream else [recorded.body]
    found = None
    for event in events:
        text = event.removeprefix(b"data: ")
        usage = json.loads(text).get("usage") if text.startswith(b"{") else None
        if usage:
            found = [usage["prompt_tokens"], usage["completion_tokens"]]
    return found


async def test_every_recorded_answer_arrives_byte_for_byte_and_is_charged_as_reported() -> None:
    """Status and body of all recorded vLLM answers are untouched; charges equal the reported usage."""
    # models.txt was shortened after it was recorded: its content-length is not that of its body.
    recordings = [load(name) for name in response_names() if name != "models"]
    raw = {r.name: (FOLDER / f"{r.name}.txt").read_bytes() for r in recordings}
    current = ""

    async def respond(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(raw[current])

    backend = ReplayBackend(respond)
    async with standalone(UNTOUCHED, await backend.start()) as both, httpx.AsyncClient() as client:
        before = await metric_lines(both)
        for recorded in recordings:
            current = recorded.name
            path, body = _request_of(recorded)
            headers = AUTHORIZATION | {"content-type": "application/json"}
            answer = await client.post(both.url + path, content=body, headers=headers)
            assert (answer.status_code, answer.content) == (recorded.status, recorded.body), current
            assert backend.received[-1].body == body
            state = await settled_state(both)
            assert state["in_use"] == NOTHING_IN_USE, current
            after = await metric_lines(both)
            reported = _reported(recorded)
            if reported is not None:
                charged = [
                    total(after, "tokenpools_tokens_total", f'kind="{kind}"', 'source="reported"')
                    - total(
                        before, "tokenpools_tokens_total", f'kind="{kind}"', 'source="reported"'
                    )
                    for kind in ("prompt", "completion")
                ]
                assert charged == reported, current
            before = after
    await backend.stop()


SILENT = b'{"model":"tiny", "messages":[{"role":"user","content":"hi"}],"stream":true }\n'


async def test_usage_is_asked_for_and_its_chunk_withheld_where_the_client_is_silent() -> None:
    """The backend is asked for usage and charged by it; the client gets the stream without the extra chunk."""
    recorded = load("chat_stream_usage")
    backend = ReplayBackend(always((FOLDER / "chat_stream_usage.txt").read_bytes()))
    async with standalone(GENEROUS, await backend.start()) as both, httpx.AsyncClient() as client:
        headers = AUTHORIZATION | {"accept-encoding": "gzip", "content-type": "application/json"}
        answer = await client.post(
            both.url + "/v1/chat/completions", content=SILENT, headers=headers
        )
        events = recorded.body.split(b"\n\n")
        silent = [event for event in events if b'"choices":[]' not in event]
        assert len(silent) == len(events) - 1
        assert answer.content == b"\n\n".join(silent)
        sent = backend.received[-1]
        assert sent.body == SILENT.replace(
            b"true }", b'true ,"stream_options":{"include_usage":true}}'
        )
        assert sent.headers["content-length"] == str(len(sent.body))
        assert "accept-encoding" not in sent.headers
        await settled_state(both)
        metrics = await metric_lines(both)
        assert total(metrics, "tokenpools_tokens_total", 'source="reported"') == sum(
            _reported(recorded) or []
        )
    await backend.stop()


@pytest.mark.parametrize(
    "said",
    [
        b'"stream":true,"stream_options":{"include_usage":false}',
        b'"stream":true,"stream_options":{}',
        b'"stream":true,"stream_options":null',
        b'"stream":false',
        b'"n":1',
    ],
)
async def test_what_a_client_says_about_usage_stands(said: bytes) -> None:
    """Any `stream_options`, and any answer that is not streamed, leave the request's body as it is."""
    body = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],' + said + b"}"
    backend = ReplayBackend(always((FOLDER / "chat_nonstream.txt").read_bytes()))
    async with standalone(GENEROUS, await backend.start()) as both, httpx.AsyncClient() as client:
        answer = await client.post(
            both.url + "/v1/chat/completions", content=body, headers=AUTHORIZATION
        )
        assert answer.content == load("chat_nonstream").body
        assert backend.received[-1].body == body
    await backend.stop()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/health"),
        ("HEAD", "/"),
        ("DELETE", "/v1/x"),
        ("OPTIONS", "/v1/chat/completions"),
    ],
)
async def test_what_is_not_metered_passes_without_a_key(method: str, path: str) -> None:
    """Requests that no pool meters reach the backend as they are, and are counted as bypassed."""
    raw = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n" + (
        b"" if method == "HEAD" else b"ok"
    )
    backend = ReplayBackend(always(raw))
    async with standalone(GENEROUS, await backend.start()) as both, httpx.AsyncClient() as client:
        answer = await client.request(method, both.url + path)
        assert answer.status_code == 200
        assert backend.received[-1].request_line == f"{method} {path} HTTP/1.1"
        assert (
            total(await metric_lines(both), "tokenpools_requests_total", 'outcome="bypassed"') == 1
        )
    await backend.stop()


async def test_an_upload_larger_than_any_body_limit_passes_where_it_is_not_metered() -> None:
    """20 MB to an endpoint that is not metered arrive whole: neither buffered nor refused."""
    backend = ReplayBackend(
        always(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    )
    body = b"x" * 20_000_000
    async with standalone(GENEROUS, await backend.start()) as both, httpx.AsyncClient() as client:
        answer = await client.post(both.url + "/v1/files", content=body)
        assert answer.status_code == 200
        assert backend.received[-1].body == body
    await backend.stop()
