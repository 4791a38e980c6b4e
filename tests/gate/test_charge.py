"""What an ended request is charged, by table."""

import json
from dataclasses import replace

import pytest

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.gate.charge import Charge, charge, needs_count
from envoy_tokenpools.gate.order import Outcome
from envoy_tokenpools.observer import Ending
from envoy_tokenpools.openai.usage import Metered, Usage, UsageSource
from tests.support.extproc import COST, admit
from tests.support.gate import configured, metered, order_for
from tests.support.pools import amount, entitlement, pool

REPORTED, COUNTED, ESTIMATED = UsageSource.REPORTED, UsageSource.COUNTED, UsageSource.ESTIMATED
PROMPT, OUTPUT = COST.prompt_tokens, COST.output_tokens

CONFIG = configured(pool(amount(), entitlement("a", ServiceClass.SPOT)))


def outcome(status: int | None, seen: Metered | None, **fields: object) -> Outcome:
    """A request with a prompt of 8 tokens and 32 reserved for its output has ended."""
    body = {"model": "m", "prompt": "one two", "max_tokens": 32, **fields}
    order = order_for(CONFIG, json.dumps(body).encode())
    return Outcome(admit(order), Ending.COMPLETED, status, seen)


@pytest.mark.parametrize(
    ("status", "seen", "counted", "charged"),
    [
        # Reported: taken as it is, each half by itself.
        (200, metered(Usage(26, 9), "Hello"), 0, Charge(26, REPORTED, 9, REPORTED)),
        (200, metered(Usage(26, 0)), 0, Charge(26, REPORTED, 0, REPORTED)),
        (200, metered(Usage(26, None), "Hello"), 3, Charge(26, REPORTED, 3, COUNTED)),
        (200, metered(Usage(None, 9), "Hello"), 0, Charge(PROMPT, ESTIMATED, 9, REPORTED)),
        (200, metered(Usage(26, 9), unread=1), 0, Charge(26, REPORTED, 9, REPORTED)),
        (0, metered(Usage(26, 9)), 0, Charge(26, REPORTED, 9, REPORTED)),
        # Not reported: the prompt as estimated, the text as counted.
        (200, metered(None, "Hello", "x"), 5, Charge(PROMPT, ESTIMATED, 5, COUNTED)),
        (200, metered(), 0, Charge(PROMPT, ESTIMATED, 0, COUNTED)),
        (200, metered(token_ids=7), 0, Charge(PROMPT, ESTIMATED, 7, COUNTED)),
        (200, metered(Usage(26, 9), token_ids=7), 0, Charge(26, REPORTED, 9, REPORTED)),
        (200, metered(None, "Hello", finished=False), 1, Charge(PROMPT, ESTIMATED, 1, COUNTED)),
        (200, metered(None, "a", overflow_chars=400), 7, Charge(PROMPT, ESTIMATED, 107, COUNTED)),
        (200, metered(None, "a", overflow_chars=3), 7, Charge(PROMPT, ESTIMATED, 7, COUNTED)),
        # Could not be read, or not all of it: at least as reserved.
        (200, metered(None, "Hello", unread=1), 5, Charge(PROMPT, ESTIMATED, OUTPUT, ESTIMATED)),
        (200, metered(None, "Hello", unread=1), 40, Charge(PROMPT, ESTIMATED, 40, COUNTED)),
        (200, None, 0, Charge(PROMPT, ESTIMATED, OUTPUT, ESTIMATED)),
        (200, metered(unread=1), 0, Charge(PROMPT, ESTIMATED, OUTPUT, ESTIMATED)),
        (200, metered(Usage(26, None), unread=1), 0, Charge(26, REPORTED, OUTPUT, ESTIMATED)),
        # Refused by the backend: nothing but what it reports.
        (400, None, 0, Charge(0, ESTIMATED, 0, COUNTED)),
        (429, metered(), 0, Charge(0, ESTIMATED, 0, COUNTED)),
        (500, metered(None, "boom"), 1, Charge(0, ESTIMATED, 0, COUNTED)),
        (503, metered(unread=1), 0, Charge(0, ESTIMATED, 0, COUNTED)),
        (500, metered(Usage(26, 9)), 0, Charge(26, REPORTED, 9, REPORTED)),
        (500, metered(Usage(26, None)), 0, Charge(26, REPORTED, 0, COUNTED)),
        # Left before any answer: the prompt.
        (None, None, 0, Charge(PROMPT, ESTIMATED, 0, COUNTED)),
    ],
)
def test_the_charge(
    status: int | None, seen: Metered | None, counted: int, charged: Charge
) -> None:
    """Reported, else counted, else reserved."""
    assert charge(outcome(status, seen), counted) == charged


@pytest.mark.parametrize(("counted", "charged"), [(50, 42), (8, 0), (3, 0), (0, 0)])
def test_a_prompt_that_is_repeated_is_not_output(counted: int, charged: int) -> None:
    """With `echo` the text begins with the prompt, of which there were 8 tokens."""
    seen = metered(None, "one two three")
    assert charge(outcome(200, seen, echo=True), counted).completion_tokens == charged


def test_reported_output_is_not_reduced_by_an_echo() -> None:
    """A backend that reports knows what it generated."""
    seen = metered(Usage(2, 40), "one two three")
    assert charge(outcome(200, seen, echo=True), 0).completion_tokens == 40


@pytest.mark.parametrize(
    ("reported", "finished", "prompt"),
    [(3, False, PROMPT), (3, True, 3), (PROMPT + 1, False, PROMPT + 1)],
)
def test_a_batch_that_was_cut_is_charged_all_its_prompts(
    reported: int, prompt: int, *, finished: bool
) -> None:
    """Until the end a backend reports the prompt of one choice at a time."""
    seen = metered(Usage(reported, 9), "Hello", finished=finished)
    one = charge(outcome(200, seen, prompt=["one two", "three"]), 0)
    assert (one.prompt_tokens, one.prompt_source) == (prompt, REPORTED)


def test_the_tokens_of_a_charge_are_both() -> None:
    """Prompt and output weigh the same."""
    assert Charge(26, REPORTED, 9, REPORTED).tokens == 35


@pytest.mark.parametrize(
    ("seen", "needed"),
    [
        (None, False),
        (metered(), False),
        (metered(unread=1), False),
        (metered(Usage(26, 9), "Hello"), False),
        (metered(Usage(None, 9), "Hello"), False),
        (metered(Usage(26, None), "Hello"), True),
        (metered(Usage(26, None)), False),
        (metered(None, "Hello"), True),
    ],
)
def test_text_is_counted_only_where_the_output_was_not_reported(
    seen: Metered | None, *, needed: bool
) -> None:
    """Tokenizing costs time, and most backends report."""
    assert needs_count(outcome(200, seen)) is needed


def test_no_charge_is_ever_negative() -> None:
    """Whatever is taken together."""
    for status in (None, 0, 200, 404, 503):
        for usage in (None, Usage(None, None), Usage(0, 0), Usage(5, None)):
            for texts in ((), ("x",)):
                for unread in (0, 1):
                    seen = replace(metered(usage, *texts), unread=unread)
                    one = charge(outcome(status, seen, echo=True), 0)
                    assert min(one.prompt_tokens, one.completion_tokens, one.tokens) >= 0
