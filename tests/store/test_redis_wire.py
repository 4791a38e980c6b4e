"""What is written for the script and read from it: exactly what was meant, and an error where it is anything else."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envoy_tokenpools.config import Address, Topology
from envoy_tokenpools.core.admission import Lease, Reason, Refusal, Resource, Settlement, Terms
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.ledger import LedgerView
from envoy_tokenpools.core.pool import Limits
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Standing, Tick
from envoy_tokenpools.errors import StoreError
from envoy_tokenpools.store.base import Opening, Renewal, Reply, Sight, Survivor, TickReading
from envoy_tokenpools.store.redis import wire
from envoy_tokenpools.store.redis.server import RedisServer
from envoy_tokenpools.store.redis.store import RedisStore
from envoy_tokenpools.store.redis.wire import WrongAnswerError
from tests.support.pools import amount, claim, cost, terms

# What there may be

NAMES = st.text(max_size=63) | st.sampled_from(["", "{}", "ünï {cödé}", "日本", "\x00", "🦆" * 15])

WHOLE = st.integers(0, wire.MOST) | st.sampled_from([0, wire.MOST, 1 << 53, (1 << 64) - 1])

ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)
"""Whatever MessagePack can say."""

COSTS = st.builds(Cost, WHOLE, WHOLE, WHOLE, WHOLE)

REFUSALS = st.builds(
    Refusal, st.sampled_from(Reason), st.sampled_from(Resource), WHOLE, WHOLE, WHOLE
)

LEASES = st.builds(
    Lease,
    lease_id=NAMES,
    entitlement=NAMES,
    cost=COSTS,
    within_share=st.booleans(),
    within_guarantee=st.booleans(),
    tokens_guaranteed=st.booleans(),
    pool_ppm=WHOLE,
    admitted_at_ms=WHOLE,
    expires_at_ms=WHOLE,
    eviction_rank=st.none() | st.integers(0, 9),
    shadowed=st.none() | REFUSALS,
)

BIG = st.integers(0, 10**40) | WHOLE

RESOURCES = st.builds(Resources, BIG, BIG, BIG)

FINITE = st.floats(allow_nan=False, allow_infinity=False)

STANDINGS = st.builds(Standing, debt=FINITE, burst=FINITE, weight=FINITE, demand=RESOURCES)

TERMS = st.builds(
    Terms,
    entitlement=NAMES,
    weight=FINITE,
    guarantee=RESOURCES,
    share=RESOURCES,
    limits=st.builds(Limits, st.none() | BIG, st.none() | BIG, st.none() | BIG),
    withheld_ppm=BIG,
    rank=BIG,
    evictable=st.booleans(),
    reach=st.none() | RESOURCES,
)


def passed(value: Any) -> Any:
    """What the other side reads."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def shown(lease: Lease) -> Any:
    """A lease as it is told, in both directions."""
    _, ((told, _),), _ = passed(wire.restore_operation([Survivor(lease, 0)], 0))
    return told


# Back as it was


@given(LEASES)
def test_a_lease_comes_back_as_it_was(lease: Lease) -> None:
    """Whoever it is of, and however much it reserves."""
    assert wire.read_lease(shown(lease)) == lease


@given(REFUSALS)
def test_a_refusal_comes_back_as_it_was(refusal: Refusal) -> None:
    """Whatever the reason and the resource."""
    told = (refusal.reason.value, refusal.resource.value)
    numbers = (refusal.need, refusal.available, refusal.retry_after_ms)
    assert wire.read_refusal(passed((*told, *numbers))) == refusal


@given(STANDINGS, TERMS)
def test_a_standing_and_its_terms_come_back_as_they_were(standing: Standing, each: Terms) -> None:
    """To the last bit of a debt, for others compute with it."""
    name, text, offered = passed(wire.publish_entry(standing, each, with_terms=False))
    assert (name, offered) == (each.entitlement, False)
    assert wire.read_standing(text) == (standing, each)


def test_no_limit_is_none() -> None:
    """In the terms that the script reads, where a limit of 0 is one."""
    for limits, told in (
        (Limits(), [-1, -1, -1]),
        (Limits(0, 0, 0), [0, 0, 0]),
        (Limits(None, 5, None), [-1, 5, -1]),
    ):
        entry = passed(wire.publish_entry(Standing(), terms(limits=limits), with_terms=True))
        assert entry[2][-1] == told


@pytest.mark.parametrize("tokens", [0, wire.MOST, wire.MOST + 1, 1 << 64, 10**30])
def test_more_than_a_number_of_the_script_can_hold_is_that_much(tokens: int) -> None:
    """A report is bounded anyway; it must not become another number on its way."""
    told = passed(wire.settle_operation("a", tokens))[2]
    assert told == min(tokens, wire.MOST)
    assert int(float(told)) == told


def test_a_fingerprint_is_told_as_a_word() -> None:
    """It has 63 bits, more than a number of the script can hold."""
    fingerprint = (1 << 63) - 1
    told = passed(
        wire.reserve_operation(claim("a", cost(), terms(), WIDE, fingerprint=fingerprint))
    )
    assert str(fingerprint) in told


# Anything else is an error


@given(st.binary() | ANY.map(msgspec.msgpack.encode), st.integers(0, 3))
def test_any_bytes_are_answers_or_an_error(reply: bytes, expected: int) -> None:
    """Never another exception."""
    with contextlib.suppress(WrongAnswerError):
        epoch, answers = wire.decode_answers(reply, expected)
        assert isinstance(epoch, str)
        assert len(answers) == expected


@given(ANY)
def test_what_is_not_bytes_is_an_error(reply: object) -> None:
    """A reply of another type than the script's, as a proxy may give."""
    if not isinstance(reply, bytes):
        with pytest.raises(WrongAnswerError, match=type(reply).__name__):
            wire.decode_answers(reply, 1)


@pytest.mark.parametrize(
    "reply",
    [
        b"\x92\xa1e" + b"\x91" * 100_000 + b"\xc0",
        b"\x92\xa1e\xdd\xff\xff\xff\xff",
        b"\x92\xa1e\x91\xc6\xff\xff\xff\xff",
        b"\x92\xa1\xff\x91\x01",
        b"\x92\xa1e\x91\xa1\xff",
        b"\x92\xa1e\x91\x01\x00",
        b"\x92\xa1e\x91\xc1",
        b"\x92\xa1e\x92\x01\x02",
        b"\x92\x01\x91\x01",
        b"",
    ],
)
def test_a_reply_that_is_none_is_an_error(reply: bytes) -> None:
    """Nested without end, longer than it is, in no alphabet, too short, too long."""
    with pytest.raises(WrongAnswerError):
        wire.decode_answers(reply, 1)


@given(st.binary() | ANY.map(msgspec.msgpack.encode))
def test_any_message_names_leases_or_none(message: bytes) -> None:
    """A channel is open to everybody: nothing that is said there ends the listening."""
    named = wire.decode_lease_ids(message)
    assert all(isinstance(each, str) for each in named)


def test_a_message_that_is_nested_without_end_names_none() -> None:
    """Like any other that is not a list of leases."""
    assert wire.decode_lease_ids(b"\x91" * 100_000 + b"\xc0") == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(st.text() | JSON.map(lambda value: msgspec.json.encode(value).decode()))
def test_any_text_is_a_standing_or_an_error(text: str) -> None:
    """Another version of this program may have written it."""
    try:
        standing, each = wire.read_standing(text)
    except WrongAnswerError:
        return
    assert isinstance(standing, Standing)
    assert isinstance(each, Terms)


# A whole store whose server says anything

WIDE = amount()

TICK = Tick(1, WIDE, {"a": Standing()}, {"a": terms("a")}, degraded=False)

LEASE = Lease(
    lease_id="1",
    entitlement="a",
    cost=cost(),
    within_share=True,
    within_guarantee=False,
    tokens_guaranteed=False,
    pool_ppm=0,
    admitted_at_ms=5,
    expires_at_ms=6,
)

REFUSAL = Refusal(Reason.LOW_PRIORITY, Resource.TOKENS, 3, 2, 1)

SHADOWED = replace(LEASE, eviction_rank=1, shadowed=REFUSAL)

NEWS = [
    1,
    [1, 2, 3],
    False,
    True,
    [wire.publish_entry(Standing(), terms("a"), with_terms=False)[1]],
]

REFUSED = ["low_priority", "tokens", 3, 2, 1]


@dataclass(frozen=True, slots=True)
class Call:
    """
    One of the store's calls.

    Attributes:
        make: makes it.
        result: what it returns.
        right: answers that the script may give to its operations.
    """

    make: Callable[[RedisStore], Awaitable[object]]
    result: object
    right: Sequence[Mapping[str, Any]]


CALLS = {
    "reserve": Call(
        lambda store: store.reserve("p", claim("1", cost(), terms("a"), WIDE)),
        Reply,
        [
            {"reserve": [shown(LEASE), False, [1, 2, 3, 4, 5, 6], ["2"]]},
            {"reserve": [shown(SHADOWED), False, [1, 2, 3, 4, 5, 6], []]},
            {"reserve": [False, REFUSED, [1, 2, 3, 4, 5, 6], []]},
        ],
    ),
    "settle": Call(
        lambda store: store.settle("p", "1", 5),
        Settlement | None,
        [{"settle": False}, {"settle": [shown(SHADOWED), 5, 7, True]}],
    ),
    "renew": Call(
        lambda store: store.renew("p", ["1", "2"], 5), Renewal, [{"renew": [["1"], ["2"]]}]
    ),
    "restore": Call(
        lambda store: store.restore("p", [Survivor(LEASE, 5)], 5), None, [{"restore": True}]
    ),
    "sweep": Call(
        lambda store: store.sweep("p"),
        tuple[Lease, ...],
        [{"sweep": []}, {"sweep": [shown(LEASE), shown(SHADOWED)]}],
    ),
    "open": Call(
        lambda store: store.open("p", "f"),
        Opening,
        [
            {"open": [1, -1, False], "look": [3, NEWS, ["1"], 2]},
            {"open": [1, 4, True], "look": [0, False, [], 1]},
        ],
    ),
    "look": Call(
        lambda store: store.look("p", TICK),
        Sight,
        [{"look": [3, NEWS, ["1"], 2]}, {"look": [0, False, [], 1]}],
    ),
    "close_tick": Call(
        lambda store: store.close_tick("p"),
        TickReading | None,
        [{"close_tick": False}, {"close_tick": [1, 5_000, [["a", list(range(9))]]]}],
    ),
    "publish": Call(
        lambda store: store.publish("p", TICK, 1_000),
        bool,
        [{"publish": 1}, {"publish": "fenced"}, {"publish": "stale"}],
    ),
    "snapshot": Call(
        lambda store: store.snapshot("p"),
        LedgerView,
        [{"snapshot": [[1, 2, 3], [["a", 1, 2, 3, 4]]]}, {"snapshot": [[0, 0, 0], []]}],
    ),
}


@dataclass(slots=True)
class Told:
    """A server that answers each operation as it is told."""

    answers: Mapping[str, Any] = field(default_factory=dict)

    async def call(self, keys: Sequence[str], arguments: Sequence[str | bytes]) -> object:
        """See `Server.call`."""
        assert keys
        asked = arguments[-1]
        assert isinstance(asked, bytes)
        names = [operation[0] for operation in msgspec.msgpack.decode(asked)]
        return msgspec.msgpack.encode(("epoch", [self.answers.get(name, True) for name in names]))

    async def messages(self, channels: Sequence[str]) -> AsyncIterator[tuple[str, bytes]]:
        """See `Server.messages`."""
        for each in channels[:0]:
            yield each, b""

    async def close(self) -> None:
        """See `Server.close`."""


async def outcome_of(call: Call, answers: Mapping[str, Any]) -> object:
    """What the call returns, or the store's error."""
    store = RedisStore(Told(answers), owner="me", deadline_ms=10_000)
    try:
        return await call.make(store)
    except StoreError as error:
        return error
    finally:
        await store.close()


def holds_only(value: object, kind: Any) -> bool:
    """Whether a value, and all that is in it, is of the types that are written there."""
    kind = type(None) if kind is None else kind
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin is UnionType:
        return any(holds_only(value, each) for each in args)
    if not isinstance(value, origin) or (isinstance(value, bool) and kind is not bool):
        return False
    parts: list[tuple[object, Any]] = []
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        parts = [(getattr(value, one.name), hints[one.name]) for one in fields(kind)]
    elif isinstance(value, Mapping):
        parts = [(each, args[0]) for each in value] + [(each, args[1]) for each in value.values()]
    elif isinstance(value, tuple):
        parts = [(each, args[0]) for each in value]
    return all(holds_only(*part) for part in parts)


@pytest.mark.parametrize(
    ("name", "answers"),
    [(name, answers) for name, call in CALLS.items() for answers in call.right],
    ids=[f"{name}-{n}" for name, call in CALLS.items() for n in range(len(call.right))],
)
async def test_a_right_answer_is_understood(name: str, answers: Mapping[str, Any]) -> None:
    """Every call, in every way that it may be answered."""
    call = CALLS[name]
    outcome = await outcome_of(call, answers)
    assert holds_only(outcome, call.result), outcome


@st.composite
def nearly_right(draw: st.DrawFn) -> tuple[str, Mapping[str, Any]]:
    """A call, and answers of which one part, of any depth, is another one, is missing, or is there twice."""
    name = draw(st.sampled_from(sorted(CALLS)))
    answers = dict(draw(st.sampled_from(CALLS[name].right)))
    operation = draw(st.sampled_from(sorted(answers)))
    answers[operation] = draw(_spoilt(answers[operation]))
    return name, answers


def _spoilt(value: Any) -> st.SearchStrategy[Any]:
    ways: list[st.SearchStrategy[Any]] = [
        ANY,
        st.integers(-2, 2),
        st.booleans(),
        st.text(max_size=1),
    ]
    if isinstance(value, list) and value:
        position = st.integers(0, len(value) - 1)
        ways += [
            position.map(lambda i: value[:i] + value[i + 1 :]),
            position.map(lambda i: value[:i] + value[i : i + 1] + value[i:]),
        ]
        deeper = position.flatmap(
            lambda i: _spoilt(value[i]).map(lambda new: [*value[:i], new, *value[i + 1 :]])
        )
        ways += [deeper] * 8
    return st.one_of(ways)


@settings(max_examples=400)
@given(nearly_right())
def test_a_wrong_answer_is_an_error_of_the_store(case: tuple[str, Mapping[str, Any]]) -> None:
    """And nothing else: neither another exception nor a decision that is made of something else."""
    name, answers = case
    outcome = asyncio.run(outcome_of(CALLS[name], answers))
    assert isinstance(outcome, StoreError) or holds_only(outcome, CALLS[name].result), outcome


# A server that does not even speak the protocol

SAID = [
    *(b"", b"\r\n", b"\x00", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01\x00\x02\x02"),
    *(
        b"-",
        b"-\r\n",
        b"-ERR\r\n",
        b"-MOVED\r\n",
        b"-MOVED x y\r\n",
        b"-ASK 1\r\n",
        b"-ASK 1 x:y\r\n",
    ),
    *(
        b"+OK\r\n",
        b":1\r\n",
        b":x\r\n",
        b"$-1\r\n",
        b"$5\r\nab",
        b"$x\r\n",
        b"$3\r\n\xff\xff\xff\r\n",
    ),
    *(b"*-1\r\n", b"*x\r\n", b"*1\r\n" * 5_000, b"%1\r\n:1\r\n", b"=1\r\nx\r\n", b">1\r\n:1\r\n"),
]
"""What nobody who keeps the books says."""


async def reply_of(said: bytes) -> object:
    """What a server replies that says this, whatever it is asked, and hangs up."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65_536)
        writer.write(said)
        writer.close()

    listening = await asyncio.start_server(say, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    server = RedisServer(Address(Topology.ALONE, (("127.0.0.1", port),)))
    try:
        return await server.call(["key"], ["argument"])
    finally:
        await server.close()
        listening.close()
        await listening.wait_closed()


@pytest.mark.parametrize("repeated", [1, 20])
@pytest.mark.parametrize("said", SAID, ids=repr)
async def test_a_server_that_speaks_another_language_is_an_error(
    said: bytes, repeated: int
) -> None:
    """A wrong port, a proxy in between, or TLS where there should be none; also where it greets as it should."""
    with pytest.raises(StoreError):
        wire.decode_answers(await reply_of(said * repeated), 1)


@settings(max_examples=60)
@given(st.binary(max_size=20) | st.binary(max_size=20).map(lambda some: some + b"\r\n"))
def test_whatever_a_server_says_is_a_reply_or_an_error(said: bytes) -> None:
    """Never another exception."""
    with contextlib.suppress(StoreError):
        asyncio.run(reply_of(said))
