"""
The request side of an exchange: the body as it comes in, what is read from it, and what little is changed in it.
"""

from dataclasses import dataclass

from envoy_tokenpools.core.pool import Pool
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.extproc import replies
from envoy_tokenpools.openai.encoding import (
    DecodedTooLargeError,
    DecodingError,
    UnknownEncodingError,
    decoder_for,
)
from envoy_tokenpools.openai.endpoint import Endpoint
from envoy_tokenpools.openai.fields import UsageWish
from envoy_tokenpools.openai.request import RequestFacts
from envoy_tokenpools.openai.rewrite import with_usage_requested, without_members

STRIPPED_MEMBERS = frozenset(("priority",))
"""vLLM schedules by it (`--scheduling-policy priority`): a client must not rank itself."""

STRIPPED_HEADERS = (
    "x-gateway-inference-fairness-id",
    "x-gateway-inference-objective",
    "x-llm-d-inference-fairness-id",
    "x-llm-d-inference-objective",
)
"""llm-d's class headers, by which the backend would rank the request behind our back."""

_INJECTABLE = frozenset((Endpoint.CHAT, Endpoint.COMPLETIONS))


class RequestBody:
    """Collects a body of at most `max_bytes`, encoded or not."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._bytes = 0

    def check_declared(self, content_length: int | None, encoding: str) -> None:
        """
        Refuse what the head alone rules out.

        Raises:
            RequestError: 413, declared too large; 415, in an encoding that cannot be read.
        """
        if content_length is not None and content_length > self._max_bytes:
            raise self._too_large()
        try:
            decoder_for(encoding, self._max_bytes)
        except UnknownEncodingError as error:
            message = f"The request body cannot be read: {error}."
            raise RequestError(415, "unsupported_content_encoding", message) from None

    def add(self, data: bytes) -> None:
        """
        Take the next piece.

        Raises:
            RequestError: 413, it is too large.
        """
        self._bytes += len(data)
        if self._bytes > self._max_bytes:
            self.clear()
            raise self._too_large()
        self._parts.append(data)

    @property
    def pieces(self) -> int:
        """How many pieces it came in."""
        return len(self._parts)

    def take(self, encoding: str) -> bytes:
        """
        The whole body, decoded; nothing of it is kept.

        Raises:
            RequestError: 400, it does not decode or ends too early; 413, it is too large when decoded.
        """
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self.clear()
        decoder = decoder_for(encoding, self._max_bytes)
        if decoder is None:
            return body
        try:
            decoded = decoder.feed(body) + decoder.finish()
        except DecodedTooLargeError:
            raise self._too_large() from None
        except DecodingError as error:
            message = f"The request body does not decode: {error}."
            raise RequestError(400, "invalid_content_encoding", message) from None
        if decoder.truncated:
            raise RequestError(
                400, "invalid_content_encoding", "The encoded request body ends too early."
            )
        return decoded

    def clear(self) -> None:
        """Forget it."""
        self._parts.clear()

    def _too_large(self) -> RequestError:
        return RequestError(
            413,
            "request_too_large",
            f"The request body is larger than the {self._max_bytes} bytes that are read here.",
        )


@dataclass(frozen=True, slots=True)
class Change:
    """
    What the backend gets other than what the client sent.

    Attributes:
        body: the new body; None leaves it as it is.
        asks_usage: usage was asked for in the client's stead, and its chunk is to be withheld.
    """

    body: bytes | None = None
    asks_usage: bool = False


NO_CHANGE = Change()


def change_for(facts: RequestFacts, pool: Pool, body: bytes, encoding: str) -> Change:
    """
    The change to `body` (decoded) of an admitted request.

    A member by which the client would rank itself goes. A stream that says nothing about usage asks for it, if the pool
    wants that and the body is not encoded: an encoded one is only touched if it must be, and then goes out decoded.
    """
    changed = without_members(body, STRIPPED_MEMBERS)
    is_silent = facts.stream and facts.usage_wish is UsageWish.SILENT
    if not (is_silent and pool.inject_usage and facts.endpoint in _INJECTABLE) or encoding:
        return Change(changed) if changed is not None else NO_CHANGE
    asking = with_usage_requested(body if changed is None else changed)
    if asking is None:
        return Change(changed)
    return Change(asking, asks_usage=True)


def admit_body(change: Change, *, sets_length: bool) -> bytes:
    """The reply that lets a request go on whose body message is answered."""
    if change.body is None:
        return ADMIT_BODY
    length = (("content-length", str(len(change.body))),) if sets_length else ()
    removed = [*STRIPPED_HEADERS, "content-encoding"]
    if change.asks_usage:
        # The usage chunk cannot be withheld from a compressed answer.
        removed.append("accept-encoding")
    return replies.request_body_with(change.body, set_headers=length, remove_headers=removed)


ADMIT_BODY = replies.request_body_with(None, remove_headers=STRIPPED_HEADERS)
"""Lets a request go on with the body that its client sent."""

ADMIT_HEADERS = replies.request_headers_unread(remove_headers=STRIPPED_HEADERS)
"""Lets a request go on that is decided on its head alone; its body is not sent to us, the answer is."""
