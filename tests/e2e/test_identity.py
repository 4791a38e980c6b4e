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
    async with standalone(GENEROUS, await backend.start()) as both, httpx.AsyncClient() as client:
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
