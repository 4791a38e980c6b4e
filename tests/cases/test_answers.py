"""When a shed client is told to come back, through the real gate."""

import json
import re

import pytest

from tests.support.cases import ONE_AT_A_TIME, THOUSAND, Filter, running
from tests.support.extproc import HI
from tests.support.gate import by_ids

COMPLETIONS = "/v1/completions"


async def overdrawn(desk: Filter, tokens: int) -> None:
    """Use up this much of a pool of 1000 tokens."""
    stream = await desk.admit(by_ids(1_000), COMPLETIONS)
    usage = {"prompt_tokens": 1_000, "completion_tokens": tokens - 1_000}
    used = json.dumps({"usage": usage}).encode()
    await desk.answer(stream, used, content_type="application/json")


@pytest.mark.parametrize(
    ("used", "asked", "seconds", "milliseconds"),
    [
        (1_000, 20, "1", "200"),
        (4_300, 1_000, "43", "43000"),
        # What the pool cannot have processed is not believed: beyond 1,000 reserved, four windows of 1,000.
        (360_000, 1_000, "50", "50000"),
        (2**53, 1_000, "50", "50000"),
    ],
    ids=["0.2 s", "43 s", "an hour", "for ever"],
)
async def test_the_wait_is_one_that_clients_obey(
    used: int, asked: int, seconds: str, milliseconds: str
) -> None:
    """Case 55: whole seconds from 1 to 120, in both headers alike, and an error that says so."""
    async with running(THOUSAND) as desk:
        await overdrawn(desk, used)
        status, headers, answer = await desk.refuse(by_ids(asked), COMPLETIONS)
        assert (status, headers["content-type"]) == (429, "application/json")
        assert headers["retry-after"] == seconds
        assert headers["retry-after-ms"] == milliseconds
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert all(answer["error"][name] for name in ("message", "type", "code"))


async def test_the_wait_is_positive_when_the_clock_was_stepped_back() -> None:
    """Case 55: an hour back; then a sequence that is held for an unknown time."""
    async with running(THOUSAND) as desk:
        await overdrawn(desk, 1_200)
        desk.clock._now_us -= 3_600_000_000
        _, headers, _ = await desk.refuse(HI)
        assert_obeyed(headers)
    async with running(ONE_AT_A_TIME) as desk:
        holder = await desk.admit(HI)
        desk.clock._now_us -= 1_000_000
        _, headers, _ = await desk.refuse(HI)
        assert_obeyed(headers)
        await holder.end()


def assert_obeyed(headers: dict[str, str]) -> None:
    """Both waits are plain digits, above zero, and agree."""
    assert all(re.fullmatch(r"[1-9][0-9]*", headers[n]) for n in ("retry-after", "retry-after-ms"))
    assert int(headers["retry-after-ms"]) <= 1_000 * int(headers["retry-after"]) <= 120_000
