"""Compressed bodies: every coding, every cut, every kind of damage, and every bomb we know of."""

import gzip
import itertools
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import brotli
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.openai.encoding import (
    MAX_CODINGS,
    MAX_MEMBERS,
    MAX_ZSTD_WINDOW_LOG,
    BodyDecoder,
    DecodedTooLargeError,
    DecodingError,
    UndecodableError,
    UnknownEncodingError,
    decoder_for,
)
from envoy_tokenpools.openai.usage import StreamMeter
from tests.support.streams import S_METERED, S, fed

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Compress = Callable[[bytes], bytes]

MIB = 1024 * 1024
PIECE_BYTES = 32 * 1024
BOMB_BYTES = 100_000_000


def bare_deflate(data: bytes) -> bytes:
    """Deflate without the zlib format around it, as some servers send it."""
    stream = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


def brotlied(data: bytes) -> bytes:
    """Brotli at a quality that does not take long."""
    return bytes(brotli.compress(data, quality=5))


def windowed(data: bytes, window_log: int) -> bytes:
    """One zstd frame with this window, its size not given."""
    frame = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: window_log})
    return frame.compress(data, frame.FLUSH_BLOCK) + frame.flush(frame.FLUSH_FRAME)


CODINGS: list[tuple[str, Compress]] = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("Deflate", bare_deflate),
    ("br", brotlied),
    ("zstd", zstd.compress),
    ("gzip, X-GZIP", lambda data: gzip.compress(gzip.compress(data))),
    ("deflate,BR", lambda data: brotlied(zlib.compress(data))),
    ("br , identity, zstd", lambda data: zstd.compress(brotlied(data))),
]
each_coding = pytest.mark.parametrize(
    ("coding", "compress"), [pytest.param(*coding, id=coding[0]) for coding in CODINGS]
)


def decoder(coding: str, max_output_bytes: int = 64 * MIB) -> BodyDecoder:
    """A decoder for a coding that needs one."""
    made = decoder_for(coding, max_output_bytes)
    assert made is not None
    return made


def decoded(coding: str, *pieces: bytes) -> tuple[bytes, bool]:
    """What these pieces decode to, and whether the end was missing."""
    body = decoder(coding)
    whole = b"".join([body.feed(piece) for piece in pieces]) + body.finish()
    return whole, body.truncated


def fed_until_refused(
    body: BodyDecoder, pieces: Iterator[bytes]
) -> tuple[bytes, UndecodableError | None]:
    """All that came out of these pieces, and the error that ended it."""
    whole = b""
    for piece in pieces:
        try:
            whole += body.feed(piece)
        except UndecodableError as error:
            return whole + error.decoded, error
    return whole, None


def in_steps(body: bytes, step: int) -> Iterator[bytes]:
    """The body in pieces of this many bytes."""
    return (body[start : start + step] for start in range(0, len(body), step))


def at_cuts(body: bytes, cuts: list[int]) -> Iterator[bytes]:
    """The body cut at these places, empty pieces included."""
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    return (body[start:end] for start, end in itertools.pairwise(places))


def mixed(size: int) -> bytes:
    """Bytes of which some stretches compress well and some not at all."""
    generator = random.Random(size)
    parts = (
        generator.choice((bytes(9_000), S, generator.randbytes(3_000)))
        for _ in range(size // 300 + 1)
    )
    return b"".join(parts)[:size]


PLAIN = st.lists(st.tuples(st.binary(max_size=300), st.integers(1, 400)), max_size=4).map(
    lambda parts: b"".join(part * times for part, times in parts)
)
CUTS = st.lists(st.integers(0, 2**20), max_size=6)


@each_coding
@given(plain=PLAIN, cuts=CUTS)
def test_any_bytes_come_back_at_any_cuts(
    coding: str, compress: Compress, plain: bytes, cuts: list[int]
) -> None:
    """A body decodes to what was compressed, however it is cut."""
    assert decoded(coding, *at_cuts(compress(plain), cuts)) == (plain, False)


@each_coding
@pytest.mark.parametrize("step", [997, 16 * 1024, 16 * 1024 + 1, MIB])
def test_large_body_comes_back(coding: str, compress: Compress, step: int) -> None:
    """A body of many pieces decodes to what was compressed, fed in steps or whole."""
    plain = mixed(MIB)
    assert decoded(coding, *in_steps(compress(plain), step)) == (plain, False)


@each_coding
def test_body_that_just_exceeds_a_piece_comes_back(coding: str, compress: Compress) -> None:
    """Output that the last bytes of input stand for is fetched, also if it fills a whole piece."""
    for size in range(PIECE_BYTES - 5, PIECE_BYTES + 1_100, 13):
        assert decoded(coding, compress(bytes(size))) == (bytes(size), False)


@each_coding
def test_compressed_stream_is_metered_at_every_cut(coding: str, compress: Compress) -> None:
    """The meter says the same of a compressed stream as of the plain one, wherever it is cut."""
    body = compress(S)
    for cut in range(len(body) + 1):
        stream = decoder(coding)
        pieces = [stream.feed(body[:cut]), stream.feed(body[cut:]), stream.finish()]
        assert fed(StreamMeter(), *pieces) == S_METERED
    assert decoded(coding, *in_steps(body, 1)) == (S, False)


def test_flushed_event_comes_out_at_once() -> None:
    """What a server flushed is not held back until the next event, however large it is decoded."""
    sizes = [*range(20), *range(0, 200_000, 9_999)]
    events = [b"data: %d%b\n\n" % (size, b" " * size) for size in sizes]
    deflating, brotling = zlib.compressobj(wbits=31), brotli.Compressor()
    framing = zstd.ZstdCompressor()
    bodies = {name: decoder(name) for name in ("gzip", "br", "zstd")}
    for event in events:
        flushed = {
            "gzip": deflating.compress(event) + deflating.flush(zlib.Z_SYNC_FLUSH),
            "br": brotling.process(event) + brotling.flush(),
            "zstd": framing.compress(event, framing.FLUSH_BLOCK),
        }
        for name, body in bodies.items():
            assert body.feed(flushed[name]) == event


@each_coding
@given(plain=PLAIN.filter(bool), cut=st.integers(1, 2**20), cuts=CUTS)
def test_body_cut_short_gives_what_was_there(
    coding: str, compress: Compress, plain: bytes, cut: int, cuts: list[int]
) -> None:
    """A body that ends early decodes to a start of what was compressed, and is flagged."""
    body = compress(plain)
    start, truncated = decoded(coding, *at_cuts(body[: cut % len(body)], cuts))
    assert plain.startswith(start)
    assert truncated == (cut % len(body) > 0)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
def test_half_a_stream_is_half_read(coding: str) -> None:
    """Of a long body cut in the middle about half is there."""
    plain = mixed(MIB)
    body = dict(CODINGS)[coding](plain)
    start, truncated = decoded(coding, body[: len(body) // 2])
    assert truncated
    assert len(start) > MIB // 4


@each_coding
def test_body_without_a_byte_is_whole(coding: str, compress: Compress) -> None:
    """No body at all is no truncated body, whatever its header says."""
    assert compress(b"")
    assert decoded(coding) == (b"", False)
    assert decoded(coding, b"", b"") == (b"", False)


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        pytest.param("gzip", gzip.compress(b"a") + gzip.compress(b"b"), id="gzip members"),
        pytest.param("gzip", gzip.compress(b"ab") + bytes(70_000), id="padding"),
        pytest.param(
            "gzip", gzip.compress(b"a") + bytes(3) + gzip.compress(b"b"), id="padding between"
        ),
        pytest.param("gzip", gzip.compress(b"") * 9 + gzip.compress(b"ab"), id="empty members"),
        pytest.param("zstd", zstd.compress(b"a") + zstd.compress(b"b"), id="zstd frames"),
        pytest.param(
            "zstd", b"\x51\x2a\x4d\x18\2\0\0\0??" + zstd.compress(b"ab"), id="skippable frame"
        ),
        pytest.param("zstd", windowed(b"ab", MAX_ZSTD_WINDOW_LOG), id="largest zstd window"),
    ],
)
def test_members_are_read_one_after_the_other(coding: str, body: bytes) -> None:
    """A body may have several members, and gzip zeros behind them, at every cut."""
    for cut in range(min(len(body), 200) + 1):
        assert decoded(coding, body[:cut], body[cut:]) == (b"ab", False)


@pytest.mark.parametrize(("coding", "member"), [("gzip", gzip.compress(b"a")), ("zstd", b"")])
def test_members_are_limited(coding: str, member: bytes) -> None:
    """Members that hold next to nothing cannot keep us busy."""
    member = member or zstd.compress(b"a")
    assert decoded(coding, member * MAX_MEMBERS) == (b"a" * MAX_MEMBERS, False)
    with pytest.raises(DecodingError) as caught:
        decoder(coding).feed(member * (MAX_MEMBERS + 1))
    assert caught.value.decoded == b"a" * MAX_MEMBERS


@pytest.mark.parametrize(("coding", "compress"), CODINGS[:5])
def test_bytes_after_the_end_are_damage(coding: str, compress: Compress) -> None:
    """What follows the end and starts nothing is refused, in the same feed or a later one."""
    body = decoder(coding)
    assert body.feed(compress(b"ab")) == b"ab"
    with pytest.raises(DecodingError):
        body.feed(b"!junk junk junk junk")
    with pytest.raises(DecodingError):
        decoder(coding).feed(compress(b"ab") + b"!junk junk junk junk")


def test_error_keeps_what_was_decoded_before_it() -> None:
    """The usage of a whole answer is not lost because of junk behind it."""
    with pytest.raises(DecodingError) as caught:
        decoder("gzip").feed(gzip.compress(S) + b"junk")
    assert caught.value.decoded == S


def test_error_is_raised_once() -> None:
    """After an error, and after the end, bytes are ignored; the body counts as not ended."""
    body = decoder("gzip")
    with pytest.raises(DecodingError):
        body.feed(b"no gzip")
    assert (body.feed(gzip.compress(S)), body.finish(), body.truncated) == (b"", b"", True)
    body = decoder("gzip")
    assert (body.finish(), body.feed(gzip.compress(S)), body.truncated) == (b"", b"", False)


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        pytest.param("gzip", S, id="plain"),
        pytest.param("gzip", zlib.compress(S), id="zlib as gzip"),
        pytest.param("gzip", gzip.compress(S)[:-8] + bytes(8), id="wrong checksum"),
        pytest.param("deflate", gzip.compress(S), id="gzip as deflate"),
        pytest.param("deflate", zlib.compress(S)[:-4] + bytes(4), id="wrong zlib checksum"),
        pytest.param("deflate", b"\x78\xbb" + bytes(20), id="zlib asks for a dictionary"),
        pytest.param("br", gzip.compress(S), id="gzip as br"),
        pytest.param("zstd", gzip.compress(S), id="gzip as zstd"),
        pytest.param("zstd", windowed(S, MAX_ZSTD_WINDOW_LOG + 1), id="zstd window too large"),
        pytest.param("gzip, gzip", gzip.compress(S), id="only one of two"),
        pytest.param("deflate, gzip", zlib.compress(gzip.compress(S)), id="the wrong way round"),
    ],
)
def test_damage_is_told(coding: str, body: bytes) -> None:
    """A body that is not what its header says raises one kind of error, whole and byte by byte."""
    for step in (1, len(body)):
        with pytest.raises(DecodingError):
            decoded(coding, *in_steps(body, step))


@each_coding
@given(junk=st.binary(max_size=2_000), cuts=CUTS)
def test_random_bytes_raise_nothing_else(
    coding: str, compress: Compress, junk: bytes, cuts: list[int]
) -> None:
    """Any bytes, alone or behind a good start, are decoded or refused with our own errors."""
    start = compress(S)[:40]
    for body in (junk, start + junk):
        stream = decoder(coding, max_output_bytes=100_000)
        whole, error = fed_until_refused(stream, at_cuts(body, cuts))
        assert len(whole) <= 100_000
        assert stream.finish() == b""
        assert stream.truncated or error is None


@each_coding
@given(place=st.integers(0, 2**20), flip=st.integers(1, 255))
def test_one_damaged_byte_raises_nothing_else(
    coding: str, compress: Compress, place: int, flip: int
) -> None:
    """A damaged byte ends in our own error, or in a body: not every coding has a checksum."""
    body = bytearray(compress(S))
    body[place % len(body)] ^= flip
    stream = decoder(coding)
    _, error = fed_until_refused(stream, in_steps(bytes(body), len(body)))
    assert stream.truncated == (error is not None)


@each_coding
def test_output_is_limited_to_the_byte(coding: str, compress: Compress) -> None:
    """A body as large as allowed passes; one byte more, in this feed or in all, is too large."""
    body = compress(mixed(200_000))
    assert decoder(coding, 200_000).feed(body) == mixed(200_000)
    for step in (50, len(body)):
        whole, error = fed_until_refused(decoder(coding, 199_999), in_steps(body, step))
        assert whole == mixed(200_000)[:-1]
        assert isinstance(error, DecodedTooLargeError)


_CHILD = """
import sys
from pathlib import Path
from envoy_tokenpools.openai.encoding import DecodedTooLargeError, decoder_for

def peak_kib():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])

coding, path = sys.argv[1:]
body = Path(path).read_bytes()
before = peak_kib()
try:
    decoder_for(coding, 16 * 1024 * 1024).feed(body)
except DecodedTooLargeError:
    print(peak_kib() - before)
"""


@each_coding
def test_bomb_costs_no_more_memory_than_allowed(
    coding: str, compress: Compress, tmp_path: Path
) -> None:
    """100 MB of zeros, limited to 16 MiB, raise the process's peak by little more than that."""
    bomb = tmp_path / "bomb"
    bomb.write_bytes(compress(bytes(BOMB_BYTES)))
    grown = subprocess.run(
        [sys.executable, "-c", _CHILD, coding, str(bomb)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert int(grown) < 24 * 1024


def test_bomb_between_two_codings_is_one() -> None:
    """Bytes that expand to a body without any output are stopped before the inner decoder tires."""
    nothing = b"\0\0\0\xff\xff" * 1_000_000  # empty stored blocks
    assert decoded("deflate", nothing) == (b"", True)
    for outer, compress in (("gzip", gzip.compress), ("zstd", zstd.compress), ("br", brotlied)):
        with pytest.raises(DecodedTooLargeError):
            decoder(f"deflate, {outer}").feed(compress(nothing))


def test_repetition_under_two_codings_is_no_bomb() -> None:
    """A small body that both codings can shrink is read."""
    plain = bytes(10_000_000)
    assert decoded("gzip, gzip", gzip.compress(gzip.compress(plain))) == (plain, False)


def test_time_grows_with_the_body_only() -> None:
    """Eight times the bytes in one feed take about eight times as long, not sixty-four."""

    def seconds(size: int) -> float:
        body = gzip.compress(random.Random(1).randbytes(size), compresslevel=1)
        taken = []
        for _ in range(5):
            start = time.perf_counter()
            assert len(decoder("gzip").feed(body)) == size
            taken.append(time.perf_counter() - start)
        return min(taken)

    assert seconds(16 * MIB) < 25 * seconds(2 * MIB)


@pytest.mark.parametrize("header", ["", " ", "identity", "Identity", "identity, identity", ", ,"])
def test_nothing_to_decode(header: str) -> None:
    """A header that names no coding needs no decoder."""
    assert decoder_for(header, MIB) is None


@pytest.mark.parametrize(
    "header",
    [
        "compress",
        "utf-8",
        "*",
        "gzip;q=1",
        "gzip deflate",
        "dcz",
        "gzip, unknown",
        "unknown, gzip",
        "\udcff\n",
        "g" * 60_000,
        ",".join(["gzip"] * (MAX_CODINGS + 1)),
    ],
)
def test_what_cannot_be_read_is_refused(header: str) -> None:
    """An unknown coding, or too many, raises an error whose message is short and printable."""
    with pytest.raises(UnknownEncodingError) as caught:
        decoder_for(header, MIB)
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()
