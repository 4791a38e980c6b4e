"""
Counts the tokens of texts, exactly as tiktoken does, offline and without holding up the event loop.

The vocabularies come from the wheel `bpe-openai`; tiktoken would download them. Long texts are
counted in pieces cut where no token can lie across, on a few threads (tiktoken releases the
GIL), one piece per turn, so that a huge prompt delays a middling one by a piece, not by itself.
What cannot be cut has a thread of its own.
"""

import asyncio
import base64
import gzip
import hashlib
import importlib.resources
import importlib.util
import re
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources.abc import Traversable
from typing import Final

import tiktoken
from tiktoken_ext import openai_public

from envoy_tokenpools.errors import VocabularyError

VOCABULARY_NAMES: Final = ("cl100k_base", "o200k_base")

# Prose of this length is counted in 1 to 2 ms, the worst text in 8 ms: up to here a turn of
# the event loop is cheaper than two thread switches.
INLINE_LIMIT_CHARS: Final = 32 * 1_024
# What a call costs beside its characters, in characters (1 us): a list of empty texts is work.
TEXT_OVERHEAD_CHARS: Final = 32
# A piece is counted in 3 to 5 ms of prose, 20 ms at worst.
PIECE_CHARS: Final = 64 * 1_024
# How far a cut is looked for before the piece is made longer; prose has one every 6 characters.
CUT_WINDOW_CHARS: Final = 1_024
# A text without any place to cut stays whole up to here, and so exact; more than this much in
# one run exhausts tiktoken's regex engine (from 999,999 on).
LONGEST_PIECE_CHARS: Final = 1_000_000
# Pieces for a text that the regex engine refused: too short to exhaust it, and each cut
# adds at most a token or two.
FALLBACK_PIECE_CHARS: Final = 100_000
# `encode` raises where `encode_ordinary` panics, for 1 us more; no text this short does either.
ORDINARY_CHARS: Final = 4_096

# More threads would only take the processor from the event loop and from Envoy.
WORKERS: Final = 2
# A piece that found no cut once takes long (0.5 s at worst), so it queues with its like only.
LONG_RUN_CHARS: Final = 2 * PIECE_CHARS

# Chat requests repeat system prompts and history. A look-up costs what 10 characters cost.
REMEMBERED_CHARS: Final = range(256, INLINE_LIMIT_CHARS + 1)
# Two generations of this many counts are 4 MB.
REMEMBERED_COUNTS: Final = 16_384

# Where a token starts in both vocabularies' patterns, whatever is before and behind: a blank after
# a non-blank; what follows a line break, unless it is a blank or a slash; these marks, ASCII and
# CJK, after a letter or digit.
_SAFE_CUT: Final = re.compile(
    r"(?<=\S) "
    r"|(?<=\n)[^\s/]"
    r"|(?<=[^\W_])[\]\[(){}<>,.;:!?\"=&|\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f]"
)


class Vocabulary:
    """One vocabulary. Counting is thread-safe."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding
        self._recent = _RecentCounts()

    @property
    def name(self) -> str:
        """The name that a pool's `tokenizer` gives."""
        return self._encoding.name

    def count(self, text: str) -> int:
        """
        The number of tokens of `text`.

        Text that spells a special token is ordinary text. Exact for any text up to a million
        characters except runs of one kind of blank near that length, which are counted in
        pieces; above that, each further million may add a token or two.
        """
        if len(text) <= PIECE_CHARS:
            return self._count_piece(text)
        return sum(map(self._count_piece, pieces(text)))

    def count_all(self, texts: Iterable[str]) -> int:
        """The sum of the counts of `texts`, each by itself."""
        return sum(map(self.count, texts))

    def _count_piece(self, text: str) -> int:
        if len(text) not in REMEMBERED_CHARS:
            return self._encoded_length(text)
        # Only the hash is kept, never a prompt. Python keys it per process.
        key = hash(text)
        count = self._recent.get(key)
        if count is None:
            count = self._encoded_length(text)
            self._recent.put(key, count)
        return count

    def _encoded_length(self, text: str) -> int:
        if len(text) <= ORDINARY_CHARS:
            return len(self._encoding.encode_ordinary(text))
        try:
            return len(self._encoding.encode(text, disallowed_special=()))
        except ValueError:
            return sum(
                len(self._encoding.encode(part, disallowed_special=()))
                for part in _slices(text, FALLBACK_PIECE_CHARS)
            )


class _RecentCounts:
    """
    Counts by the hash of their text; what two generations have not used is forgotten.

    Each step is one operation of a dict: threads that meet here lose an entry at worst.
    """

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def get(self, key: int) -> int | None:
        count = self._young.get(key)
        if count is None:
            count = self._old.get(key)
            if count is not None:
                self.put(key, count)
        return count

    def put(self, key: int, count: int) -> None:
        if len(self._young) >= REMEMBERED_COUNTS:
            self._old, self._young = self._young, {}
        self._young[key] = count


class TokenCounter:
    """
    Counts for the event loop: small texts at once, large ones on threads.

    Use from one event loop; `close` ends the threads.
    """

    def __init__(self, vocabularies: Mapping[str, Vocabulary], *, workers: int = WORKERS) -> None:
        self._vocabularies = vocabularies
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenizer")
        self._long_runs = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long-runs")

    def count_now(self, vocabulary: str, texts: Sequence[str]) -> int | None:
        """The number of tokens of all `texts`, or None when they are too large to do it here."""
        if len(texts) * TEXT_OVERHEAD_CHARS > INLINE_LIMIT_CHARS:
            return None
        if sum(map(len, texts)) + len(texts) * TEXT_OVERHEAD_CHARS > INLINE_LIMIT_CHARS:
            return None
        return self._vocabularies[vocabulary].count_all(texts)

    async def count(self, vocabulary: str, texts: Sequence[str]) -> int:
        """
        The number of tokens of all `texts`.

        Cancelling stops it after the piece that is being counted.

        Raises:
            KeyError: no vocabulary has this name.
            RuntimeError: the counter is closed, and the texts are large.
        """
        total = self.count_now(vocabulary, texts)
        if total is not None:
            return total
        count_all = self._vocabularies[vocabulary].count_all
        loop = asyncio.get_running_loop()
        total = 0
        for batch in _batches(texts):
            is_long = len(batch[-1]) > LONG_RUN_CHARS
            threads = self._long_runs if is_long else self._threads
            total += await loop.run_in_executor(threads, count_all, batch)
        return total

    def close(self) -> None:
        """End the threads; counts that wait for one are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._long_runs.shutdown(wait=False, cancel_futures=True)


def pieces(text: str, piece_chars: int = PIECE_CHARS) -> Iterator[str]:
    """
    Cut `text` into pieces whose counts add up to its own.

    A piece has about `piece_chars` characters, or more where there is no place to cut; only
    one of `LONGEST_PIECE_CHARS` may end inside a token.
    """
    start = 0
    while len(text) - start > piece_chars:
        end = _cut(text, start, piece_chars)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _cut(text: str, start: int, piece_chars: int) -> int:
    """Where the piece that begins at `start` ends."""
    limit = min(len(text), start + LONGEST_PIECE_CHARS)
    for at in range(start + piece_chars, limit, piece_chars):
        match = _SAFE_CUT.search(text, at, min(at + CUT_WINDOW_CHARS, limit))
        if match is not None:
            return match.start()
    return limit


def _slices(text: str, size: int) -> Iterator[str]:
    return (text[start : start + size] for start in range(0, len(text), size))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """The pieces of `texts`, gathered until they are a piece's worth of work; a long one last."""
    batch: list[str] = []
    work = 0
    for text in filter(None, texts):
        for piece in pieces(text):
            batch.append(piece)
            work += len(piece) + TEXT_OVERHEAD_CHARS
            if work >= PIECE_CHARS:
                yield batch
                batch, work = [], 0
    if batch:
        yield batch


def load_vocabularies(
    names: Iterable[str], *, data: Traversable | None = None
) -> dict[str, Vocabulary]:
    """
    Build the named vocabularies (0.1 to 0.3 s each), without network, cache or temporary files.

    Args:
        names: of `VOCABULARY_NAMES`.
        data: where the files `NAME.tiktoken.gz` are, if not in the installed `bpe-openai`.

    Raises:
        VocabularyError: unknown, missing, or not the file that tiktoken's own hash stands for.
    """
    return {name: Vocabulary(_encoding(name, data)) for name in dict.fromkeys(names)}


def _encoding(name: str, data: Traversable | None) -> tiktoken.Encoding:
    """What tiktoken's own constructor builds, from ranks found here instead of downloaded."""
    if name not in VOCABULARY_NAMES:
        known = ", ".join(VOCABULARY_NAMES)
        raise VocabularyError(f"unknown vocabulary {name!r}; known: {known}")
    ranks = _compressed_ranks(name, _installed_data() if data is None else data)

    def load_tiktoken_bpe(_url: str, expected_hash: str) -> dict[bytes, int]:
        return _parse_ranks(name, ranks, expected_hash)

    constructor = openai_public.ENCODING_CONSTRUCTORS[name]
    local = types.FunctionType(
        constructor.__code__, constructor.__globals__ | {"load_tiktoken_bpe": load_tiktoken_bpe}
    )
    return tiktoken.Encoding(**local())


def _installed_data() -> Traversable:
    """The data folder of `bpe-openai`, whose compiled module (74 MB) is not imported for it."""
    spec = importlib.util.find_spec("bpe_openai")
    if spec is None:
        raise VocabularyError(
            "the vocabularies are missing: install the package bpe-openai (pip install bpe-openai)"
        )
    return importlib.resources.files(importlib.util.module_from_spec(spec)) / "data"


def _compressed_ranks(name: str, data: Traversable) -> bytes:
    try:
        return (data / f"{name}.tiktoken.gz").read_bytes()
    except OSError as error:
        raise VocabularyError(
            f"the file of vocabulary {name} is missing from the package bpe-openai: install a "
            "release that has it (pip install --force-reinstall 'bpe-openai>=0.1.4')"
        ) from error


def _parse_ranks(name: str, compressed: bytes, expected_hash: str) -> dict[bytes, int]:
    """Rank by token, from lines of a base64 token and its rank."""
    try:
        lines = gzip.decompress(compressed)
    except (OSError, EOFError, zlib.error):
        lines = b""
    if hashlib.sha256(lines).hexdigest() != expected_hash:
        raise VocabularyError(
            f"the file of vocabulary {name} is damaged or another version than tiktoken expects: "
            "reinstall both (pip install --force-reinstall bpe-openai tiktoken)"
        )
    return {
        base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines.splitlines())
    }
