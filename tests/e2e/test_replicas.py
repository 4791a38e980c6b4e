"""
Replicas that share one pool: as many requests run as fit, whoever decides, and whoever dies.

Real `envoy-tokenpools serve` processes, a real Redis and real Envoys. What the pool was at any instant is told by the
Redis itself (`tests/support/pool_log.py`).
"""

import asyncio
import contextlib
import json
import resource
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import median

import httpx
import pytest

from envoy_tokenpools.core.account import Meters
from envoy_tokenpools.core.pool import Gains
from envoy_tokenpools.core.weight import next_debt, service_gap
from envoy_tokenpools.gate.housekeeping import ROUND_SECONDS
from envoy_tokenpools.store.base import TickReading
from envoy_tokenpools.store.redis.script import LEAD_MS
from tests.support.pool_log import Publication, Step, owner_of, pool_log, publications, steps
from tests.support.replay import Received, ReplayBackend, json_response, read_request
from tests.support.replicas import replicas
from tests.support.separate import Separate, separate
from tests.support.shared_redis import shared_server
from tests.support.stack import NOTHING_IN_USE
from tests.support.streams import chunk, stream_of, total

LEASE_TTL_S = 5
TICK_MS = 1_000
SLACK_S = 1.5
"""What a machine that is busy with other things adds to any time."""

ANSWER = json_response(b'{"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":50}}')
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
STREAM_END = stream_of(total(1, 1), "[DONE]")
LAST_CHUNK = b"\r\n0\r\n\r\n"
GAP_S = 2.0
"""Between two words of a stream."""

_USERS = count(1)


def configuration(state: str, room: int, entitlements: str) -> str:
    """
    A pool of so many sequences.

    Decisions may take long: where all of this runs on one machine, the server is not what is slow.
    """
    return f"""
state: {state}
server: {{lease_ttl: {LEASE_TTL_S}s, store_deadline: 10s}}
pools:
  - name: pool
    models: [m]
    capacity: {{tokens_per_second: 10M, kv_cache: 640GiB, concurrency: {room}}}
    kv_bytes_per_token: 144KiB
    tick: {TICK_MS}ms
    entitlements:
{entitlements}"""


SPOT = """
      - {name: tenant, class: spot, keys: [{plain: tenant}]}
"""


def own_books() -> str:
    """On the server that all tests share."""
    return f"{shared_server()}?prefix=replicas-{secrets.token_hex(4)}"


def request(key: str, *, stream: bool = False) -> bytes:
    """One that is like no other."""
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        | {"user": str(next(_USERS)), "stream": stream}
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\nauthorization: Bearer %b\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % (key.encode(), len(body))
    ) + body


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got; status 0 is an answer that was broken off."""

    status: int
    reason: str
    retry_after_s: float


class Client:
    """A connection to Envoy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, what: bytes) -> Answer:
        """One request."""
        self._writer.write(what)
        answer = None
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            answer = await read_request(self._reader)  # a response has the same form
        if answer is None:
            return Answer(0, "", 0.0)
        return Answer(
            status=int(answer.request_line.split()[1]),
            reason=answer.headers.get("x-tokenpools-reason", ""),
            retry_after_s=int(answer.headers.get("retry-after-ms", "0")) / 1_000,
        )

    async def stream(self, what: bytes, begun: asyncio.Event) -> bytes:
        """All that comes of a stream, until it ends or is broken off."""
        self._writer.write(what)
        answer = bytearray()
        with contextlib.suppress(ConnectionError):
            while not answer.endswith(LAST_CHUNK):
                data = await self._reader.read(65_536)
                if not data:
                    break
                answer += data
                begun.set()
        return bytes(answer)


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    """A client."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


class Backend:
    """
    Answers each request after a while, and streams word by word.

    Attributes:
        may_answer: no request is answered before.
        over: no stream ends before.
        most: requests that were here at the same time.
    """

    def __init__(self, held_s: float) -> None:
        self.may_answer = asyncio.Event()
        self.over = asyncio.Event()
        self.most = 0
        self._held_s = held_s
        self._running = 0

    async def respond(self, received: Received, writer: asyncio.StreamWriter) -> None:
        """See `ReplayBackend`."""
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            if json.loads(received.body)["stream"]:
                await self._stream(writer)
            else:
                await self.may_answer.wait()
                await asyncio.sleep(self._held_s)
                writer.write(ANSWER)
        finally:
            self._running -= 1

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for number in count():
            writer.write(stream_of(chunk({"content": f"<{number}>"})))
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), GAP_S)
                break
        writer.write(STREAM_END)


@contextlib.asynccontextmanager
async def serving(backend: Backend) -> AsyncIterator[str]:
    """Its URL."""
    replay = ReplayBackend(backend.respond)
    try:
        yield await replay.start()
    finally:
        await replay.stop()


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 60.0) -> None:
    """Poll until it holds."""
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.1)


async def until_empty(replica: Separate) -> None:
    """Wait until nothing is in use."""

    async def is_empty() -> bool:
        return bool((await replica.state())["in_use"] == NOTHING_IN_USE)

    await until(is_empty)


def of(found: Sequence[Step], name: str) -> list[Step]:
    """The operations of this name."""
    return [step for step in found if step.name == name]


def admitting(found: Sequence[Step]) -> list[Step]:
    """The claims that became leases."""
    return [step for step in of(found, "reserve") if step.answer[0]]


def settling(found: Sequence[Step]) -> list[Step]:
    """The settlements of leases."""
    return [step for step in of(found, "settle") if step.answer]


# ---------------------------------------------------------------------- exactness

REQUESTS = 2_000
ROOM = 250
SETTLED_WITHIN_S = 2.0


@pytest.fixture
def many_files() -> Iterator[None]:
    """A connection for each of the requests, here and in Envoy, which inherits the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * REQUESTS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _until_admitted(client: Client, answers: list[Answer]) -> None:
    """Ask, and come back when told to."""
    what = request("tenant")
    while not answers or answers[-1].status == 429:
        if answers:
            await asyncio.sleep(answers[-1].retry_after_s)
        answers.append(await client.ask(what))


@pytest.mark.usefixtures("many_files")
async def test_four_replicas_give_away_all_that_there_is_and_no_more(tmp_path: Path) -> None:
    """
    Of 2000 requests at once never more than 250 run, and none is refused while fewer do.

    Both by the server's log. The leases in the books are counted whenever the script has written one, inside of calls
    too. How much was in use when a claim was refused follows from the answers to all operations before it, in this call
    and in those before: the server does them in that order, so that no clock is needed.
    """
    state, backend = own_books(), Backend(held_s=0.5)
    each: list[list[Answer]] = [[] for _ in range(REQUESTS)]

    async def is_crowded() -> bool:
        return sum(one.status == 429 for answers in each for one in answers) > ROOM

    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(backend))
        log = await stack.enter_async_context(pool_log(state, "pool"))
        config = configuration(state, ROOM, SPOT)
        them = await stack.enter_async_context(replicas(config, 4, url, tmp_path))
        clients = [await stack.enter_async_context(connected(them.port)) for _ in each]
        began_at = await log.now_s()
        asking = asyncio.gather(*map(_until_admitted, clients, each))
        await until(is_crowded)
        backend.may_answer.set()
        await asking
        answered_at = await log.now_s()
        await until_empty(them.running[0])
        calls = await log.calls()
        requests, endings = "tokenpools_requests_total", "tokenpools_completions_total"
        shares = [await replica.total(requests) for replica in them.running]
        counted = {
            "admitted": await them.total(requests, outcome="admitted"),
            "shed": await them.total(requests, outcome="shed", reason="pool_contended"),
            "completed": await them.total(endings, ending="completed"),
        }
        assert sum(shares) == counted["admitted"] + counted["shed"]
    found = list(steps(calls))
    refused = [step for step in of(found, "reserve") if not step.answer[0]]
    answers = Counter((one.status, one.reason) for answers in each for one in answers)
    print(
        f"\n{REQUESTS} requests admitted and {len(refused)} refused in {answered_at - began_at:.1f} s; at most"
        f" {max(call.peak for call in calls)} in the books and {backend.most} at the backend; each replica decided"
        f" {sorted(shares)}, in {len(calls)} calls of up to {max(len(call.operations) for call in calls)} operations"
    )
    assert min(shares) > REQUESTS / 10, "Envoy does not spread them"
    assert max(call.peak for call in calls) == ROOM
    assert backend.most <= ROOM
    assert {step.in_use for step in refused} == {ROOM}
    assert answers == {(200, ""): REQUESTS, (429, "pool_contended"): len(refused)}
    assert counted == {"admitted": REQUESTS, "shed": len(refused), "completed": REQUESTS}
    admitted = [step.operation[1] for step in admitting(found)]
    assert Counter(step.operation[1] for step in settling(found)) == Counter(admitted)
    assert len(admitted) == REQUESTS
    assert max(step.call.at_s for step in settling(found)) <= answered_at + SETTLED_WITHIN_S
    for name in ("in_flight", "concurrency", "kv"):
        assert min(call.page[name] for call in calls) == calls[-1].page[name] == 0


# ---------------------------------------------------------------------- a replica that dies

STREAMS = 600
STREAM_ROOM = 700
ASKING = 4


def _is_whole(answer: bytes) -> bool:
    """Every word, and the end."""
    words = answer.count(b'"<')
    has_all = all(b'"<%d>"' % number in answer for number in range(words))
    return words > 0 and has_all and b"[DONE]" in answer and answer.endswith(LAST_CHUNK)


def _unsettled(owner: str, found: Sequence[Step]) -> set[str]:
    """The leases that a replica was given and has not settled."""
    given = {step.operation[1] for step in admitting(found) if step.call.owner == owner}
    return given - {step.operation[1] for step in settling(found)}


def _expired(found: Sequence[Step]) -> dict[str, float]:
    """When each lease came back that nobody had renewed."""
    return {lease[0]: step.call.at_s for step in of(found, "sweep") for lease in step.answer}


def _last_signs(found: Sequence[Step]) -> dict[str, float]:
    """When the owner of each lease has last said that it is needed."""
    signs = {step.operation[1]: step.call.at_s for step in admitting(found)}
    for step in of(found, "renew"):
        signs |= dict.fromkeys(step.operation[1], step.call.at_s)
    return signs


async def test_a_killed_replica_takes_its_own_streams_with_it_and_nothing_else(
    tmp_path: Path,
) -> None:
    """
    Its leases are back within the lease time; the others' streams run on, and requests are admitted all the time.

    One Envoy that knows all three: its outlier detection leaves out whom it cannot reach, and it asks another one. By
    the server's log: whose leases came back, and when, and what was admitted meanwhile.
    """
    state, backend = own_books(), Backend(held_s=0.05)
    statuses: Counter[int] = Counter()
    tired = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(backend))
        log = await stack.enter_async_context(pool_log(state, "pool"))
        config = configuration(state, STREAM_ROOM, SPOT)
        them = await stack.enter_async_context(replicas(config, 3, url, tmp_path))

        async def keep_asking() -> None:
            while not tired.is_set():
                async with connected(them.port) as client:
                    statuses[(await client.ask(request("tenant"))).status] += 1

        backend.may_answer.set()
        begun = [asyncio.Event() for _ in range(STREAMS)]
        streams = []
        for each in begun:
            client = await stack.enter_async_context(connected(them.port))
            what = request("tenant", stream=True)
            streams.append(asyncio.create_task(client.stream(what, each)))
        await asyncio.gather(*(each.wait() for each in begun))
        asking = [asyncio.create_task(keep_asking()) for _ in range(ASKING)]
        dead = owner_of(await log.calls(), them.running[0].process)
        killed_at = await log.now_s()
        them.running[0].process.kill()
        again = await them.start_again(0)

        async def all_is_well() -> bool:
            found = list(steps(await log.calls()))
            serves = await again.total("tokenpools_requests_total", outcome="admitted") > 0
            return serves and _unsettled(dead, found) == _expired(found).keys()

        await until(all_is_well)
        tired.set()
        await asyncio.gather(*asking)
        backend.over.set()
        whole = sum(map(_is_whole, await asyncio.gather(*streams)))
        await until_empty(again)
        calls = await log.calls()
    found = list(steps(calls))
    expired = _expired(found)
    back_s = sorted(at_s - killed_at for at_s in expired.values())
    by_others = [step.call.at_s for step in admitting(found) if step.call.owner != dead]
    pauses = [
        after - max(before, killed_at) for before, after in pairwise(by_others) if after > killed_at
    ]
    failed = statuses.total() - statuses[200]
    print(
        f"\n{len(back_s)} leases back {back_s[0]:.2f} to {back_s[-1]:.2f} s later; {whole} of {STREAMS} streams whole;"
        f" {statuses[200]} more requests admitted, longest pause {max(pauses):.2f} s, {failed} failed"
    )
    assert len(expired) > STREAMS / 4, "Envoy does not spread them"
    assert expired.keys() == _unsettled(dead, found)
    assert back_s[-1] <= LEASE_TTL_S + ROUND_SECONDS + SLACK_S
    signs = _last_signs(found)
    lived_s = [at_s - signs[lease_id] for lease_id, at_s in expired.items()]
    assert (
        LEASE_TTL_S - 0.01 <= min(lived_s) <= max(lived_s) <= LEASE_TTL_S + ROUND_SECONDS + SLACK_S
    )
    # Whoever asks at the moment may fail, and the dead one may not have settled the request before.
    assert STREAMS - whole <= len(expired) <= STREAMS - whole + 2 * ASKING
    assert statuses.keys() <= {0, 200, 503}
    assert failed <= ASKING
    assert max(pauses) < LEASE_TTL_S / 2
    assert not of(found, "open")[-1].answer[2], "who joins changes nothing"
    assert len(settling(found)) + len(expired) == len(admitting(found))
    assert calls[-1].page["in_flight"] == calls[-1].page["concurrency"] == 0


# ---------------------------------------------------------------------- ticks

ELASTIC_ROOM = 12
BASELINE_RATE = 1_000
BASELINE = f"{{tokens_per_second: {BASELINE_RATE}, kv_cache: 64GiB, concurrency: 8}}"
ELASTIC = f"""
      - {{name: busy, class: elastic, baseline: {BASELINE}, keys: [{{plain: busy}}]}}
      - {{name: calm, class: elastic, baseline: {BASELINE}, keys: [{{plain: calm}}]}}
"""
READINGS = 20

Values = Mapping[str, tuple[float, float, float]]
"""Weight, debt and burst of each entitlement."""


@dataclass(frozen=True, slots=True)
class Known:
    """Which publication a replica knew, and whether it had closed a tick since, and not yet published it."""

    version: int
    is_ahead: bool

    def allows(self, shown: Values, published: Mapping[int, Values]) -> bool:
        """Whether this is what it has to show."""
        is_next = self.is_ahead and published.get(self.version + 1) == shown
        return is_next or published.get(self.version) == shown


def _known_at_reports(found: Sequence[Step], owner: str) -> list[Known]:
    """
    What a replica knew at each of its reports, all of which read the books (`snapshot`).

    Its operations are done in the order in which it asks for them, so that no clock is needed.
    """
    version, is_ahead, known = 0, False, []
    for step in found:
        if step.call.owner != owner:
            continue
        match step.name:
            case "look":
                version = step.answer[0]
            case "close_tick" if step.answer:
                is_ahead = True
            case "publish" if isinstance(step.answer, int):
                version, is_ahead = step.answer, False
            case "snapshot":
                known.append(Known(version, is_ahead))
    return known


async def _shown(client: httpx.AsyncClient, replica: Separate) -> Values:
    """By `/state`."""
    pool = (await client.get(f"{replica.admin_url}/state")).json()["pools"][0]
    return {
        each["name"]: (each["weight"], each["debt"], each["burst"]) for each in pool["entitlements"]
    }


def _published(publication: Publication) -> Values:
    return {
        name: (standing.weight, standing.debt, standing.burst)
        for name, standing in publication.standings.items()
    }


def _debt(before: float, reading: TickReading | None, name: str) -> float:
    """What it has to be after a tick."""
    assert reading is not None
    meters, elapsed_ms = reading.meters.get(name, Meters()), reading.elapsed_ms
    delivered = max(0, meters.delivered_tokens) * 1_000 / elapsed_ms
    pending = max(0, meters.pending_tokens) * 1_000 / elapsed_ms
    gap = service_gap(baseline=BASELINE_RATE, demanded=delivered + pending, delivered=delivered)
    return next_debt(before, gap, gamma=Gains().gamma, elapsed_ms=elapsed_ms)


async def _keep_asking(port: int, key: str) -> None:
    """One request after the other, whatever becomes of them."""
    while True:
        async with connected(port) as client:
            answer = await client.ask(request(key))
        if answer.status != 200:
            await asyncio.sleep(0.2)


async def test_ticks_debts_and_weights_are_those_of_the_pool(tmp_path: Path) -> None:
    """
    Two replicas with unequal traffic show what the leader has published, and if it is killed the other one leads on.

    Each has an Envoy of its own. By the server's log: who closed each tick and how long it was, what was published, and
    what a replica had seen of that whenever it was asked for `/state`.
    """
    state, backend = own_books(), Backend(held_s=0.5)
    shown: list[list[Values]] = [[], []]
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(backend))
        log = await stack.enter_async_context(pool_log(state, "pool"))
        config = configuration(state, ELASTIC_ROOM, ELASTIC)
        both = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            both.append(await stack.enter_async_context(separate(config, url, tmp_path / name)))
        backend.may_answer.set()
        one, two = (each.port for each in both)
        traffic = [(one, "busy")] * 14 + [(two, "busy")] * 2 + [(two, "calm")] * 6
        asking = [asyncio.create_task(_keep_asking(*each)) for each in traffic]
        client = await stack.enter_async_context(httpx.AsyncClient())
        for _ in range(READINGS):
            values = await asyncio.gather(*(_shown(client, each) for each in both))
            for seen, value in zip(shown, values, strict=True):
                seen.append(value)
            await asyncio.sleep(0.25)
        calls = await log.calls()
        owners = [owner_of(calls, each.process) for each in both]
        leader = owners.index(calls[-1].page["leader"])
        killed_at = await log.now_s()
        both[leader].process.kill()

        async def leads_on() -> bool:
            return publications(await log.calls())[-2].owner == owners[1 - leader]

        await until(leads_on)
        shown[1 - leader].append(await _shown(client, both[1 - leader]))
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        calls = await log.calls()
    found = list(steps(calls))
    published = publications(calls)
    by_version = {each.version: _published(each) for each in published}
    closed = [step for step in of(found, "close_tick") if step.answer]
    taken_over = next(step for step in closed if step.call.owner == owners[1 - leader])
    taken_over_s = taken_over.call.at_s - killed_at
    before = [each for each in published if each.owner == owners[leader]]
    same = sum(one == two for one, two in zip(*(seen[:READINGS] for seen in shown), strict=True))
    print(
        f"\n{len(before)} ticks of {median(step.answer[1] for step in closed)} ms, next one"
        f" {taken_over_s:.2f} s after the kill; {same} of {READINGS} readings were the same;"
        f" {_published(before[-1])} before, {_published(published[-1])} after"
    )
    # What they show.
    for owner, seen in zip(owners, shown, strict=True):
        known = _known_at_reports(found, owner)
        assert all(one.allows(what, by_version) for one, what in zip(known, seen, strict=True)), (
            known,
            seen,
        )
        looks = [step.call.at_s for step in of(found, "look") if step.call.owner == owner]
        assert median(after - before for before, after in pairwise(looks)) < 2 * ROUND_SECONDS
    assert same > READINGS / 2
    assert before[-1].standings["busy"].debt > 0.001
    # Debts are made of what all replicas did, one after the other, whoever leads.
    for earlier, later in pairwise(published):
        for name, standing in later.standings.items():
            debt = _debt(earlier.standings[name].debt, later.reading, name)
            assert standing.debt == pytest.approx(debt, abs=0.001)
    # Each moment is in one tick. One that was closed may not have been published when its owner died, or not yet.
    assert {step.call.owner for step in closed if step.call.at_s < killed_at} == {owners[leader]}
    assert [each.number for each in published] == list(range(len(published)))
    assert 0 <= 1 + len(closed) - len(published) <= 2
    for step, following in pairwise(closed):
        elapsed_ms, between_s = following.answer[1], following.call.at_s - step.call.at_s
        assert elapsed_ms >= TICK_MS * 0.9
        assert abs(between_s * 1_000 - elapsed_ms) < 100
    assert median(step.answer[1] for step in closed) < TICK_MS + 2 * ROUND_SECONDS * 1_000
    # The other one.
    assert taken_over_s <= (LEAD_MS + TICK_MS) / 1_000 + ROUND_SECONDS + SLACK_S
    assert published[-1].owner == owners[1 - leader]
