"""
One chat request over HTTP, as a well-meaning client sends it and sees what becomes of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp
import msgspec

from envoy_tokenpools.clock import Clock

RETRY_FLOOR_MS = 20
RETRY_CEILING_MS = 5_000
"""Bounds of the wait before a shed request is sent again, whatever the answer asks for."""

RETRY_SPREAD = 0.25
"""A wait is lengthened by up to this share of itself, by chance."""

FAILURE_PAUSE_MS = 200
"""The wait after an error that says nothing about when to come back."""

UNREACHABLE = "unreachable"
BROKEN_OFF = "broken_off"

_CHAT_PATH = "/v1/chat/completions"


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    """What a client reads of a chunk, or of a whole body."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_ANSWERS = msgspec.json.Decoder(_Answer)


def _nothing(_: int) -> None:
    pass


@dataclass(slots=True)
class Call:
    """
    One request; what is known of it so far can be read at any time, also after it was cancelled.

    Attributes:
        clock: gives the times.
        on_status: called with the answer's status.
        on_first_text: called with the microseconds since it was sent, when the first text comes.
        on_tokens: called with tokens that came, or negative ones that had been counted too many.
        sent_us: when it was sent.
        decided_us: when the status came; None if none did.
        first_text_us: when the first text of a stream came; None if none did.
        status: of the answer; 0 without one.
        failure: the error where there is no status, or the answer broke off; else empty.
        shed_reason: why it was shed, as a 429 states it; else empty.
        tokens: generated tokens that were received.
        asked_wait_ms: when to come back, as an answer other than 200 states it.
        may_retry: whether the answer allows to send the same again.
    """

    clock: Clock
    on_status: Callable[[int], None] = _nothing
    on_first_text: Callable[[int], None] = _nothing
    on_tokens: Callable[[int], None] = _nothing
    sent_us: int = 0
    decided_us: int | None = None
    first_text_us: int | None = None
    status: int = 0
    failure: str = ""
    shed_reason: str = ""
    tokens: int = 0
    asked_wait_ms: float = FAILURE_PAUSE_MS
    may_retry: bool = False

    @property
    def completed(self) -> bool:
        """Whether the whole answer came."""
        return self.status == 200 and not self.failure

    async def send(
        self,
        session: aiohttp.ClientSession,
        body: bytes,
        *,
        key: str,
        retries: int,
        stream: bool,
    ) -> None:
        """
        Send it and read the answer to its end.

        Args:
            session: knows the server.
            body: the JSON.
            key: the bearer token.
            retries: how often the same was sent before.
            stream: whether the body asks for a stream.
        """
        headers = {
            "authorization": f"Bearer {key}",
            "content-type": "application/json",
            "x-stainless-retry-count": str(retries),
        }
        self.sent_us = self.clock.now_us()
        try:
            async with session.post(_CHAT_PATH, data=body, headers=headers) as answer:
                self.decided_us = self.clock.now_us()
                self.status = answer.status
                self.on_status(answer.status)
                await self._read(answer, stream=stream)
        except (aiohttp.ClientError, msgspec.DecodeError):
            self.failure = BROKEN_OFF if self.status else UNREACHABLE

    async def _read(self, answer: aiohttp.ClientResponse, *, stream: bool) -> None:
        if answer.status != 200:
            await answer.read()
            self.asked_wait_ms = _asked_wait_ms(answer.headers)
            if answer.status == 429:
                self.shed_reason = answer.headers.get("x-tokenpools-reason", "unstated")
                self.may_retry = answer.headers.get("x-should-retry") != "false"
        elif stream:
            if not await self._read_stream(answer):
                self.failure = BROKEN_OFF
        else:
            usage = _ANSWERS.decode(await answer.read()).usage
            if usage is not None:
                self._received(usage.completion_tokens)

    async def _read_stream(self, answer: aiohttp.ClientResponse) -> bool:
        """Count text as it comes; whether the stream came to its end mark without an error."""
        failed = ended = False
        # To its very end: a client that hangs up at the end mark looks like one that has left.
        async for line in answer.content:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                ended = True
                continue
            chunk = _ANSWERS.decode(data)
            failed = failed or chunk.error is not None
            texts = sum(bool(choice.delta.content) for choice in chunk.choices)
            if texts:
                if self.first_text_us is None:
                    self.first_text_us = self.clock.now_us()
                    self.on_first_text(self.first_text_us - self.sent_us)
                self._received(texts)
            if chunk.usage is not None:
                # Chunks are not tokens; the usage is cumulative and exact.
                self._received(chunk.usage.completion_tokens - self.tokens)
        return ended and not failed

    def _received(self, tokens: int) -> None:
        self.tokens += tokens
        self.on_tokens(tokens)


def retry_wait_ms(asked_ms: float, chance: float) -> float:
    """How long to wait before sending again: what was asked for, within bounds, and spread by `chance` (0 to 1)."""
    wait_ms = max(RETRY_FLOOR_MS, min(asked_ms, RETRY_CEILING_MS))
    return wait_ms * (1 + RETRY_SPREAD * chance)


def chat_body(
    model: str,
    name: str,
    *,
    prompt_words: int,
    max_tokens: int,
    stream: bool = True,
    include_usage: bool = False,
    ignore_eos: bool = False,
) -> bytes:
    """
    The JSON of a chat request.

    Args:
        model: the model.
        name: the first word of its prompt, so that no two bodies are the same.
        prompt_words: length of the prompt.
        max_tokens: the stated maximum.
        stream: whether to ask for a stream.
        include_usage: whether a stream shall end with the usage.
        ignore_eos: whether to generate the stated maximum whatever the model wants (vLLM).
    """
    words = [name, *["word"] * (prompt_words - 1)]
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": " ".join(words)}],
        "max_tokens": max_tokens,
        "stream": stream,
    }
    if stream and include_usage:
        body["stream_options"] = {"include_usage": True}
    if ignore_eos:
        body["ignore_eos"] = True
    return msgspec.json.encode(body)


def _asked_wait_ms(headers: Mapping[str, str]) -> float:
    """What an answer says about when to come back, as an SDK reads it."""
    for name, unit_ms in (("retry-after-ms", 1.0), ("retry-after", 1_000.0)):
        try:
            return float(headers[name]) * unit_ms
        except (KeyError, ValueError):
            continue
    return FAILURE_PAUSE_MS
