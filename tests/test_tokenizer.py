"""Behaviour of the vocabularies and of the counter."""

import asyncio
import gzip
import importlib.util
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, get_args

import pytest
import tiktoken.load
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools import tokenizer
from envoy_tokenpools.config import shape
from envoy_tokenpools.errors import VocabularyError
from envoy_tokenpools.tokenizer import (
    FALLBACK_PIECE_CHARS,
    INLINE_LIMIT_CHARS,
    LONGEST_PIECE_CHARS,
    PIECE_CHARS,
    TEXT_OVERHEAD_CHARS,
    VOCABULARY_NAMES,
    TokenCounter,
    Vocabulary,
    load_vocabularies,
    pieces,
)

PROSE = "The quick brown fox jumps over the lazy dog; 42 times, said Alice's neighbour.\n你好 "
VOCABULARIES = load_vocabularies(VOCABULARY_NAMES)
CL100K, O200K = (VOCABULARIES[name] for name in VOCABULARY_NAMES)


def prose(chars: int) -> str:
    """Ordinary text of this many characters."""
    return (PROSE * (chars // len(PROSE) + 1))[:chars]


@pytest.fixture
def counter() -> Iterator[TokenCounter]:
    """A counter with one thread, so that turns have an order."""
    counter = TokenCounter(VOCABULARIES, workers=1)
    yield counter
    counter.close()


def test_both_vocabularies_are_the_official_ones() -> None:
    """The names, sizes and well-known ids are OpenAI's."""
    sizes = {"cl100k_base": 100_277, "o200k_base": 200_019}
    assert {name: entry._encoding.n_vocab for name, entry in VOCABULARIES.items()} == sizes
    assert [entry.name for entry in VOCABULARIES.values()] == list(sizes)
    assert CL100K._encoding.encode("hello world") == [15339, 1917]
    assert O200K._encoding.encode("hello world") == [24912, 2375]


def test_the_configuration_knows_the_same_vocabularies() -> None:
    """What a pool may name is what can be loaded."""
    assert get_args(shape.Vocabulary) == VOCABULARY_NAMES


@pytest.mark.parametrize(
    ("text", "cl100k", "o200k"),
    [
        ("", 0, 0),
        ("Hello world", 2, 2),
        ("Hello world, how are you today?", 8, 8),
        ("123456", 2, 2),
        ("Hello 你好 world", 5, 4),
    ],
)
def test_ordinary_texts(text: str, cl100k: int, o200k: int) -> None:
    """Counts are those of tiktoken."""
    assert (CL100K.count(text), O200K.count(text)) == (cl100k, o200k)


@pytest.mark.parametrize(
    ("text", "cl100k", "o200k"),
    [
        ("<|endoftext|>", 7, 7),
        ("<|fim_prefix|>", 7, 6),
        ("<|endofprompt|>", 7, 7),
        ("<|im_start|>system\nYou are root<|im_end|>", 17, 17),
        ("Tell me about <|endoftext|> please", 10, 11),
    ],
)
def test_special_tokens_are_ordinary_text(text: str, cl100k: int, o200k: int) -> None:
    """Text that spells a special token costs what it has characters for, short or long."""
    assert (CL100K.count(text), O200K.count(text)) == (cl100k, o200k)
    repeated = f"{text}\n" * 1_000
    alone = O200K._encoding.encode_ordinary(repeated)
    assert O200K.count(repeated) == len(alone) > 1_000


@pytest.mark.parametrize(
    ("character", "times", "cl100k", "o200k"),
    [
        ("a", 100_000, 12_500, 12_500),
        ("_", 50_000, 782, 782),
        ("^", 1_000_000, 250_000, 125_000),
        ("0", 1_000_000, 333_334, 333_334),
        ("中", 300_000, 300_000, 300_000),
        ("👍", 300_000, 900_000, 300_000),
        (" ", 999_998, 7_813, 7_813),
    ],
)
def test_long_runs_are_exact(character: str, times: int, cl100k: int, o200k: int) -> None:
    """A run that cannot be cut is counted whole."""
    text = character * times
    assert (CL100K.count(text), O200K.count(text)) == (cl100k, o200k)


@pytest.mark.parametrize(
    ("vocabulary", "text", "chars_per_token"),
    [
        (O200K, " " * 999_999, 128),
        (O200K, "\t" * 999_999, 16),
        (O200K, "\u00a0" * 999_999, 8),
        (O200K, "\u3000" * 999_999, 16),
        (CL100K, " " * 999_999 + "x", 128),
        (O200K, " " * 2_500_000, 128),
    ],
)
def test_endless_runs_do_not_panic(
    vocabulary: Vocabulary, text: str, chars_per_token: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where the regex engine gives up, pieces are counted, and nothing is printed."""
    least = len(text) // chars_per_token
    assert least <= vocabulary.count(text) <= least + 2 * len(text) // FALLBACK_PIECE_CHARS
    assert capfd.readouterr() == ("", "")


def test_lone_surrogates_are_counted() -> None:
    """Half a character counts as the replacement character, and both halves as the whole."""
    for vocabulary in VOCABULARIES.values():
        assert vocabulary.count("a\ud800b") == vocabulary.count("a\ufffdb")
        assert vocabulary.count("\ud83d\udc4d") == vocabulary.count("👍")
        assert vocabulary.count("\udc00" * 5_000) == vocabulary.count("\ufffd" * 5_000)


# Everything the patterns tell apart: cases, digits, marks, blanks, line breaks, punctuation.
NASTY_CHARACTERS = "aZ7'/.^,:(]<|\u3002\uff01_ \t\n\r\x0b\x1c\x85\u00a0\u3000\u0301\u01c5\u02b0\u0663\u4e2d\U0001f44d"
NASTY_STRINGS = "'s", "'LL", "  ", "\r\n", " \n", "\n\n", "\n/", "<|endoftext|>", "word", " word"
NASTY = st.lists(st.sampled_from([*NASTY_CHARACTERS, *NASTY_STRINGS]), max_size=60).map("".join)


@given(st.one_of(NASTY, st.text(max_size=60)), st.integers(1, 20))
def test_pieces_count_what_the_whole_counts(text: str, piece_chars: int) -> None:
    """Texts are only cut where no token lies across."""
    parts = list(pieces(text, piece_chars))
    assert "".join(parts) == text
    for vocabulary in VOCABULARIES.values():
        assert sum(map(vocabulary.count, parts)) == vocabulary.count(text)


def test_prose_is_cut_into_pieces() -> None:
    """Long prose makes pieces of about the wanted length, which count what it counts whole."""
    text = prose(1_000_000)
    lengths = [len(piece) for piece in pieces(text)]
    assert len(lengths) == 16
    assert all(PIECE_CHARS <= length <= PIECE_CHARS + 100 for length in lengths[:-1])
    for vocabulary in VOCABULARIES.values():
        assert vocabulary.count(text) == len(vocabulary._encoding.encode_ordinary(text))


def test_runs_are_cut_only_at_the_longest_piece() -> None:
    """Text without a place to cut stays whole up to the bound."""
    assert [len(piece) for piece in pieces("a" * 2_500_000)] == [
        LONGEST_PIECE_CHARS,
        LONGEST_PIECE_CHARS,
        500_000,
    ]
    assert [len(piece) for piece in pieces("a" * 900_000 + " b" * 50_000)] == [
        14 * PIECE_CHARS,
        PIECE_CHARS,
        16_960,
    ]


@given(st.text(min_size=200, max_size=400))
def test_a_repeated_text_counts_the_same(text: str) -> None:
    """A remembered count is the count."""
    first = Vocabulary(O200K._encoding)
    assert first.count(text) == first.count("".join(text)) == O200K.count(text)


def test_recent_counts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is used stays, what two generations have not used goes."""
    monkeypatch.setattr(tokenizer, "REMEMBERED_COUNTS", 10)
    recent = tokenizer._RecentCounts()
    recent.put(-1, 7)
    recent.put(-2, 8)
    for key in range(100):
        recent.put(key, key)
        assert recent.get(-1) == 7
    assert recent.get(-2) is None
    assert recent.get(99) == 99
    assert sum(recent.get(key) is not None for key in range(100)) <= 20


def test_loading_needs_neither_network_nor_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No socket, no file written, and the wheel's compiled module is not imported."""

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise AssertionError("tiktoken's own loader was used")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(tiktoken.load, "read_file_cached", refuse)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delitem(sys.modules, "bpe_openai", raising=False)
    loaded = load_vocabularies(["cl100k_base", "cl100k_base"])
    assert {name: entry.count("Hello world") for name, entry in loaded.items()} == {
        "cl100k_base": 2
    }
    assert list(tmp_path.iterdir()) == []
    assert "bpe_openai" not in sys.modules


def installed(name: str) -> bytes:
    """The compressed file of a vocabulary as it is installed."""
    data = tokenizer._installed_data()
    return (data / f"{name}.tiktoken.gz").read_bytes()


@pytest.mark.parametrize("position", [0, 2, 5_000, -5, -1])
def test_a_flipped_byte_is_an_error(position: int, tmp_path: Path) -> None:
    """Damage anywhere in the file is told at start with what to do."""
    damaged = bytearray(installed("cl100k_base"))
    damaged[position] ^= 0x41
    (tmp_path / "cl100k_base.tiktoken.gz").write_bytes(damaged)
    with pytest.raises(VocabularyError, match=r"cl100k_base is damaged .* reinstall both"):
        load_vocabularies(["cl100k_base"], data=tmp_path)


@pytest.mark.parametrize("content", [b"", gzip.compress(b"IQ== 0\n"), b"x" * 100])
def test_another_file_is_an_error(content: bytes, tmp_path: Path) -> None:
    """An empty, foreign or smaller file under the right name is refused."""
    (tmp_path / "o200k_base.tiktoken.gz").write_bytes(content)
    with pytest.raises(VocabularyError, match="o200k_base is damaged"):
        load_vocabularies(["o200k_base"], data=tmp_path)


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    """Half a file is refused."""
    content = installed("cl100k_base")
    (tmp_path / "cl100k_base.tiktoken.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(VocabularyError, match="cl100k_base is damaged"):
        load_vocabularies(["cl100k_base"], data=tmp_path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """A missing file names the package that should have it."""
    with pytest.raises(VocabularyError, match=r"missing from the package bpe-openai: install"):
        load_vocabularies(["o200k_base"], data=tmp_path)


def test_a_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheel the error says how to get it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(VocabularyError, match="pip install bpe-openai"):
        load_vocabularies(["o200k_base"])


def test_an_unknown_vocabulary_is_an_error() -> None:
    """Other names are refused, with the ones that are known."""
    with pytest.raises(VocabularyError, match="'gpt2'; known: cl100k_base, o200k_base"):
        load_vocabularies(["gpt2"])


async def test_small_texts_are_counted_at_once(counter: TokenCounter) -> None:
    """Texts up to the limit, all together and with their overhead, need no thread."""
    room = INLINE_LIMIT_CHARS - 2 * TEXT_OVERHEAD_CHARS
    texts = [prose(room - 100), prose(100)]
    expected = O200K.count(texts[0]) + O200K.count(texts[1])
    assert counter.count_now("o200k_base", texts) == expected
    assert await counter.count("o200k_base", texts) == expected
    assert counter.count_now("o200k_base", []) == 0
    assert counter.count_now("o200k_base", [*texts, ""]) is None
    assert counter.count_now("o200k_base", [prose(room - 99), prose(100)]) is None


async def test_many_empty_texts_are_not_small(counter: TokenCounter) -> None:
    """Calls cost time too: a long list is no inline work, whatever it holds."""
    texts = [""] * (INLINE_LIMIT_CHARS // TEXT_OVERHEAD_CHARS + 1)
    assert counter.count_now("o200k_base", texts) is None
    assert await counter.count("o200k_base", texts) == 0


@pytest.mark.parametrize(
    "texts",
    [
        [prose(1_000_000)],
        [prose(50_000), "", prose(200_000), "hi"],
        ["a"] * 10_000,
        ["0" * 300_000, "Hello world"],
    ],
)
async def test_large_texts_count_the_same(counter: TokenCounter, texts: list[str]) -> None:
    """Threads and pieces change no count."""
    for name, vocabulary in VOCABULARIES.items():
        assert counter.count_now(name, texts) is None
        assert await counter.count(name, texts) == vocabulary.count_all(texts)


async def test_the_event_loop_keeps_running(counter: TokenCounter) -> None:
    """While megabytes are counted, other tasks have their turns."""
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(take_turns())
    texts = ["^" * 1_000_000], ["👍" * 300_000], [prose(1_000_000)]
    totals = await asyncio.gather(*(counter.count("o200k_base", text) for text in texts))
    other.cancel()
    assert totals[:2] == [125_000, 300_000]
    assert turns > 100


async def test_a_middling_text_overtakes_huge_ones(counter: TokenCounter) -> None:
    """Counts take turns by pieces, so what needs few of them is done first."""
    done: list[str] = []

    async def count(name: str, chars: int) -> None:
        await counter.count("o200k_base", [prose(chars)])
        done.append(name)

    huge = [asyncio.create_task(count(f"huge-{n}", 1_000_000)) for n in range(5)]
    await asyncio.sleep(0)
    await asyncio.gather(count("middling", 100_000), *huge)
    assert done[0] == "middling"


async def test_a_middling_text_does_not_wait_for_runs(counter: TokenCounter) -> None:
    """What cannot be cut queues by itself."""
    runs = [asyncio.create_task(counter.count("o200k_base", ["^" * 500_000])) for _ in range(5)]
    await asyncio.sleep(0)
    assert await counter.count("o200k_base", ["0123456789 " * 10_000]) == 50_000
    assert not runs[-1].done()
    assert await asyncio.gather(*runs) == [62_500] * 5


async def test_a_cancelled_count_gives_its_thread_back(counter: TokenCounter) -> None:
    """Who stops waiting leaves the queue, and the next one is served."""
    gone = [asyncio.create_task(counter.count("o200k_base", [prose(1_000_000)])) for _ in range(20)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.wait(gone)
    assert all(task.cancelled() for task in gone)
    assert await counter.count("o200k_base", ["0" * 90_000]) == 30_000


async def test_a_closed_counter_still_counts_what_is_small(counter: TokenCounter) -> None:
    """Closing ends the threads only."""
    counter.close()
    assert await counter.count("o200k_base", ["Hello world"]) == 2
    with pytest.raises(RuntimeError):
        await counter.count("o200k_base", [prose(100_000)])


async def test_only_known_vocabularies_count(counter: TokenCounter) -> None:
    """A name that was not loaded is a programming error."""
    with pytest.raises(KeyError):
        counter.count_now("gpt2", ["hi"])
