"""
Bytes as a script, and a gRPC stream on which a script's messages arrive.
"""

import asyncio
from collections import deque
from typing import NoReturn

import grpc

from envoy_tokenpools.extproc.wire import ProcessingRequest, parse_request
from tests.fuzz.envoy_messages import REPLY_KINDS, fields_of, kinds_of

_STATUSES = frozenset((400, 401, 404, 413, 415, 429, 503))
"""Of the answers that we give ourselves."""


class Script:
    """Reads a script; behind its end there is nothing but zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that were not read yet."""
        return len(self._data) - self._at

    def byte(self) -> int:
        """The next byte."""
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def some(self) -> bytes:
        """As many bytes as the next one says."""
        size = self.byte()
        self._at += size
        return self._data[self._at - size : self._at]


class UnreadableError(Exception):
    """The bytes were no message: gRPC's deserializer raises likewise."""


class ScriptedStream:
    """
    Stands for `grpc.aio.ServicerContext`.

    Attributes:
        read_kinds: the kinds of each message that was read, and whether a reply to it is due.
        replies: what was written.
        may_fail: whether something was sent that is no message of Envoy's.
    """

    def __init__(self) -> None:
        self.read_kinds: list[tuple[tuple[str, ...], bool]] = []
        self.replies: list[bytes] = []
        self.may_fail = False
        self._messages: deque[bytes] = deque()
        self._is_closed = False
        self._came = asyncio.Event()
        self._is_observed = False
        self._aborted_with: grpc.StatusCode | None = None

    def send(self, message: bytes) -> None:
        """Envoy sends a message."""
        self._messages.append(message)
        self._came.set()

    def send_anything(self, data: bytes) -> None:
        """Somebody sends bytes that may be no message, or one of fields that have the wrong types."""
        self.may_fail = True
        self.send(data)

    def close(self) -> None:
        """Envoy has no more to send."""
        self._is_closed = True
        self._came.set()

    async def read(self) -> ProcessingRequest | object:
        """See `extproc.service.Stream`."""
        while not self._messages and not self._is_closed:
            self._came.clear()
            await self._came.wait()
        if not self._messages:
            end: object = grpc.aio.EOF
            return end
        try:
            message = parse_request(self._messages.popleft())
        except Exception as error:
            raise UnreadableError from error
        kinds = kinds_of(message)
        self._is_observed = self._is_observed or message.observability_mode
        self.read_kinds.append((kinds, bool(kinds) and not self._is_observed))
        return message

    async def write(self, message: bytes) -> None:
        """See `extproc.service.Stream`."""
        self.replies.append(message)
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """See `extproc.service.Stream`."""
        self._aborted_with = code
        raise grpc.aio.AbortError(details)

    def check(self, *, is_whole: bool) -> None:
        """Every message that was read got its reply; the last one may miss it if the stream was broken off."""
        assert self._aborted_with is None or self.may_fail
        due = [kinds for kinds, is_due in self.read_kinds if is_due]
        missing = len(due) - len(self.replies)
        assert missing == 0 or (missing == 1 and not is_whole), (due, len(self.replies))
        for kinds, payload in zip(due, self.replies, strict=False):
            reply = _reply_kind(payload)
            assert reply == "immediate_response" or reply in kinds, (reply, kinds)


def _reply_kind(payload: bytes) -> str:
    """The one kind that a reply is of."""
    fields = list(fields_of(payload))
    (number,) = (number for number, _ in fields if number in REPLY_KINDS)
    kind = REPLY_KINDS[number]
    for number, value in fields:
        assert number in REPLY_KINDS or (number == 9 and kind == "request_headers"), number
        if kind == "immediate_response":
            assert isinstance(value, bytes)
            _check_answer(value)
    return kind


def _check_answer(answer: bytes) -> None:
    values = dict(fields_of(answer))
    status = values[1]
    assert isinstance(status, bytes)
    (code,) = (number for _, number in fields_of(status))
    assert code in _STATUSES, code
