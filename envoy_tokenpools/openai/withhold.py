"""
The one change that is ever made to a response: the usage chunk that only we asked for is left out.

A strict client breaks on a chunk without choices that it did not ask for. That chunk is an event whose
data is a JSON object with `choices: []` and a usage that is not null; vLLM and OpenAI send it once, before
`[DONE]`. Whatever else there is (comments, pings, errors, usage beside choices, Azure's first chunk, which
has neither choices nor usage) passes byte for byte and in order.

Rule of holding: bytes wait from the first line of an event to its blank line, so an event that is cut over
two messages goes out with its second half. Nothing else waits: comments between events, which keep
connections alive, pass as they come, and so does the rest of an event that is too long for a usage chunk.
"""

import re

from envoy_tokenpools.openai.sse import SseDecoder
from envoy_tokenpools.openai.transcript import decode_message

MAX_HELD_BYTES = 64 * 1024
"""
Longest event, without its blank line, that is held back and examined. A usage chunk has some 300 bytes; it
may repeat a model's name and itemize its tokens, but carries nothing that was generated.
"""

_BOM = b"\xef\xbb\xbf"
_CR = 13
_LF = 10
_COLON = 58
_BLANK_LINES = (b"\n\n", b"\r\n\r\n")

# What `choices: []` cannot do without, also when it is spread over lines; hardly any other chunk has it.
_EMPTY_ARRAY = re.compile(rb"\[[\] \t\r\n]")


class UsageChunkRemover:
    """Takes the usage chunk out of one event stream, whose bytes may be cut anywhere."""

    __slots__ = (
        "_after_cr",
        "_begun",
        "_between",
        "_decoder",
        "_drop_lf",
        "_held",
        "_in_line",
        "_too_long",
    )

    def __init__(self) -> None:
        self._held = bytearray()  # the event that has not ended, or half a byte order mark
        self._begun = False  # the first line has: no byte order mark can follow
        self._between = False  # two events, with nothing held, dropped or open
        self._in_line = False
        self._too_long = False  # the event that passes now
        self._after_cr = False  # a leading LF belongs to the line before it
        self._drop_lf = False  # and that line was removed
        self._decoder = SseDecoder()
        self._decoder.feed(b"\n")  # past its first line, where it would look for the mark

    def feed(self, data: bytes) -> bytes:
        """Take in the next bytes; returns what can be passed on, which may be nothing."""
        if self._between and data.endswith(_BLANK_LINES) and _EMPTY_ARRAY.search(data) is None:
            return data
        passed = bytearray()
        if not self._begun:
            data = self._begin(data, passed)
        if data:
            self._between = False
            self._feed_lines(data, passed)
        return bytes(passed)

    def finish(self) -> bytes:
        """The stream has ended: returns the rest, unless that is a usage chunk without its blank line."""
        rest = bytes(self._held)
        self._held.clear()
        return _comments_of(rest) if self._is_usage_chunk(rest, b"\n\n") else rest

    def _begin(self, data: bytes, passed: bytearray) -> bytes:
        """Pass a byte order mark on; returns what follows, nothing while the mark may be incomplete."""
        data = bytes(self._held) + data
        self._held.clear()
        if len(data) < len(_BOM) and _BOM.startswith(data):
            self._held += data
            return b""
        self._begun = True
        if data.startswith(_BOM):
            passed += _BOM
        return data.removeprefix(_BOM)

    def _feed_lines(self, data: bytes, passed: bytearray) -> None:
        removed = False
        if self._after_cr and data[0] == _LF:
            data = data[1:]
            if self._held:
                self._hold(b"\n", passed)
            elif not self._drop_lf:
                passed += b"\n"
        for piece in data.splitlines(keepends=True):  # of bytes: at LF, CR and CRLF only
            begins = not self._in_line
            self._in_line = piece[-1] != _LF and piece[-1] != _CR
            removed = False
            if begins and (piece[0] == _LF or piece[0] == _CR):
                removed = self._end_event(piece, passed)
            elif self._held or (begins and piece[0] != _COLON and not self._too_long):
                self._hold(piece, passed)
            else:
                passed += piece
        self._after_cr = data.endswith(b"\r")
        self._drop_lf = removed
        self._between = not (self._held or self._in_line or self._too_long or self._after_cr)

    def _hold(self, piece: bytes, passed: bytearray) -> None:
        self._held += piece
        if len(self._held) > MAX_HELD_BYTES:
            self._too_long = True
            passed += self._held
            self._held.clear()

    def _end_event(self, blank_line: bytes, passed: bytearray) -> bool:
        """Pass the held event on with its blank line, or of a usage chunk its comments; whether it was one."""
        self._too_long = False
        event = bytes(self._held)
        self._held.clear()
        if self._is_usage_chunk(event, blank_line):
            passed += _comments_of(event)
            return True
        passed += event
        passed += blank_line
        return False

    def _is_usage_chunk(self, event: bytes, blank_line: bytes) -> bool:
        if _EMPTY_ARRAY.search(event) is None:
            return False
        for payload in self._decoder.feed(event + blank_line):
            try:
                message = decode_message(payload)
            except ValueError:
                return False
            return message.choices == [] and message.usage is not None
        return False


def _comments_of(event: bytes) -> bytes:
    return b"".join(line for line in event.splitlines(keepends=True) if line[0] == _COLON)
