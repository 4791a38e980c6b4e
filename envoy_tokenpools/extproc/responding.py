"""
The response side of an exchange: what the backend answers, read as it passes.
"""

from dataclasses import replace
from typing import NamedTuple

from envoy_tokenpools.extproc.wire import HttpHeaders, headers_of
from envoy_tokenpools.observer import Ending
from envoy_tokenpools.openai.encoding import (
    BodyDecoder,
    UndecodableError,
    UnknownEncodingError,
    decoder_for,
)
from envoy_tokenpools.openai.usage import (
    BodyMeter,
    Metered,
    StreamMeter,
    UsageMeter,
    meter_for,
)
from envoy_tokenpools.openai.withhold import UsageChunkRemover

MAX_DECODED_BYTES = 32 * 1024 * 1024
"""A response that decodes to more is not read further: no text is that long, and one piece may decode to all of it."""


_WANTED = frozenset((b":status", b"content-encoding", b"content-type"))
"""Response headers that are decoded."""


class ResponseHead(NamedTuple):
    """What the headers of a response say; a status that is no number is 0."""

    status: int
    content_type: str
    content_encoding: str


def response_head(message: HttpHeaders) -> ResponseHead:
    """The head from a response headers message."""
    found = {name: value.decode("latin-1") for name, value in headers_of(message, _WANTED)}
    status = found.get(b":status", "")
    return ResponseHead(
        int(status) if status.isdecimal() else 0,
        found.get(b"content-type", ""),
        found.get(b"content-encoding", ""),
    )


class Response:
    """
    One response: metered, and passed on as it is but for a usage chunk that only we asked for.

    Attributes:
        status: HTTP status; None until it is known.
    """

    __slots__ = (
        "_broke_off",
        "_decoder",
        "_is_json",
        "_meter",
        "_remover",
        "_withholds_usage",
        "status",
    )

    def __init__(self, *, withholds_usage: bool) -> None:
        self.status: int | None = None
        self._withholds_usage = withholds_usage
        self._meter: UsageMeter | None = None
        self._decoder: BodyDecoder | None = None
        self._remover: UsageChunkRemover | None = None
        self._broke_off = False
        self._is_json = False

    def begin(self, status: int, content_type: str, encoding: str) -> None:
        """Status and headers are known; an encoding that cannot be read leaves the response unread."""
        self.status = status
        try:
            self._decoder = decoder_for(encoding, MAX_DECODED_BYTES)
        except UnknownEncodingError:
            return
        self._meter = meter_for(content_type)
        media_type = content_type.partition(";")[0].strip().lower()
        self._is_json = media_type == "application/json" or media_type.endswith("+json")
        if self._withholds_usage and self._decoder is None and isinstance(self._meter, StreamMeter):
            self._remover = UsageChunkRemover()

    @property
    def changes_body(self) -> bool:
        """Whether bytes may be withheld, so that a declared length would be wrong."""
        return self._remover is not None

    @property
    def has_output(self) -> bool:
        """Whether generated text was seen."""
        return self._meter is not None and self._meter.first_output

    def feed(self, data: bytes, *, ends: bool) -> bytes:
        """Read the next bytes; returns what to pass on."""
        if self._meter is not None and data:
            self._read(self._meter, data)
        if self._remover is None:
            return data
        passed = self._remover.feed(data) if data else b""
        return passed + self._remover.finish() if ends else passed

    def _read(self, meter: UsageMeter, data: bytes) -> None:
        if self._decoder is None:
            meter.feed(data)
            return
        try:
            meter.feed(self._decoder.feed(data))
        except UndecodableError as error:
            meter.feed(error.decoded)
            self._broke_off = True

    def finish(self) -> Metered | None:
        """What was seen; None if nothing of it could be read."""
        if self._meter is None:
            return None
        metered = self._meter.finish()
        return replace(metered, unread=metered.unread + 1) if self._broke_off else metered

    def ending(self, seen: Ending, metered: Metered | None) -> Ending:
        """
        How the request ended, by what was seen of it.

        `seen` is COMPLETED where the body ended, else why it did not go on.
        """
        failed = self.status is not None and self.status >= 400
        if failed or (metered is not None and metered.error):
            return Ending.BACKEND_ERROR
        if metered is not None and metered.finished:
            return Ending.COMPLETED
        return Ending.TRUNCATED if seen is Ending.COMPLETED and self._shows_its_end else seen

    @property
    def _shows_its_end(self) -> bool:
        """Whether one can tell from its content that it is whole: an event stream, or JSON that was read."""
        if isinstance(self._meter, BodyMeter):
            return self._is_json and not self._meter.too_large
        return self._meter is not None
