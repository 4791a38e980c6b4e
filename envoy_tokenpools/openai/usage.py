"""
Meters a response on its way back: bytes in, reported usage and generated text out.

A meter never raises, whatever the backend sends, and its memory is bounded. It counts no tokens: the
caller does, on the joined texts, because a piece of a stream is not a token (speculative decoding puts
several in one, a tool parser holds some back).
"""

import enum
from dataclasses import dataclass
from typing import Protocol

from envoy_tokenpools.openai.sse import SseDecoder
from envoy_tokenpools.openai.transcript import Transcript, decode_message

MAX_BODY_BYTES = 4 * 1024 * 1024
"""
Longest body that is not a stream and is still read. Some 170 embeddings of 1,536 numbers fit; to decode
it takes about 5 ms, in which the event loop serves nobody else.
"""


class UsageSource(enum.Enum):
    """Where a settled number comes from: the backend, our count of its text, or neither."""

    REPORTED = "reported"
    COUNTED = "counted"
    ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the backend reported them; None where it did not, or no longer up to date."""

    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True, slots=True)
class Metered:
    """
    What a response turned out to be.

    Attributes:
        usage: what the backend reported, or None.
        texts: joined generated texts, to be tokenized one by one: per choice its content, reasoning,
            refusal, and the name and the arguments of each tool call.
        finished: whether the end was seen: `[DONE]`, a finish_reason of every choice, the final event of
            the Responses or Anthropic dialect, or a whole JSON body.
        error: whether the backend reported an error, also inside a stream that began well.
        overflow_chars: generated characters beyond what `texts` may hold.
        unread: events, or the body, that were too large, not JSON or of no known dialect: text or usage
            may be missing.
        token_ids: generated tokens that came as ids, which some backends send beside text or in its place.
    """

    usage: Usage | None
    texts: tuple[str, ...]
    finished: bool
    error: bool
    overflow_chars: int
    unread: int
    token_ids: int = 0


class UsageMeter(Protocol):
    """Watches one response. Feed its bytes as they come, then finish."""

    @property
    def first_output(self) -> bool:
        """Whether a generated piece (text, reasoning, tool call) was seen; no comment or role is one."""
        ...

    def feed(self, data: bytes) -> None:
        """Take in the next bytes; after `finish` they are ignored."""
        ...

    def finish(self) -> Metered:
        """The response is over, complete or not. Every further call returns the same."""
        ...


class StreamMeter:
    """Meters a stream of server-sent events."""

    __slots__ = ("_decoder", "_metered", "_over", "_transcript", "_unread")

    def __init__(self) -> None:
        self._decoder = SseDecoder()
        self._transcript = Transcript()
        self._unread = 0
        self._over = False
        self._metered: Metered | None = None

    @property
    def first_output(self) -> bool:
        """Whether a generated piece was seen."""
        return self._transcript.first_output

    def feed(self, data: bytes) -> None:
        """Take in the next bytes; what follows `[DONE]` is ignored, as clients do."""
        if not self._over:
            for payload in self._decoder.feed(data):
                if not self._read(payload):
                    self._unread += 1

    def finish(self) -> Metered:
        """What was metered, an unterminated last event included."""
        if self._metered is None:
            for payload in self._decoder.finish():
                self._read(payload)  # a last event cut short by a disconnect is no fault
            self._over = True
            self._metered = _metered(self._transcript, self._unread + self._decoder.oversized)
        return self._metered

    def _read(self, payload: bytes) -> bool:
        """Read one event; False if it is not JSON."""
        if self._over:
            return True
        if payload.startswith(b"[DONE]"):
            self._transcript.end()
            self._over = True
            return True
        try:
            event = decode_message(payload)
        except ValueError:
            return payload.isspace()
        self._transcript.read_event(event)
        return True


class BodyMeter:
    """Meters a body that is not a stream, which it collects; above `MAX_BODY_BYTES` it gives up."""

    __slots__ = ("_body", "_metered", "_transcript", "_unread", "too_large")

    def __init__(self) -> None:
        self.too_large = False
        self._body = bytearray()
        self._transcript = Transcript()
        self._unread = 0
        self._metered: Metered | None = None

    @property
    def first_output(self) -> bool:
        """Whether anything was generated; known only when the body is whole."""
        return self._transcript.first_output

    def feed(self, data: bytes) -> None:
        """Take in the next bytes."""
        if self._unread or self._metered is not None:
            return
        if len(self._body) + len(data) > MAX_BODY_BYTES:
            self.too_large = True
            self._unread = 1
            self._body.clear()
        else:
            self._body += data

    def finish(self) -> Metered:
        """What was metered; nothing of a body that is cut short, too large or not JSON."""
        if self._metered is None:
            if self._body:
                try:
                    self._transcript.read_body(decode_message(bytes(self._body)))
                except ValueError:
                    self._unread = 1
                self._body.clear()
            self._metered = _metered(self._transcript, self._unread)
        return self._metered


def meter_for(content_type: str) -> UsageMeter:
    """The meter for a response of this `content-type`; an unknown or empty one is a plain body."""
    media_type = content_type.partition(";")[0].strip().lower()
    return StreamMeter() if media_type == "text/event-stream" else BodyMeter()


def _metered(transcript: Transcript, unread: int) -> Metered:
    prompt_tokens = transcript.prompt_tokens
    completion_tokens = transcript.completion_tokens
    silent = transcript.finished and not transcript.first_output and not unread
    if completion_tokens is None and prompt_tokens is not None and silent:
        completion_tokens = 0  # embeddings and their like report the prompt only
    reported = prompt_tokens is not None or completion_tokens is not None
    if transcript.finished and not (transcript.is_known or reported or transcript.error):
        unread += 1  # a dialect that is not read
    return Metered(
        usage=Usage(prompt_tokens, completion_tokens) if reported else None,
        texts=transcript.texts(),
        finished=transcript.finished,
        error=transcript.error,
        overflow_chars=transcript.overflow_chars,
        unread=unread,
        token_ids=transcript.token_ids,
    )
