"""
Ten minutes of a closed loop in pool time: more clients than capacity, and the real ledger and ticks before a backend.

The same world without a ledger must fail the same checks.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

import pytest

from envoy_tokenpools.core.admission import Lease, Refusal
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import Gains, Pool, ServiceClass
from envoy_tokenpools.core.resources import Resources
from tests.support.pools import KV_BYTES_PER_TOKEN, Desk, cost, entitlement, pool

SLOTS = 16
TOKENS_PER_SECOND = 16
"""Of one sequence."""

SERVICE_MS = tuple(range(6_000, 10_001, 500))
"""How long sequences last: 8 s in the mean."""

RESERVED_TOKENS = 160
"""What every request reserves: the longest; most are settled at less."""

TICK_MS = 5_000
ASLEEP_MS = range(240_000, 420_000)
"""The guaranteed tenant sleeps between these times."""

SETTLED_MS = 30_000
"""After a change of load the loop has this long to find its new balance."""

END_MS = 600_000

CLIENTS = {"guaranteed": 6, "copilot": 5, "synth": 4, "spot": 10}
"""
Twenty-five clients that each want a sequence all the time. Of the sixteen sequences six are guaranteed and two times
four elastic; of the surplus of two copilot's burst comes before spot.
"""

TWELVE = {f"tenant-{number:02}": 2 for number in range(12)}
"""Twenty-four clients of twelve elastic tenants that are promised two sequences each."""


def share(sequences: int) -> Resources:
    """What goes with this many sequences; a fifth more tokens, as more is reserved than used."""
    kv_bytes = sequences * RESERVED_TOKENS * KV_BYTES_PER_TOKEN
    return Resources(sequences * TOKENS_PER_SECOND * 12 // 10, kv_bytes, sequences)


POOL = pool(
    share(SLOTS),
    entitlement("guaranteed", ServiceClass.GUARANTEED, share(6), slo_target_ms=200),
    entitlement("copilot", ServiceClass.ELASTIC, share(4), slo_target_ms=500),
    entitlement("synth", ServiceClass.ELASTIC, share(4), slo_target_ms=30_000),
    entitlement("spot", ServiceClass.SPOT),
    tick_ms=TICK_MS,
)


def twelve_tenants(debt_gain: float) -> Pool:
    """One and a half times the capacity is promised, to SLO targets that lie 150 times apart."""
    targets = (200, 300, 500, 800, 1_000, 2_000, 3_000, 5_000, 8_000, 12_000, 20_000, 30_000)
    members = [
        entitlement(name, ServiceClass.ELASTIC, share(2), slo_target_ms=target_ms)
        for name, target_ms in zip(TWELVE, targets, strict=True)
    ]
    return replace(pool(share(SLOTS), *members, tick_ms=TICK_MS), gains=Gains(debt=debt_gain))


@dataclass(slots=True)
class Request:
    """One request of one client."""

    number: int
    tenant: str
    arrived_ms: int
    lease: Lease | None = None

    @property
    def service_ms(self) -> int:
        """How long it generates; spread by its number."""
        return SERVICE_MS[self.number * 7 % len(SERVICE_MS)]


@dataclass(slots=True)
class Record:
    """What happened: first tokens, times of service and refusals."""

    waits: list[tuple[int, str, int]] = field(default_factory=list)
    served: list[tuple[int, int, str]] = field(default_factory=list)
    refused: list[tuple[int, str, Refusal]] = field(default_factory=list)
    longest_queue: int = 0

    def waits_of(self, tenant: str, when: range) -> list[int]:
        """How long its requests of a time queued at the backend, in milliseconds."""
        return [wait for at_ms, whose, wait in self.waits if whose == tenant and at_ms in when]

    def sequences(self, when: range) -> Mapping[str, float]:
        """Sequences that each tenant had at the backend, in the mean of a time."""
        total_ms: Counter[str] = Counter()
        for start_ms, end_ms, tenant in self.served:
            total_ms[tenant] += max(0, min(end_ms, when.stop) - max(start_ms, when.start))
        return Counter({tenant: ms / len(when) for tenant, ms in total_ms.items()})


class World:
    """
    Clients and backend; `desk` admits, or everything passes without one.

    A client thinks for about `think_ms` between the end of a request and its next one.
    """

    def __init__(
        self, desk: Desk | None, clients: Mapping[str, int] = CLIENTS, *, think_ms: int = 0
    ) -> None:
        self.desk = desk
        self._clients = clients
        self._think_ms = think_ms
        self.record = Record()
        self._now_ms = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count(1)
        self._running = 0
        self._queue: deque[Request] = deque()

    def run(self) -> Record:
        """Until the end, then to the last completion."""
        for tenant, clients in self._clients.items():
            for client in range(clients):
                self._at(client * 37, partial(self._ask, tenant))
        for at_ms in range(TICK_MS, END_MS, TICK_MS):
            self._at(at_ms, self._pass_tick)
        while self._events:
            self._now_ms, _, action = heapq.heappop(self._events)
            if self.desk is not None:
                self.desk.now_ms = self._now_ms
            action()
        return self.record

    def _at(self, at_ms: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_ms, next(self._order), action))

    def _ask(self, tenant: str) -> None:
        if self._now_ms >= END_MS:
            return
        if tenant == "guaranteed" and self._now_ms in ASLEEP_MS:
            self._at(ASLEEP_MS.stop, partial(self._ask, tenant))
            return
        self._try(Request(next(self._order), tenant, self._now_ms))

    def _try(self, request: Request) -> None:
        if self._now_ms >= END_MS:
            return
        if self.desk is not None:
            outcome = self.desk.claim(
                request.tenant,
                cost(RESERVED_TOKENS, kv_bytes=RESERVED_TOKENS * KV_BYTES_PER_TOKEN),
                fingerprint=request.number,
            )
            if isinstance(outcome, Refusal):
                self.record.refused.append((self._now_ms, request.tenant, outcome))
                wait_ms = min(2_000, outcome.retry_after_ms) * (10 + request.number % 7) // 10
                self._at(self._now_ms + wait_ms, partial(self._try, request))
                return
            request.lease = outcome
        if self._running < SLOTS:
            self._start(request)
        else:
            self._queue.append(request)
            self.record.longest_queue = max(self.record.longest_queue, len(self._queue))

    def _start(self, request: Request) -> None:
        self._running += 1
        waited_ms = self._now_ms - request.arrived_ms
        self.record.waits.append((request.arrived_ms, request.tenant, waited_ms))
        end_ms = self._now_ms + request.service_ms
        self.record.served.append((self._now_ms, end_ms, request.tenant))
        self._at(end_ms, partial(self._finish, request))

    def _finish(self, request: Request) -> None:
        self._running -= 1
        if self.desk is not None:
            assert request.lease is not None
            self.desk.settle(request.lease, request.service_ms * TOKENS_PER_SECOND // 1_000)
        if self._queue:
            self._start(self._queue.popleft())
        thinks_ms = self._think_ms * (5 + request.number % 11) // 10
        if thinks_ms:
            self._at(self._now_ms + thinks_ms, partial(self._ask, request.tenant))
        else:
            self._ask(request.tenant)

    def _pass_tick(self) -> None:
        if self.desk is not None:
            self.desk.pass_tick(0)


BUSY = range(SETTLED_MS, ASLEEP_MS.start)
"""All twenty-five clients ask."""

LENT = range(ASLEEP_MS.start + SETTLED_MS, ASLEEP_MS.stop)
"""The guaranteed tenant's six sequences are lent."""

RECLAIMED = range(ASLEEP_MS.stop + SETTLED_MS, END_MS)
"""It is back."""


def faults(record: Record) -> list[str]:
    """What the service classes promise and `record` does not show."""
    found = []
    if any(tenant == "guaranteed" for _, tenant, _ in record.refused):
        found.append("guaranteed was refused inside its baseline")
    for when in (BUSY, RECLAIMED):
        served = record.sequences(when)
        if max(record.waits_of("guaranteed", when)) > 0:
            found.append("guaranteed waited for its first token")
        if served["guaranteed"] < 5.9:
            found.append("guaranteed did not get its six sequences")
        found += [f"{tenant} starved" for tenant in ("copilot", "synth") if served[tenant] < 3.8]
        if not 0.8 <= served["spot"] <= 1.1:
            found.append("spot did not live from the surplus")
    lent = record.sequences(LENT)
    if not 6.8 <= lent["spot"] <= 7.1:
        found.append("spot did not get what the guaranteed tenant left idle")
    if any(sum(record.sequences(when).values()) < 0.97 * SLOTS for when in (BUSY, LENT, RECLAIMED)):
        found.append("capacity was idle while somebody waited")
    return found


@pytest.fixture(scope="module")
def desk() -> Desk:
    """The desk at which the admitted run happens."""
    return Desk.of(POOL)


@pytest.fixture(scope="module")
def admitted(desk: Desk) -> Record:
    """The run with admission control."""
    return World(desk).run()


def test_every_class_gets_what_it_is_promised(admitted: Record) -> None:
    """Guaranteed never refused nor delayed, elastic whole, spot from the surplus, nothing idle."""
    assert faults(admitted) == []


def test_only_the_reclaim_of_a_lent_baseline_queues(admitted: Record) -> None:
    """At most the six of the guaranteed tenant wait when it wakes, for no longer than a request lasts."""
    assert 0 < admitted.longest_queue <= 6
    waking = admitted.waits_of("guaranteed", range(ASLEEP_MS.stop, ASLEEP_MS.stop + SERVICE_MS[-1]))
    assert 0 < max(waking) <= SERVICE_MS[-1]


def test_after_the_loop_the_books_are_empty(desk: Desk, admitted: Record) -> None:
    """Every lease was settled, and each entitlement's buckets drain."""
    assert admitted.served
    assert desk.ledger.view().total == InUse()
    desk.pass_tick(60_000)
    assert all(account.is_idle for account in desk.ledger._accounts.values())


def test_headroom_keeps_the_first_tokens_of_a_guarantee_from_waiting() -> None:
    """Between two requests its sequence is not lent away: nineteen of twenty start at once, with headroom."""

    def late(headroom: float) -> float:
        record = World(Desk.of(replace(POOL, headroom=headroom)), think_ms=300).run()
        served = record.sequences(BUSY)
        assert min(served["copilot"], served["synth"]) > 3.4, "elastic starved"
        assert served["spot"] > 0.8
        waits = record.waits_of("guaranteed", BUSY)
        return sum(wait > 0 for wait in waits) / len(waits)

    assert late(0.1) < 0.05 < late(0.0)


def test_nobody_of_elastic_starves_and_debt_makes_shares_fairer() -> None:
    """KV cache and sequences are short by half: everybody is served, and by Jain's index more evenly with debt."""

    def served(debt_gain: float) -> list[float]:
        record = World(Desk.of(twelve_tenants(debt_gain)), TWELVE).run()
        sequences = record.sequences(range(SETTLED_MS, END_MS))
        assert sum(sequences.values()) > 0.9 * SLOTS
        return [sequences[tenant] for tenant in TWELVE]

    def jain(parts: list[float]) -> float:
        return sum(parts) ** 2 / len(parts) / sum(part * part for part in parts)

    with_debt, without = served(4.0), served(0.0)
    assert min(with_debt) > 0.05
    assert jain(with_debt) > jain(without) + 0.05
    assert jain(with_debt) > 0.8


def test_without_a_ledger_the_same_checks_fail() -> None:
    """The negative control: everything passes, so the backend queues and all classes wait alike."""
    record = World(None).run()
    found = faults(record)
    assert "guaranteed waited for its first token" in found
    assert "guaranteed did not get its six sequences" in found
    assert "spot did not live from the surplus" in found
    assert fmean(record.waits_of("guaranteed", BUSY)) > 2_000
    assert record.longest_queue == sum(CLIENTS.values()) - SLOTS
