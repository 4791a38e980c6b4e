"""
Decodes compressed bodies (`content-encoding`) as they arrive, within bounds of memory and time.

`gzip`, `deflate`, `br` and `zstd`, or two of them on top of each other. The bytes are only read
here; what travels on stays as it was sent. A hostile body costs at most:

- output: `max_output_bytes`, an eighth of it spare, and one piece of up to 96 KiB per coding;
- windows: 32 KiB for gzip and deflate, 8 MiB for zstd (larger ones are refused, as RFC 9659 asks),
  16 MiB for br (the most that RFC 7932 has); the last two fill up only as output is made;
- members: `MAX_MEMBERS`, because a zstd frame of 8 bytes takes 10 to 50 us to open;
- time: of two codings, what lies between them is compressed already and hardly shrinks once more,
  so one that expands beyond `MAX_INNER_RATIO` would only keep the other busy for no output.
"""

import io
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import brotli

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_CODINGS = 2
MAX_MEMBERS = 1_000
MAX_INNER_RATIO = 4
MAX_ZSTD_WINDOW_LOG = 23

# What may lie between two codings before `MAX_INNER_RATIO` is looked at.
_INNER_SLACK_BYTES = 64 * 1024
# The libraries copy input that they could not use yet, so it is handed to them in small slices:
# whole, a bomb would be copied once per piece of output.
_SLICE_BYTES = 16 * 1024
_PIECE_BYTES = 32 * 1024
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: MAX_ZSTD_WINDOW_LOG}


class UnknownEncodingError(ValueError):
    """A `content-encoding` that cannot be read, or more codings than `MAX_CODINGS`."""


class UndecodableError(ValueError):
    """
    Decoding ended before the body did.

    Attributes:
        decoded: what the failing call decoded before that; where the fault lies in the middle of a
            compressed block, the last piece before it may be missing.
    """

    decoded: bytes = b""


class DecodingError(UndecodableError):
    """The body is not in the coding that it claims, or is damaged."""


class DecodedTooLargeError(UndecodableError):
    """The body is larger than allowed when decoded."""


class BodyDecoder:
    """Decodes one body, cut anywhere; made by `decoder_for`."""

    __slots__ = ("_layers", "_left_bytes", "_max_output_bytes", "_truncated")

    def __init__(self, layers: Iterable["_Layer"], max_output_bytes: int) -> None:
        self._layers = tuple(layers)
        self._max_output_bytes = max_output_bytes
        self._left_bytes = max_output_bytes
        self._truncated = False

    @property
    def truncated(self) -> bool:
        """
        Whether the body's end was not reached: known after `finish`, and after an error.

        A body without a single byte is whole.
        """
        return self._truncated

    def feed(self, data: bytes) -> bytes:
        """
        Everything that the bytes so far decode to and that was not returned yet.

        After `finish`, or an error, which is raised once, further bytes are ignored.

        Raises:
            DecodingError: the body is damaged, goes on after its end, or has too many members.
            DecodedTooLargeError: more than `max_output_bytes` in all.
        """
        if not self._layers:
            return b""
        stream: Iterable[bytes] = (data,)
        for layer in self._layers:
            stream = layer.decode(stream)
        decoded = io.BytesIO()  # grows in place, and gives its bytes away without a copy
        try:
            for piece in stream:
                self._take(piece, decoded)
        except UndecodableError as error:
            self._close(truncated=True)
            error.decoded = decoded.getvalue()
            raise
        return decoded.getvalue()

    def finish(self) -> bytes:
        """The body is over: frees the windows. Always empty, because `feed` holds nothing back."""
        if self._layers:
            self._close(truncated=any(layer.inside_member for layer in self._layers))
        return b""

    def _take(self, piece: bytes, decoded: io.BytesIO) -> None:
        if len(piece) > self._left_bytes:
            decoded.write(piece[: self._left_bytes])
            raise DecodedTooLargeError(
                f"the decoded body is larger than {self._max_output_bytes} bytes"
            )
        decoded.write(piece)
        self._left_bytes -= len(piece)

    def _close(self, *, truncated: bool) -> None:
        self._layers = ()
        self._truncated = truncated


def decoder_for(content_encoding: str, max_output_bytes: int) -> BodyDecoder | None:
    """
    The decoder for a body with this header; None if there is nothing to decode.

    Args:
        content_encoding: the header's value, of several headers joined by commas: the codings in
            the order in which they were applied (RFC 9110, section 8.4).
        max_output_bytes: how large the decoded body may be.

    Raises:
        UnknownEncodingError: a coding is not known, or there are too many.
    """
    if not content_encoding:
        return None  # nearly always
    names = [name.strip(" \t").lower() for name in content_encoding.split(",")]
    applied = [name for name in names if name not in {"", "identity"}]
    if len(applied) > MAX_CODINGS:
        raise UnknownEncodingError(f"more than {MAX_CODINGS} content codings on top of each other")
    for name in applied:
        if name not in _CODINGS:
            raise UnknownEncodingError(
                f"content coding {name[:32]!a} is not known; known are gzip, deflate, br and zstd"
            )
    layers = [
        _Layer(_CODINGS[name], feeds_another=position > 0) for position, name in enumerate(applied)
    ]
    return BodyDecoder(reversed(layers), max_output_bytes) if layers else None


class _Member(Protocol):
    """One gzip member, zlib or deflate stream, brotli stream or zstd frame."""

    ended: bool
    more: bool

    def read(self, data: bytes) -> tuple[bytes, bytes]:
        """
        The next piece of output, and the part of `data` to come back with.

        That is what lies behind the end if `ended`. If `more`, it has to be called again.
        """
        ...


class _Inflated:
    __slots__ = ("_stream", "ended", "more")

    def __init__(self, window_bits: int) -> None:
        self._stream = zlib.decompressobj(window_bits)
        self.ended = False
        self.more = False

    def read(self, data: bytes) -> tuple[bytes, bytes]:
        stream = self._stream
        decoded = stream.decompress(data, _PIECE_BYTES)
        self.ended = stream.eof
        self.more = not self.ended and len(decoded) == _PIECE_BYTES
        return decoded, stream.unused_data if self.ended else stream.unconsumed_tail


class _Brotli:
    __slots__ = ("_stream", "ended", "more")

    def __init__(self) -> None:
        self._stream = brotli.Decompressor()
        self.ended = False
        self.more = False

    def read(self, data: bytes) -> tuple[bytes, bytes]:
        stream = self._stream
        decoded: bytes = stream.process(data, _PIECE_BYTES)  # or up to a block of 64 KiB more
        self.ended = stream.is_finished()  # bytes behind the end are an error of the library's
        # It may give less than it was asked for and still have more: only nothing means nothing.
        self.more = not self.ended and bool(decoded)
        return decoded, b""


class _Zstd:
    __slots__ = ("_frame", "ended", "more")

    def __init__(self) -> None:
        self._frame = zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)
        self.ended = False
        self.more = False

    def read(self, data: bytes) -> tuple[bytes, bytes]:
        frame = self._frame
        decoded = frame.decompress(data, _PIECE_BYTES)
        self.ended = frame.eof
        self.more = not self.ended and not frame.needs_input
        return decoded, frame.unused_data if self.ended else b""


@dataclass(frozen=True, slots=True)
class _Coding:
    """
    A content coding.

    Attributes:
        name: as registered with IANA.
        open: starts a member, given its first bytes.
        repeats: whether a body may have several members.
        padding: the byte with which a body may be filled up, empty if none.
    """

    name: str
    open: Callable[[bytes], _Member]
    repeats: bool = False
    padding: bytes = b""


def _open_deflate(start: bytes) -> _Member:
    # RFC 9110 means the zlib format; some servers send it bare. Four bits tell: in a bare stream
    # they would be a stored block with padding that is not zero.
    return _Inflated(zlib.MAX_WBITS if start[0] & 0x0F == zlib.DEFLATED else -zlib.MAX_WBITS)


_GZIP = _Coding("gzip", lambda _: _Inflated(16 + zlib.MAX_WBITS), repeats=True, padding=b"\0")
_CODINGS = {
    "gzip": _GZIP,
    "x-gzip": _GZIP,
    "deflate": _Coding("deflate", _open_deflate),
    "br": _Coding("br", lambda _: _Brotli()),
    "zstd": _Coding("zstd", lambda _: _Zstd(), repeats=True),
}
_LIBRARY_ERRORS = (zlib.error, brotli.error, zstd.ZstdError)


class _Layer:
    """One coding of a body: its members one after the other."""

    __slots__ = ("_coding", "_feeds_another", "_member", "_members", "_spare_bytes")

    def __init__(self, coding: _Coding, *, feeds_another: bool) -> None:
        self._coding = coding
        self._member: _Member | None = None
        self._members = 0
        self._feeds_another = feeds_another
        self._spare_bytes = _INNER_SLACK_BYTES

    @property
    def inside_member(self) -> bool:
        """Whether a member has begun and not ended."""
        return self._member is not None

    def decode(self, stream: Iterable[bytes]) -> Iterator[bytes]:
        """The output for these bytes in pieces, each made when it is asked for."""
        for data in stream:
            for start in range(0, len(data), _SLICE_BYTES):
                yield from self._decode_slice(data[start : start + _SLICE_BYTES])

    def _decode_slice(self, data: bytes) -> Iterator[bytes]:
        self._spare_bytes += MAX_INNER_RATIO * len(data)
        more = False
        while data or more:
            member = self._member
            if member is None:
                data = self._start_of_next(data)
                if not data:
                    return
                member = self._member = self._coding.open(data)
            try:
                decoded, data = member.read(data)
            except _LIBRARY_ERRORS as error:
                raise DecodingError(f"the {self._coding.name} body is damaged: {error}") from error
            more = member.more
            if member.ended:
                self._member = None
            if decoded:
                self._check_inner(decoded)
                yield decoded

    def _start_of_next(self, data: bytes) -> bytes:
        """Where the next member starts in `data`; empty if all of it is padding."""
        if self._members and self._coding.padding:
            data = data.lstrip(self._coding.padding)
        if not data:
            return data
        if self._members and not self._coding.repeats:
            raise DecodingError(f"the {self._coding.name} body goes on after its end")
        if self._members == MAX_MEMBERS:
            raise DecodingError(f"the {self._coding.name} body has over {MAX_MEMBERS} members")
        self._members += 1
        return data

    def _check_inner(self, decoded: bytes) -> None:
        if self._feeds_another:
            self._spare_bytes -= len(decoded)
            if self._spare_bytes < 0:
                raise DecodedTooLargeError(
                    f"under the {self._coding.name} coding lies one that expands once more"
                )
