"""What clients may not do to the metrics, through the real gate."""

import json
import math

from envoy_tokenpools.metrics import PrometheusObserver
from tests.support.cases import ROOMY, Filter, running
from tests.support.extproc import HI, immediate_of, post_rh, rh
from tests.support.scrapes import parse_text, tell

JUNK = 250
"""Of each kind; on the wire there are a thousand."""

ODD_MODELS = ['quote"d', "back\\slash", "new\nline", "x" * 10_240]


async def scrape(desk: Filter) -> str:
    """The exposition after everything that was told so far."""
    metrics = PrometheusObserver()
    observer = desk.observer
    tell(metrics, [*observer.decisions, *observer.first_tokens, *observer.settlements])
    await desk.gate.refresh()
    return metrics.render(desk.gate.report())[0].decode()


def ours(text: str) -> dict[str, float]:
    """Our own series."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in parse_text(text)
        for sample in family.samples
        if sample.name.startswith("tokenpools_")
    }


def chat_with(model: str) -> bytes:
    """A chat with this model."""
    return json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]}).encode()


async def traffic(desk: Filter, number: int) -> None:
    """A request by a name that nobody knows, a caller and a path that nobody knows, and one that is served."""
    stream, _ = await desk.ask(chat_with(f"junk-{number}"))
    await stream.end()
    tenant = ("x-tenant-id", f"tenant-{number}")
    status, _, _ = await desk.refuse(HI, "/v1/chat/completions", tenant, key=f"unknown-{number}")
    assert status == 401
    stream = desk.stream()
    await stream.say(rh([(":method", "POST"), (":path", f"/v1/x?i={number}"), tenant], eos=True))
    await stream.end()
    await desk.answer(await desk.admit(HI, f"/v1/chat/completions?i={number}", tenant), b"{}")


async def test_no_client_makes_series() -> None:
    """Case 57: hundreds of models, tenants, keys and paths: no new series, no growth, valid, and nothing of theirs."""
    for document, rounds in ((ROOMY, JUNK // 10), (ROOMY.replace("default_pool: o\n", ""), JUNK)):
        async with running(document) as desk:
            await traffic(desk, JUNK)
            for model in ODD_MODELS:
                stream, _ = await desk.ask(chat_with(model))
                await stream.end()
            await desk.settled()
            before = await scrape(desk)
            for number in range(rounds):
                await traffic(desk, number)
            await desk.settled()
            after = await scrape(desk)
            assert set(ours(after)) == set(ours(before))
            assert len(after) - len(before) < 5 * 1_024
            assert not [word for word in ("junk", "tenant-", "/v1/x", "unknown-") if word in after]


async def test_odd_names_and_numbers_leave_the_exposition_whole() -> None:
    """Case 57: it parses, and no value is NaN or infinite, whatever was asked for (case 8 too)."""
    async with running(ROOMY) as desk:
        for model in ODD_MODELS:
            stream = await desk.admit(chat_with(model))
            await stream.end()
        for number in ("NaN", "Infinity", "1e999", "-239", "9223372036854775808"):
            stream, reply = await desk.ask(HI[:-1] + f',"max_tokens":{number}}}'.encode())
            assert immediate_of(reply)[0] == 400
            await stream.end()
        stream = desk.stream()
        await stream.say(post_rh(eos=True))
        await stream.end()
        await desk.settled()
        series = ours(await scrape(desk))
        assert series
        assert all(math.isfinite(number) and number >= 0 for number in series.values())
