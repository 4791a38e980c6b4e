"""Every target on some thousand inputs, on those that found faults, and on faults that it must find."""

import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from envoy_tokenpools.extproc import exchange, requesting
from envoy_tokenpools.extproc.exchange import Exchange
from envoy_tokenpools.gate.reserving import Reservations
from envoy_tokenpools.openai import encoding, request
from envoy_tokenpools.openai.withhold import UsageChunkRemover
from tests.fuzz.regressions import REGRESSIONS
from tests.fuzz.running import minimised, run
from tests.fuzz.targets import TARGETS

BRIEFLY = {"request_body": 20_000, "stream": 3_000, "encoded": 3_000, "exchange": 800}
"""Inputs of each target, a second's worth."""

REACH = {
    "request_body": ("accepted", "changed", "refused", "unread"),
    "stream": ("finished", "reported", "with_text", "with_unread"),
    "encoded": ("sound", "truncated", "damaged", "too_large", "unknown"),
    "exchange": ("admitted", "leases", "refused", "cancelled", "store_failures"),
}
"""What must be seen by many inputs: a target that is turned away at the door finds nothing."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The targets provoke what is rightly logged, over and over."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_odd_inputs_break_no_promise(name: str) -> None:
    """Nothing is found, and the inputs reach what they are meant to."""
    result = run(name, runs=BRIEFLY[name], seed=7)
    assert not result.findings, result.findings
    assert result.executions == BRIEFLY[name]
    assert min(result.seen[what] for what in REACH[name]) >= 5, result.seen


@pytest.mark.parametrize(
    ("name", "data"),
    [
        pytest.param(name, data, id=f"{name}: {what}")
        for name, inputs in REGRESSIONS.items()
        for what, data in inputs.items()
    ],
)
def test_what_found_a_fault_once_finds_none(name: str, data: bytes) -> None:
    """The promise that was broken is kept."""
    assert TARGETS[name].fuzz(data)


def finds_something(name: str) -> None:
    """Some of the first inputs must make the target raise."""
    rng = random.Random(7)
    inputs = (TARGETS[name].generate(rng) for _ in itertools.count())
    for data in itertools.islice(inputs, 3_000):
        TARGETS[name].fuzz(data)


def test_a_claim_that_is_not_undone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that forgets the claims of clients who left leaves leases behind."""

    async def forget(*_: object) -> None:
        """Do nothing."""

    monkeypatch.setattr(Reservations, "_undo", forget)
    with pytest.raises(AssertionError):
        finds_something("exchange")


def test_a_second_settlement_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange that settles at its end whatever it did before is caught."""
    settle = Exchange._settle

    def settle_always(self: Exchange, seen: Any) -> Any:
        if self._admitted is not None:
            self._phase = exchange.Phase.ADMITTED
        return settle(self, seen)

    monkeypatch.setattr(Exchange, "_settle", settle_always)
    with pytest.raises(AssertionError):
        finds_something("exchange")


def test_a_missing_reply_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Envoy would wait for it until its timeout."""
    monkeypatch.setattr(exchange, "_RESPONSE_TRAILERS", ())
    with pytest.raises(AssertionError):
        finds_something("exchange")


def test_an_undocumented_exception_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies that nobody thought of end in no KeyError."""
    monkeypatch.setattr(request, "flag", lambda fields, name: bool(fields[name]))
    with pytest.raises(KeyError):
        finds_something("request_body")


def test_a_change_of_meaning_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend gets the request that was counted."""
    changed = requesting.change_for

    def changed_too_much(facts: Any, pool: Any, body: bytes, encoding: str) -> Any:
        return changed(facts, pool, body.replace(b"hi", b"ho"), encoding)

    monkeypatch.setattr("tests.fuzz.request_bodies.change_for", changed_too_much)
    with pytest.raises(AssertionError):
        finds_something("request_body")


def test_a_byte_lost_at_a_cut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are the same to the meter and to the client however they are cut."""
    feed = UsageChunkRemover.feed
    monkeypatch.setattr(UsageChunkRemover, "feed", lambda self, data: feed(self, data.strip(b"\r")))
    with pytest.raises(AssertionError):
        finds_something("stream")


def test_text_without_a_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a response may make us hold is limited."""

    def hold_all(self: UsageChunkRemover, piece: bytes, _: bytearray) -> None:
        self._held += piece

    monkeypatch.setattr(UsageChunkRemover, "_hold", hold_all)
    with pytest.raises(AssertionError):
        finds_something("stream")


def test_output_beyond_the_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders keep to what they are allowed."""
    monkeypatch.setattr(
        encoding.BodyDecoder, "_take", lambda _, piece, decoded: decoded.write(piece)
    )
    with pytest.raises(AssertionError):
        finds_something("encoded")


def test_findings_are_made_short() -> None:
    """Of an input that fails for a few bytes, those bytes are left."""
    data = bytes(range(256)) * 4
    assert minimised(data, lambda part: b"\x07" in part and b"\xf0" in part) in (
        b"\x07\xf0",
        b"\xf0\x07",
    )
