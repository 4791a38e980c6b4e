"""
What the server that keeps a pool's books was asked, told by that server itself.

A Redis that was sent MONITOR tells each call, and whatever the script then writes, in the one order in which all of it
happened. The reply is among what the script writes, so that the pool is known before and after every single operation,
also where several come in one call.
"""

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil

from envoy_tokenpools.config import Address, parse_address
from envoy_tokenpools.core.tick import Standing
from envoy_tokenpools.store.base import TickReading
from envoy_tokenpools.store.redis.script import KEY_NAMES, pool_keys
from envoy_tokenpools.store.redis.wire import (
    Answer,
    Operation,
    decode_answers,
    read_meters,
    read_standing,
)

_LINE = re.compile(rb"\+(\d+\.\d+) \[\d+ ([^\]]+)\] (.*)", re.DOTALL)
_WORD = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_SCRIPT = b"lua"

_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode
_decode_remembered = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw]).decode
_decode_operations = msgspec.msgpack.Decoder(list[list[Any]]).decode


@dataclass(frozen=True, slots=True)
class Call:
    """
    One call that was done.

    Attributes:
        at_s: the server's time, in seconds since the epoch.
        client: address from which it came.
        owner: the replica that sent it.
        operations: what it asked.
        answers: to each of them.
        page: the pool afterwards.
        peak: the most sequences that the leases in the books held at any instant of it.
    """

    at_s: float
    client: str
    owner: str
    operations: Sequence[Operation] = field(repr=False)
    answers: Sequence[Answer] = field(repr=False)
    page: Mapping[str, Any] = field(repr=False)
    peak: int


@dataclass(frozen=True, slots=True)
class Step:
    """One operation with its answer, and how many sequences were in use just before it."""

    call: Call
    operation: Operation
    answer: Answer
    in_use: int

    @property
    def name(self) -> str:
        """Which operation it is."""
        name: str = self.operation[0]
        return name


@dataclass(frozen=True, slots=True)
class Publication:
    """
    What came of a tick.

    Attributes:
        at_s: the server's time.
        owner: the replica that put it in force.
        version: one more with each publication.
        number: of the tick.
        reading: that of the tick which it was made of; None if it was made of none.
        standings: of each entitlement.
    """

    at_s: float
    owner: str
    version: int
    number: int
    reading: TickReading | None
    standings: Mapping[str, Standing]


class PoolLog:
    """All calls about one pool since the log was opened; see `pool_log`."""

    def __init__(self, address: Address, pool: str) -> None:
        self._address = address
        names = (key.encode() for key in pool_keys(address.prefix, pool))
        self._key = dict(zip(KEY_NAMES, names, strict=True))
        self._told = bytearray()
        self._grown = asyncio.Event()
        self._calls: list[Call] = []
        self._asked: tuple[float, str, list[bytes]] | None = None
        self._page = b""
        self._leases: dict[bytes, int] = {}
        self._peak = 0

    async def listen(self, reader: asyncio.StreamReader) -> None:
        """Take in what is told."""
        while data := await reader.read(1 << 20):
            self._told += data
            self._grown.set()

    async def now_s(self) -> float:
        """The server's time, by which all of this is dated."""
        async with _connected(self._address) as (reader, writer):
            writer.write(b"TIME\r\n")
            lines = [await reader.readline() for _ in range(5)]
            return int(lines[2]) + int(lines[4]) / 1_000_000

    async def calls(self) -> Sequence[Call]:
        """All that were done by now."""
        await self._catch_up()
        end = self._told.rfind(b"\r\n") + 2
        for line in bytes(self._told[:end]).split(b"\r\n"):
            parts = _LINE.fullmatch(line)
            if parts is not None:
                self._read(float(parts[1]), parts[2], parts[3])
        del self._told[:end]
        return self._calls

    async def _catch_up(self) -> None:
        """Whatever was done before a word of ours was told is told before it."""
        word, start = secrets.token_hex(8).encode(), len(self._told)
        async with _connected(self._address) as (_, writer):
            writer.write(b"ECHO %b\r\n" % word)
            while self._told.find(word, start) < 0:
                self._grown.clear()
                await self._grown.wait()

    def _read(self, at_s: float, source: bytes, text: bytes) -> None:
        if source != _SCRIPT:
            self._asked = None
            if text[:5] == b'"EVAL' and self._key["pool"] in text:
                self._asked = (at_s, source.decode(), _words(text))
                self._peak = sum(self._leases.values())
        elif self._asked is not None and text.startswith((b'"SET"', b'"HSET"', b'"HDEL"')):
            self._written(_words(text), *self._asked)

    def _written(self, words: list[bytes], at_s: float, client: str, asked: list[bytes]) -> None:
        """Something that the script wrote for a call; last of all its reply."""
        match words:
            case [b"SET", key, text] if key == self._key["pool"]:
                self._page = text
            case [b"HSET", key, lease_id, lease] if key == self._key["leases"]:
                self._leases[lease_id] = _decode(lease)["concurrency"]
                self._peak = max(self._peak, sum(self._leases.values()))
            case [b"HDEL", key, lease_id] if key == self._key["leases"]:
                del self._leases[lease_id]
            case [b"HSET", key, owner, remembered] if key == self._key["replies"]:
                operations = _decode_operations(asked[-1])
                _, answers = decode_answers(_reply(remembered), len(operations))
                page, name = _decode(self._page), owner.decode()
                call = Call(at_s, client, name, operations, answers, page, self._peak)
                assert call.page["in_flight"] == len(self._leases), call
                assert call.page["concurrency"] == sum(self._leases.values()), call
                self._calls.append(call)


@contextlib.asynccontextmanager
async def _connected(
    address: Address,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address.hosts[0])
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def pool_log(url: str, pool: str) -> AsyncIterator[PoolLog]:
    """The log of a pool that nobody has used before, in the books at `url`."""
    address = parse_address(url)
    log = PoolLog(address, pool)
    async with _connected(address) as (reader, writer):
        writer.write(b"MONITOR\r\n")
        assert await reader.readline() == b"+OK\r\n"
        listening = asyncio.create_task(log.listen(reader))
        try:
            yield log
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


def owner_of(calls: Sequence[Call], process: psutil.Process) -> str:
    """Under which name a replica that runs is known in the books."""
    ends = {f"{one.laddr.ip}:{one.laddr.port}" for one in process.net_connections("tcp")}
    return next(call.owner for call in reversed(calls) if call.client in ends)


def steps(calls: Sequence[Call]) -> Iterator[Step]:
    """
    Every operation, by what was answered: a second account of the pool, beside what the script wrote.

    Both have to agree after each call.
    """
    held: dict[str, int] = {}
    for call in calls:
        for operation, answer in zip(call.operations, call.answers, strict=True):
            yield Step(call, operation, answer, sum(held.values()))
            _follow(held, operation, answer)
        assert sum(held.values()) == call.page["concurrency"], call
        assert len(held) == call.page["in_flight"], call


def _follow(held: dict[str, int], operation: Operation, answer: Answer) -> None:
    """Keep account of who holds how many sequences."""
    match operation[0]:
        case "reserve" if answer[0]:
            held[operation[1]] = answer[0][5]
        case "settle" if answer and not answer[3]:
            del held[operation[1]]
        case "sweep":
            for lease in answer:
                del held[lease[0]]
        case "restore":
            for lease, _ in operation[1]:
                held[lease[0]] = lease[5]


def publications(calls: Sequence[Call]) -> list[Publication]:
    """What was put in force, one after the other."""
    found: list[Publication] = []
    readings: dict[str, TickReading] = {}
    for step in steps(calls):
        owner = step.call.owner
        match step.name:
            case "close_tick" if step.answer:
                readings[owner] = TickReading(step.answer[1], read_meters(step.answer[2]))
            case "publish" if isinstance(step.answer, int):
                _, _, number, base, *_, entries = step.operation
                standings = dict(found[-1].standings) if base >= 0 else {}
                standings |= {name: read_standing(text)[0] for name, text, _ in entries}
                reading = readings.pop(owner, None)
                found.append(
                    Publication(step.call.at_s, owner, step.answer, number, reading, standings)
                )
    return found


def _words(text: bytes) -> list[bytes]:
    """The words of a command, as they were sent."""
    return [
        word.decode("unicode_escape").encode("latin-1") if b"\\" in word else word
        for word in _WORD.findall(text)
    ]


def _reply(page: bytes) -> bytes:
    """In what the script remembers of a call: a text that need not be UTF-8, behind its length."""
    reply = bytes(_decode_remembered(page)[1])
    return reply[{0xD9: 2, 0xDA: 3, 0xDB: 5}.get(reply[0], 1) :]
