"""The simulated backend over real loopback HTTP, as clients and gateways see it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import aiohttp
import msgspec
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from envoy_tokenpools.lab.backend import SimulatedBackend
from envoy_tokenpools.lab.dialect import Offer
from envoy_tokenpools.lab.engine import EngineShape
from envoy_tokenpools.lab.faults import FAULT_HEADER

FAST = EngineShape(slots=4, tokens_per_second=400_000, prefill_tokens_per_second=1_000_000)
# One token per 100 s: what runs on it stays.
STUCK = EngineShape(
    slots=1, tokens_per_second=1, prefill_tokens_per_second=1_000_000, max_waiting=2
)
OFFER = Offer(models=("tiny", "alias"), max_model_len=4_096, reply_tokens=16)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi there"}], "max_tokens": 3}
STREAM = CHAT | {"stream": True}
ENDLESS = STREAM | {"max_tokens": 4_000, "ignore_eos": True}


class Served(SimulatedBackend):
    """A backend that knows its own URL."""

    url: str


@pytest.fixture
async def backend() -> AsyncIterator[Callable[..., Awaitable[Served]]]:
    """Start backends that are stopped after the test."""
    async with AsyncExitStack() as stack:

        async def start(shape: EngineShape = FAST, remember: int = 0) -> Served:
            served = Served(shape, OFFER, remember=remember)
            served.url = await served.start()
            stack.push_async_callback(served.stop)
            return served

        yield start


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP client."""
    async with aiohttp.ClientSession() as client:
        yield client


BackendFactory = Callable[..., Awaitable[Served]]


async def until(condition: Callable[[], bool], *, within_seconds: float) -> None:
    """Wait until something on the other side of a socket has happened."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_seconds
    for _ in range(int(within_seconds / 0.002)):
        if condition() or loop.time() > deadline:
            break
        await asyncio.sleep(0.002)
    assert condition(), f"not within {within_seconds} s"


async def read_into(got: bytearray, answer: aiohttp.ClientResponse) -> None:
    """Keep what came, also when the body breaks off."""
    async for part in answer.content.iter_any():
        got.extend(part)


def data_lines(raw: bytes) -> list[bytes]:
    """The data of each event."""
    return [part.removeprefix(b"data: ") for part in raw.split(b"\n\n") if part]


async def test_a_chat_stream_runs_from_role_to_done(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """Role chunk, one chunk per token, finish reason on the last, usage when asked, [DONE]."""
    served = await backend()
    body = STREAM | {"stream_options": {"include_usage": True}}
    async with session.post(f"{served.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        *lines, done = data_lines(await answer.read())
    assert done == b"[DONE]"
    chunks = [msgspec.json.decode(line) for line in lines]
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "the"},
        {"content": " pool"},
        {"content": " lends"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [
        None,
        None,
        None,
        "length",
    ]
    assert chunks[-1]["usage"] == {"prompt_tokens": 5, "total_tokens": 8, "completion_tokens": 3}
    stats = served.stats
    assert (stats.requests, stats.accepted, stats.finished, stats.aborted) == (1, 1, 1, 0)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.running) == (5, 3, 0)


async def test_headers_go_out_while_the_request_waits(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """The 200 is no first token: the second request gets it while the only slot is taken."""
    served = await backend(STUCK)
    path = f"{served.url}/v1/chat/completions"
    async with session.post(path, json=ENDLESS) as first, session.post(path, json=ENDLESS) as later:
        assert (first.status, later.status) == (200, 200)
        assert (served.stats.running, served.stats.waiting) == (1, 1)
        assert served.stats.generated_tokens == 0
    assert served.stats.peak_waiting == 1


async def test_a_client_that_leaves_frees_its_slot_at_once(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """Running or waiting, streamed or not: within 0.3 s, as the real one."""
    served = await backend(STUCK)
    path = f"{served.url}/v1/chat/completions"
    async with session.post(path, json=ENDLESS):
        not_streamed = asyncio.create_task(session.post(path, json=ENDLESS | {"stream": False}))
        await until(lambda: served.stats.waiting == 1, within_seconds=2)
        not_streamed.cancel()
        await until(lambda: served.stats.waiting == 0, within_seconds=0.3)
        assert served.stats.running == 1
    await until(lambda: served.stats.running == 0, within_seconds=0.3)
    assert served.stats.aborted == 2


async def test_a_full_queue_is_a_503_in_vllms_words(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """No Retry-After, an integer code; a request of several sequences waits whole or not at all."""
    served = await backend(STUCK)
    path = f"{served.url}/v1/chat/completions"
    async with session.post(path, json=ENDLESS), session.post(path, json=ENDLESS):
        async with session.post(path, json=ENDLESS | {"n": 2}) as answer:
            assert answer.status == 503
            assert "retry-after" not in answer.headers
            error = (await answer.json())["error"]
        assert (error["type"], error["code"]) == ("Service Unavailable", 503)
        assert "currently busy" in error["message"]
        assert (served.stats.running, served.stats.waiting) == (1, 1)
        assert served.stats.refused == {503: 1}
        assert served.stats.aborted == 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model":"tiny",', 400),
        (b'{"model":"nope","messages":[]}', 404),
        (b'{"messages":[{"content":"x"}],"max_tokens":0}', 400),
        (b'{"messages":[{"content":"x"}],"stream_options":{"include_usage":true}}', 400),
    ],
)
async def test_errors_are_json_with_an_integer_code(
    backend: BackendFactory, session: aiohttp.ClientSession, body: bytes, status: int
) -> None:
    """Even where a stream was asked for."""
    served = await backend()
    async with session.post(f"{served.url}/v1/chat/completions", data=body) as answer:
        assert answer.status == status
        assert answer.content_type == "application/json"
        assert (await answer.json())["error"]["code"] == status
    assert served.stats.refused == {status: 1}


async def test_unknown_paths_are_answered_as_vllms_framework_does(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """`detail`, not `error`."""
    served = await backend()
    async with session.get(f"{served.url}/nope") as answer:
        assert (answer.status, await answer.json()) == (404, {"detail": "Not Found"})
    async with session.get(f"{served.url}/v1/completions") as answer:
        assert (answer.status, await answer.json()) == (405, {"detail": "Method Not Allowed"})


async def test_the_openai_client_understands_every_api(backend: BackendFactory) -> None:
    """Chat, completions, responses and embeddings, streamed and whole, and the model list."""
    served = await backend()
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any") as client:
        chat = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi there"}], max_tokens=3
        )
        assert chat.choices[0].message.content == "the pool lends"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 3

        stream = await client.completions.create(
            model="tiny", prompt="hi", max_tokens=3, stream=True
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == "the pool lends"

        whole = await client.responses.create(model="tiny", input="hi", max_output_tokens=3)
        assert whole.output_text == "the pool lends"
        deltas = [
            event.delta
            async for event in await client.responses.create(
                model="tiny", input="hi", max_output_tokens=3, stream=True
            )
            if event.type == "response.output_text.delta"
        ]
        assert "".join(deltas) == "the pool lends"

        vectors = await client.embeddings.create(model="tiny", input=["a", "b"])
        assert len(vectors.data) == 2
        assert [model.id async for model in client.models.list()] == ["tiny", "alias"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="nope", messages=[])


async def test_metrics_have_vllms_names_and_true_values(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """Gauges while one runs and one waits; counters after a finished one and an abort."""
    served = await backend(STUCK)
    path = f"{served.url}/v1/chat/completions"

    async def scrape() -> dict[str, float]:
        async with session.get(f"{served.url}/metrics") as answer:
            assert answer.status == 200
            families = text_string_to_metric_families(await answer.text())
            samples = [sample for family in families for sample in family.samples]
        assert all(sample.labels["engine"] == "0" for sample in samples)
        values = {
            f"{sample.name} {sample.labels.get('finished_reason', '')}".strip(): sample.value
            for sample in samples
            if not sample.name.endswith("_bucket")
        }
        config = next(sample for sample in samples if sample.name == "vllm:cache_config_info")
        blocks = int(config.labels["num_gpu_blocks"]) * int(config.labels["block_size"])
        return values | {"kv capacity": blocks}

    async with session.post(path, json=ENDLESS), session.post(path, json=ENDLESS):
        busy = await scrape()
    assert busy["vllm:num_requests_running"] == 1
    assert busy["vllm:num_requests_waiting"] == 1
    assert busy["vllm:kv_cache_usage_perc"] == 5 / STUCK.kv_tokens
    assert busy["vllm:prompt_tokens_total"] == 10
    assert busy["kv capacity"] == STUCK.kv_tokens

    await until(lambda: served.stats.aborted == 2, within_seconds=2)
    async with session.post(f"{served.url}/v1/embeddings", json={"input": "a"}) as answer:
        assert answer.status == 200
    idle = await scrape()
    assert idle["vllm:num_requests_running"] == idle["vllm:num_requests_waiting"] == 0
    assert idle["vllm:request_success_total abort"] == 2
    assert idle["vllm:request_success_total length"] == 1
    assert idle["vllm:generation_tokens_total"] == 0
    assert idle["vllm:time_to_first_token_seconds_count"] == 0


async def test_first_tokens_are_timed_from_arrival(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """One observation per sequence, and every generated token is counted."""
    served = await backend()
    path = f"{served.url}/v1/chat/completions"
    async with session.post(path, json=STREAM | {"n": 2}) as answer:
        await answer.read()
    async with session.get(f"{served.url}/metrics") as answer:
        text = await answer.text()
    labels = '{engine="0",model_name="tiny"}'
    assert f"vllm:time_to_first_token_seconds_count{labels} 2.0" in text
    assert f"vllm:generation_tokens_total{labels} 6.0" in text


async def test_health_answers(backend: BackendFactory, session: aiohttp.ClientSession) -> None:
    """An empty 200, as vLLM's."""
    served = await backend()
    async with session.get(f"{served.url}/health") as answer:
        assert (answer.status, await answer.read()) == (200, b"")


async def test_an_asked_for_status_is_answered(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """Without a look at the body."""
    served = await backend()
    headers = {FAULT_HEADER: "status=500"}
    path = f"{served.url}/v1/chat/completions"
    async with session.post(path, data=b"{", headers=headers) as answer:
        assert answer.status == 500
        assert (await answer.json())["error"]["code"] == 500


async def test_a_misspelt_fault_is_a_400(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """It must not pass as a healthy answer."""
    served = await backend()
    headers = {FAULT_HEADER: "explode"}
    async with session.post(
        f"{served.url}/v1/completions", json={"prompt": "a"}, headers=headers
    ) as answer:
        assert answer.status == 400


async def test_a_connection_can_break_off_in_mid_stream(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """The client gets the tokens before, then an incomplete body; the slot is freed."""
    served = await backend(EngineShape(1, 200, 1_000_000))
    got = bytearray()
    async with session.post(
        f"{served.url}/v1/chat/completions",
        json=ENDLESS,
        headers={FAULT_HEADER: "reset-after=2"},
    ) as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await read_into(got, answer)
    assert got.count(b'"content":') == 3
    await until(lambda: served.stats.running == 0, within_seconds=2)
    assert served.stats.aborted == 1


async def test_a_connection_can_break_off_before_a_whole_answer(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """Not a byte of it is sent."""
    served = await backend()
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await session.post(
            f"{served.url}/v1/chat/completions", json=CHAT, headers={FAULT_HEADER: "reset-after=1"}
        )


async def test_a_stream_can_end_early_without_an_end_mark(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """Cleanly as far as HTTP goes, without finish reason, usage and [DONE]."""
    served = await backend(EngineShape(1, 200, 1_000_000))
    async with session.post(
        f"{served.url}/v1/chat/completions",
        json=ENDLESS | {"stream_options": {"include_usage": True}},
        headers={FAULT_HEADER: "truncate-after=2"},
    ) as answer:
        lines = data_lines(await answer.read())
    chunks = [msgspec.json.decode(line) for line in lines]
    assert len(chunks) == 3
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    await until(lambda: served.stats.running == 0, within_seconds=2)
    assert served.stats.aborted == 1


async def test_a_whole_answer_can_be_cut_in_half(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """Its JSON does not parse."""
    served = await backend()
    headers = {FAULT_HEADER: "truncate-after=1"}
    async with session.post(
        f"{served.url}/v1/chat/completions", json=CHAT, headers=headers
    ) as answer:
        body = await answer.read()
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(body)


async def test_usage_can_be_withheld(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """Though it was asked for."""
    served = await backend()
    async with session.post(
        f"{served.url}/v1/chat/completions",
        json=STREAM | {"stream_options": {"include_usage": True}},
        headers={FAULT_HEADER: "no-usage"},
    ) as answer:
        assert b"usage" not in await answer.read()


async def test_arrivals_are_remembered_when_wanted(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """The last ones only, headers and body as they came; none by default."""
    served = await backend(remember=2)
    for number in range(3):
        async with session.post(
            f"{served.url}/v1/completions",
            json={"prompt": f"p{number}", "max_tokens": 1},
            headers={"x-number": str(number)},
        ) as answer:
            assert answer.status == 200
    assert [msgspec.json.decode(arrival.body)["prompt"] for arrival in served.arrivals] == [
        "p1",
        "p2",
    ]
    assert ("x-number", "2") in served.arrivals[-1].headers
    assert not (await backend()).arrivals


async def test_an_outage_holds_back_those_who_wait(
    backend: BackendFactory, session: aiohttp.ClientSession
) -> None:
    """Without slots a request is accepted and waits; it is served when they come back."""
    served = await backend()
    served.resize(0)
    async with session.post(f"{served.url}/v1/chat/completions", json=STREAM) as answer:
        assert (answer.status, served.stats.waiting) == (200, 1)
        served.resize(1)
        assert (await answer.read()).endswith(b"[DONE]\n\n")


async def test_stop_cuts_what_still_runs(session: aiohttp.ClientSession) -> None:
    """Within a bounded time, and nothing is left in the engine."""
    served = SimulatedBackend(STUCK, OFFER)
    url = await served.start()
    async with session.post(f"{url}/v1/chat/completions", json=ENDLESS) as answer:
        async with asyncio.timeout(2):
            await served.stop()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    assert (served.stats.running, served.stats.waiting) == (0, 0)


def test_an_offer_must_fit_the_engine() -> None:
    """A sequence that could never start would hold up the queue."""
    with pytest.raises(ValueError, match="kv_tokens"):
        SimulatedBackend(EngineShape(1, 1, 1, kv_tokens=10), OFFER)
