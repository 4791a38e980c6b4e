"""
Small damages to bytes, as transmission, carelessness and malice do them.
"""

import random
from collections.abc import Callable, Sequence

MAX_BYTES = 64 * 1024
"""Longest input that is made; what lies beyond costs time and finds nothing that shorter ones do not."""

TOKENS = (
    *(b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\", b"\\u", b"\\ud83d", b"\\u0000", b"null"),
    *(
        b"true",
        b"-1",
        b"0",
        b"1e999",
        b"1e3",
        b"9223372036854775808",
        b"NaN",
        b"-0.0",
        b"[]",
        b"{}",
    ),
    *(b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r", b"\0", b"\xef\xbb\xbf", b"\xff", b"\xed\xa0\x80"),
    *(
        b"data: ",
        b"data:",
        b"data",
        b": ",
        b"event: x\n",
        b"id: 7\n",
        b"[DONE]",
        b"data: [DONE]\n\n",
    ),
    *(b'"usage":', b'"choices":[]', b'"choices":[],"usage":{}', b'"prompt_tokens":', b'"index":'),
    *(
        b'"stream_options":',
        b'"priority":',
        b'"stream":true,',
        b'"model":"m",',
        b'"n":',
        b'"messages":',
    ),
    *("你".encode(), "👍".encode(), "👍".encode()[:2], b"<|endoftext|>", b" " * 65),
)
"""What means something to a reader of JSON or of event streams."""

_NESTING = (3, 50, 300, 990, 1_000, 1_100, 3_000)
"""Depths; readers in Python give up at about a thousand, a little earlier or later as they are called."""


def mutated(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """`data` after one to four damages; pieces may come from `others`."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = rng.choice(_DAMAGES)(data, rng, others)[:MAX_BYTES]
    return data


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    """A short piece, or now and then any."""
    start = rng.randint(0, len(data))
    longest = len(data) - start
    if rng.random() < 0.8:
        longest = min(longest, 24)
    return start, start + rng.randint(0, longest)


def _flip(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes((data[at] ^ 1 << rng.randrange(8),)) + data[at + 1 :]


def _replace(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + rng.choice(TOKENS) + data[end:]


def _insert(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(TOKENS) + data[at:]


def _noise(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + rng.randbytes(rng.randint(1, 8)) + data[end:]


def _delete(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + data[end:]


def _repeat(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = _span(data, rng)
    return data[:end] + data[start:end] * rng.choice((1, 1, 2, 30)) + data[end:]


def _move(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = _span(data, rng)
    rest = data[:start] + data[end:]
    at = rng.randint(0, len(rest))
    return rest[:at] + data[start:end] + rest[at:]


def _splice(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others) if others else data
    start, end = _span(other, rng)
    first, last = _span(data, rng)
    return data[:first] + other[start:end] + data[last:]


def _cross(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others) if others else data
    return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]


def _cut(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    return data[: rng.randint(0, len(data))]


def _nest(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    if rng.random() < 0.9:  # the deepest ones are slow
        return data
    start, end = _span(data, rng)
    depth = rng.choice(_NESTING)
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'{"content":[', b"]}")))
    return data[:start] + opening * depth + data[start:end] + closing * depth + data[end:]


_Damage = Callable[[bytes, random.Random, Sequence[bytes]], bytes]

_DAMAGES: Sequence[_Damage] = (
    *(_flip, _replace, _insert, _noise, _delete, _repeat, _move),
    *(_splice, _cross, _cut, _nest),
)
