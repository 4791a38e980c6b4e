"""
Encoded bodies: the first byte chooses the coding, the second the limit and the cuts, the rest is the body.
"""

import gzip
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import brotli

from envoy_tokenpools.openai.encoding import (
    BodyDecoder,
    DecodedTooLargeError,
    DecodingError,
    UndecodableError,
    UnknownEncodingError,
    decoder_for,
)
from tests.support.streams import S

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


_CODINGS = (
    *("gzip", "deflate", "br", "zstd", "x-gzip", "", "identity", "gzip, br", "br, gzip"),
    *("zstd, gzip", "gzip, gzip", "deflate, zstd", "gzip,gzip,gzip", "lzma", " GZIP , identity"),
)
_LIMITS = (1 << 20, 64 * 1024, 1_000, 10)
_PIECES = (1 << 30, 16 * 1024, 64, 1)
_MAX_PIECES = 2_000


def _raw_deflate(plain: bytes) -> bytes:
    squeeze = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return squeeze.compress(plain) + squeeze.flush()


_ENCODERS: Mapping[str, Sequence[Callable[[bytes], bytes]]] = {
    "gzip": (gzip.compress,),
    "x-gzip": (gzip.compress,),
    "deflate": (zlib.compress, _raw_deflate),
    "br": (brotli.compress, lambda plain: brotli.compress(plain, quality=1)),
    "zstd": (zstd.compress,),
}


def fuzz_encoded(data: bytes) -> dict[str, int]:
    """
    Decode a body cut into pieces, and whole.

    What cannot be read raises one of the documented errors, once. What is decoded keeps to its limit, and is the same
    however a sound body is cut.
    """
    if len(data) < 2:
        return {}
    coding = _CODINGS[data[0] % len(_CODINGS)]
    limit, piece = _LIMITS[data[1] & 3], _PIECES[data[1] >> 2 & 3]
    body = data[2:]
    piece = max(piece, len(body) // _MAX_PIECES)
    try:
        decoder = decoder_for(coding, limit)
    except UnknownEncodingError:
        assert coding in ("lzma", "gzip,gzip,gzip")
        return {"unknown": 1}
    if decoder is None:
        assert coding in ("", "identity")
        return {"not_encoded": 1}
    decoded, error, truncated = _decoded(decoder, _cut(body, piece), limit)
    other = decoder_for(coding, limit)
    assert other is not None
    whole, error_of_whole, truncated_whole = _decoded(other, iter((body,)), limit)
    if error is error_of_whole is None:
        assert (decoded, truncated) == (whole, truncated_whole)
    elif "," not in coding and "zstd" not in coding:
        # Of two codings, how much may lie between them depends on what came before, and so on the cuts. zstd's library
        # finds a compressed block of no bytes only in a frame that it gets whole. Of a body that is too large and
        # damaged behind that, either may be seen first.
        assert error is not None, error_of_whole
        assert error_of_whole is not None, error
    return {
        "sound": error is None and not truncated,
        "truncated": error is None and truncated,
        "damaged": error is DecodingError,
        "too_large": error is DecodedTooLargeError,
    }


def _cut(body: bytes, size: int) -> Iterator[bytes]:
    return (body[at : at + size] for at in range(0, len(body), size))


def _decoded(
    decoder: BodyDecoder, pieces: Iterator[bytes], limit: int
) -> tuple[bytes, type[UndecodableError] | None, bool]:
    """The output, the error if there was one, and whether the end was missing."""
    out: list[bytes] = []
    error: type[UndecodableError] | None = None
    for piece in pieces:
        try:
            decoded = decoder.feed(piece)
        except UndecodableError as raised:
            assert error is None, "an error is raised once"
            error = type(raised)
            decoded = raised.decoded
        else:
            assert error is None or decoded == b"", "after an error, bytes are ignored"
        out.append(decoded)
    assert decoder.finish() == b""
    assert decoder.truncated or error is None
    whole = b"".join(out)
    assert len(whole) <= limit, len(whole)
    return whole, error, decoder.truncated


def encoded_body(rng: random.Random) -> bytes:
    """A sound body, sometimes one that grows a lot, in a coding that is mostly the one it is said to have."""
    number = rng.randrange(len(_CODINGS))
    plain = rng.choice(
        (
            *(b"", b"a", S, S * 5, rng.randbytes(200), rng.randbytes(40) * 60, b" " * 70_000),
            *((b"\0" * 1_200_000,) if rng.random() < 0.02 else (S,)),
        )
    )
    body = plain
    for name in _CODINGS[number].replace(" ", "").lower().split(","):
        if name in _ENCODERS:
            body = rng.choice(_ENCODERS[name])(body)
            if rng.random() < 0.05:
                body *= rng.choice((2, 3, 1_001))
    return bytes((number, rng.randrange(16))) + body
