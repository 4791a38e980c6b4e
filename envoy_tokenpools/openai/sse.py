"""
Server-sent events, pushed in as bytes and cut anywhere.

Follows the event-stream rules of WHATWG HTML section 9.2, with one departure: `finish` dispatches an
unterminated last event, because usage in an unterminated tail must count. Only data is kept; the
event names of these APIs are repeated inside their JSON. Cost is O(bytes) however they are cut.
"""

_BOM = b"\xef\xbb\xbf"
_CR = 13
_LF = 10

MAX_EVENT_BYTES = 4 * 1024 * 1024
"""
Longest line and longest data of one event. The largest events known, `response.completed` with its
request and whole answer repeated, are some hundred KB; gRPC's default message limit is this one.
"""


class SseDecoder:
    """
    Turns the bytes of an event stream into the data of its events.

    Attributes:
        oversized: events dropped whole because their data exceeded `MAX_EVENT_BYTES`.
    """

    __slots__ = (
        "_begun",
        "_data",
        "_dropping",
        "_idle",
        "_line",
        "_skip_lf",
        "_skipping",
        "oversized",
    )

    def __init__(self) -> None:
        self.oversized = 0
        self._begun = False  # a line has ended: no byte order mark can follow
        self._line = bytearray()  # of the line that has not ended yet
        self._data = bytearray()  # of the event that has not ended yet, each line with its LF
        self._skipping = False  # to the end of a line that is too long
        self._dropping = False  # to the end of an event that is too long
        self._skip_lf = False  # the last byte was a CR, so a leading LF belongs to it
        self._idle = False  # between two events, and not before the first line

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that `data` completes, in order; empty data is no event."""
        if self._idle and data.startswith(b"data: "):
            # Nearly every feed is one whole event: one scan for each line ending, one slice.
            end = data.find(b"\n")
            if (
                end == len(data) - 2
                and data[-1] == _LF
                and _CR not in data
                and 6 < end <= MAX_EVENT_BYTES
            ):
                return [data[6:end]]
        return self._feed_lines(data)

    def finish(self) -> list[bytes]:
        """The data of an unterminated last event, if there is one."""
        events: list[bytes] = []
        if self._line or self._skipping:
            self._end_line(b"", events)
        self._end_event(events)
        return events

    def _feed_lines(self, data: bytes) -> list[bytes]:
        events: list[bytes] = []
        if not data:
            return events
        if self._skip_lf and data[0] == _LF:
            data = data[1:]
        self._skip_lf = data.endswith(b"\r")
        for line in data.splitlines(keepends=True):  # of bytes: at LF, CR and CRLF only
            if line[-1] == _LF or line[-1] == _CR:
                self._end_line(line.rstrip(b"\r\n"), events)
            else:
                self._hold(line)
        self._idle = not (self._line or self._data or self._skipping or self._dropping)
        return events

    def _hold(self, piece: bytes) -> None:
        if self._skipping:
            return
        if len(self._line) + len(piece) > MAX_EVENT_BYTES:
            self._skip_line(bytes(self._line[:8]) + piece[:8])
        else:
            self._line += piece

    def _skip_line(self, head: bytes) -> None:
        self._line.clear()
        self._skipping = True
        if not self._begun:
            head = head.removeprefix(_BOM)
        if head.startswith(b"data:"):
            self._drop_event()

    def _drop_event(self) -> None:
        self._data.clear()
        if not self._dropping:
            self._dropping = True
            self.oversized += 1

    def _end_line(self, piece: bytes, events: list[bytes]) -> None:
        if self._line or self._skipping or len(piece) > MAX_EVENT_BYTES:
            self._hold(piece)
            line = bytes(self._line)
            self._line.clear()
        else:
            line = piece
        if self._skipping:
            self._skipping = False
            self._begun = True
            return
        if not self._begun:
            self._begun = True
            line = line.removeprefix(_BOM)
        if not line:
            self._end_event(events)
        elif line.startswith(b"data:"):
            self._add_data(line[6:] if line.startswith(b"data: ") else line[5:])
        elif line == b"data":
            self._add_data(b"")

    def _add_data(self, value: bytes) -> None:
        if self._dropping:
            return
        if len(self._data) + len(value) > MAX_EVENT_BYTES:
            self._drop_event()
        else:
            self._data += value
            self._data += b"\n"

    def _end_event(self, events: list[bytes]) -> None:
        if len(self._data) > 1:
            self._data.pop()
            events.append(bytes(self._data))
        self._data.clear()
        self._dropping = False
