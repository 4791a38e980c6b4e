"""
The official OpenAI client in front of Envoy: its answers, its errors and its retries.
"""

import asyncio
import json

import openai
import pytest

from envoy_tokenpools.clock import SystemClock
from envoy_tokenpools.lab.backend import SimulatedBackend
from envoy_tokenpools.lab.dialect import Offer
from envoy_tokenpools.lab.engine import EngineShape
from tests.support.replay import Received, ReplayBackend, json_response
from tests.support.stack import GENEROUS, NOTHING_IN_USE, settled_state, standalone

FAST = EngineShape(slots=64, tokens_per_second=64_000, prefill_tokens_per_second=1_000_000)

ONE_AT_A_TIME = """
pools:
  - name: pool
    models: [m]
    capacity: {tokens_per_second: 10k, kv_cache: 1GiB, concurrency: 1}
    kv_bytes_per_token: 1KiB
    entitlements:
      - name: tenant
        class: spot
        keys: [{plain: key}]
"""

ANSWER = json.dumps(
    {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello"},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }
).encode()


async def test_answers_are_those_of_the_backend_streamed_and_not() -> None:
    """The client reads the same texts, chunks and usage with the filter as without it."""
    backend = SimulatedBackend(FAST, Offer(models=("demo-model",)))
    direct_url = await backend.start("127.0.0.1", 0)
    async with standalone(GENEROUS, direct_url) as both:
        seen = []
        for url in (direct_url, both.url):
            client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="key", max_retries=0)
            whole = await client.chat.completions.create(
                model="demo-model", messages=[{"role": "user", "content": "hi"}], max_tokens=12
            )
            stream = await client.chat.completions.create(
                model="demo-model",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=12,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            seen.append(
                [
                    whole.choices[0].message.content,
                    whole.usage,
                    [chunk.choices[0].delta.content for chunk in chunks if chunk.choices],
                    chunks[-1].usage,
                ]
            )
            await client.close()
        assert seen[0] == seen[1]
        assert (await settled_state(both))["in_use"] == NOTHING_IN_USE
    await backend.stop()


class _Held:
    """A backend whose first answer waits until it is released."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.arrived = asyncio.Event()
        self.count = 0

    async def respond(self, _: Received, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        self.arrived.set()
        if self.count == 1:
            await self.release.wait()
        writer.write(json_response(ANSWER))


async def test_being_shed_is_a_rate_limit_error_that_says_why() -> None:
    """A 429 becomes a RateLimitError with a message, a code and headers that the client understands."""
    held = _Held()
    backend = ReplayBackend(held.respond)
    async with standalone(ONE_AT_A_TIME, await backend.start()) as both:
        client = openai.AsyncOpenAI(base_url=both.url + "/v1", api_key="key", max_retries=0)
        first = asyncio.create_task(_ask(client, "one"))
        await held.arrived.wait()
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "two"}], stream=stream
                )
            error = caught.value
            assert error.code == "rate_limit_exceeded"
            assert error.type == "requests"
            assert "pool_contended" in error.message
            headers = error.response.headers
            assert headers["x-tokenpools-reason"] == "pool_contended"
            assert headers["content-type"] == "application/json"
            assert int(headers["retry-after"]) >= 1
            assert 0 < int(headers["retry-after-ms"]) <= 1_000 * int(headers["retry-after"])
        held.release.set()
        assert (await first) == "hello"
        await client.close()
    await backend.stop()


async def test_the_clients_own_retry_waits_as_long_as_it_is_told() -> None:
    """With retries on, the SDK comes back after `retry-after-ms` and succeeds; it does not back off 0.5 s."""
    held = _Held()
    backend = ReplayBackend(held.respond)
    clock = SystemClock()
    async with standalone(ONE_AT_A_TIME, await backend.start()) as both:
        retrying = openai.AsyncOpenAI(base_url=both.url + "/v1", api_key="key", max_retries=5)
        waits: list[float] = []
        original = retrying._calculate_retry_timeout

        def recorded(*args: object, **kwargs: object) -> float:
            wait = original(*args, **kwargs)  # type: ignore[arg-type]
            waits.append(wait)
            held.release.set()
            return wait

        retrying._calculate_retry_timeout = recorded  # type: ignore[method-assign]
        first = asyncio.create_task(_ask(retrying, "one"))
        await held.arrived.wait()
        started_ms = clock.now_ms()
        raw = (
            await openai.AsyncOpenAI(base_url=both.url + "/v1", api_key="key", max_retries=0)
            .with_options(max_retries=0)
            ._client.post(
                both.url + "/v1/chat/completions",
                json={"model": "m", "messages": [{"role": "user", "content": "two"}]},
                headers={"authorization": "Bearer key"},
            )
        )
        told_s = int(raw.headers["retry-after-ms"]) / 1_000
        assert await _ask(retrying, "two") == "hello"
        assert waits
        # Within the jitter of two answers; the SDK's own back-off would begin at 0.375 s.
        assert waits[0] <= told_s * 1.3
        assert clock.now_ms() - started_ms >= waits[0] * 1_000
        assert await first == "hello"
        await retrying.close()
    await backend.stop()


async def _ask(client: openai.AsyncOpenAI, text: str) -> str | None:
    answer = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": text}]
    )
    return answer.choices[0].message.content
