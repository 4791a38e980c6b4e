"""The script's text: whole, tidy, and with no name that it does not declare."""

import re
import struct
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest
import redis

import envoy_tokenpools
from envoy_tokenpools.store.redis import script as script_module
from envoy_tokenpools.store.redis import store, wire
from envoy_tokenpools.store.redis.script import KEY_NAMES, script
from tests.support.shared_redis import shared_server

FOLDER = Path(str(files("envoy_tokenpools.store.redis").joinpath("lua")))

TEXTS = {path.stem: path.read_text("utf-8") for path in sorted(FOLDER.glob("*.lua"))}

PACKAGE = Path(envoy_tokenpools.__file__).parent

MOST_BYTES = 100_000
"""It is sent whole to a server that does not know it."""


def code_of(text: str) -> str:
    """Without comments."""
    return re.sub(r"--[^\n]*", "", re.sub(r"--\[\[.*?\]\]", "", text, flags=re.DOTALL))


CODE = {name: code_of(text) for name, text in TEXTS.items()}


def words(text: str) -> set[str]:
    """All names that stand in it."""
    return set(re.findall(r"\w+", text))


def test_every_file_is_in_the_script_once() -> None:
    """In an order in which nothing is used before it stands there, which the server would refuse."""
    assert sorted(script_module._FILES) == sorted(TEXTS)
    places = [script().index(TEXTS[name]) for name in script_module._FILES]
    assert places == sorted(places)


def test_every_file_says_first_what_it_is() -> None:
    """A comment at its head."""
    for name, text in TEXTS.items():
        assert text.startswith("--[[\n"), name
        head = text.partition("]]")[0].splitlines()
        assert head[1][0].isalpha(), name
        assert text.endswith("\n"), name
        assert not re.search(r"[ \t]+$", text, re.MULTILINE), name


def test_every_file_that_a_comment_names_exists() -> None:
    """What mirrors another file is found from it."""
    for name, text in TEXTS.items():
        for named in re.findall(r"`([\w/]+\.(?:py|lua))`", text):
            found = [PACKAGE / named, FOLDER / named, FOLDER.parent / named]
            assert any(path.exists() for path in found), f"{name}.lua: {named}"


def test_operations_are_described_by_their_files() -> None:
    """Each with its arguments and its reply; what the store asks is what there is."""
    defined: list[str] = []
    for name, text in TEXTS.items():
        mine = re.findall(r"^operations\.(\w+) = function", text, re.MULTILINE)
        defined += mine
        head = text.partition("]]")[0]
        for operation in mine:
            part = head.partition(f"\n{operation}: ")[2]
            assert part, f"{name}.lua: {operation}"
            assert part.index("Arguments: ") < part.index("Reply: "), operation
    assert len(set(defined)) == len(defined)
    asked = "".join(Path(str(each.__file__)).read_text() for each in (wire, store))
    assert set(re.findall(r'\(\s*"(\w+)"', asked)) & set(defined) == set(defined)


def test_every_constant_is_used() -> None:
    """Where the rules are; and they are whole numbers that a number of Lua can hold."""
    used = set[str]().union(*map(words, CODE.values()))
    for name, value in script_module._CONSTANTS.items():
        assert name in used
        assert isinstance(value, int)
        assert 0 < value <= wire.MOST
        assert f"local {name} = {value}\n" in script()


def test_every_key_is_used_and_no_other() -> None:
    """By its name; none is made of what a caller says."""
    used = set(re.findall(r"KEY\.(\w+)", "".join(CODE.values())))
    assert used == set(KEY_NAMES)
    assert len(KEY_NAMES) == len(set(KEY_NAMES))
    for name, code in CODE.items():
        assert not re.search(
            r"call\('\w+', (?!KEY\.|request\.channel|unpack\(KEYS\)|TIME)", code
        ), name


def test_the_script_is_not_long() -> None:
    """Neither in bytes nor, as Lua allows, in names at its top: 200, and some are left for those to come."""
    assert len(script().encode()) < MOST_BYTES
    at_the_top = re.findall(r"^local (?:function )?([\w, ]+)", code_of(script()), re.MULTILINE)
    assert sum(names.count(",") + 1 for names in at_the_top) < 150
    assert script() is script()


# Global names, as the compiler sees them


@dataclass(frozen=True, slots=True)
class Globals:
    """Names that a program reads and writes without having declared them."""

    read: frozenset[str]
    written: frozenset[str]


class Chunk:
    """A program as Lua 5.1 has compiled it."""

    GET, SET = 5, 7
    """Numbers of the instructions that read and write a global; their last 18 bits name it."""

    def __init__(self, dumped: bytes) -> None:
        signature, version, _, order, *sizes = struct.unpack_from("<4s8B", dumped)
        assert (signature, version, order) == (b"\x1bLua", 0x51, 1)
        self._int, self._size, *_ = sizes
        self._dumped = dumped
        self._at = 12
        self._read: set[str] = set()
        self._written: set[str] = set()

    def globals(self) -> Globals:
        """Of all its functions."""
        self._function()
        assert self._at == len(self._dumped)
        return Globals(frozenset(self._read), frozenset(self._written))

    def _number(self, size: int) -> int:
        self._at += size
        return int.from_bytes(self._dumped[self._at - size : self._at], "little")

    def _text(self) -> str:
        length = self._number(self._size)
        self._at += length
        return self._dumped[self._at - length : self._at].rstrip(b"\0").decode()

    def _constant(self) -> str | None:
        kind = self._number(1)
        if kind == 4:
            return self._text()
        self._at += {0: 0, 1: 1, 3: 8}[kind]
        return None

    def _function(self) -> None:
        self._text()
        self._at += 2 * self._int + 4
        code = [self._number(4) for _ in range(self._number(self._int))]
        constants = [self._constant() for _ in range(self._number(self._int))]
        for instruction in code:
            name = (
                constants[instruction >> 14] if instruction & 63 in (self.GET, self.SET) else None
            )
            if name is not None:
                (self._read if instruction & 63 == self.GET else self._written).add(name)
        for _ in range(self._number(self._int)):
            self._function()
        for width in (
            4,
            None,
            0,
        ):  # lines; names of locals and where they live; names of what is above
            for _ in range(self._number(self._int)):
                if width == 4:
                    self._at += width
                    continue
                self._text()
                self._at += 2 * self._int if width is None else 0


def globals_of(text: str) -> Globals:
    """What the server's compiler makes of it."""
    with redis.Redis.from_url(shared_server()) as server:
        dumped = server.eval("return string.dump(assert(loadstring(ARGV[1])))", 0, text)
    assert isinstance(dumped, bytes)
    return Chunk(dumped).globals()


ALLOWED = {
    *("redis", "cmsgpack", "KEYS", "ARGV", "math", "string", "table"),
    *("ipairs", "pairs", "tonumber", "unpack"),
}
"""What the server offers, and the script needs."""


def test_no_name_is_global() -> None:
    """Neither written, which the server refuses when it happens, nor read in vain: every name is declared."""
    found = globals_of(script())
    assert found.written == set()
    assert found.read == ALLOWED


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("local a = 1; return a", Globals(frozenset(), frozenset())),
        ("b = a", Globals(frozenset("a"), frozenset("b"))),
        (
            "local function f() local x = true; return function() c = x; return 'd', 1.5, nil end end",
            Globals(frozenset(), frozenset("c")),
        ),
    ],
)
def test_globals_are_found(text: str, expected: Globals) -> None:
    """Wherever they stand."""
    assert globals_of(text) == expected
