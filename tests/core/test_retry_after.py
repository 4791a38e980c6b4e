"""What a refused client is told, tried by clients that do as the SDKs do: twice again, when they were told to."""

import heapq
import random
from dataclasses import dataclass, field, replace
from zlib import crc32

import pytest

from envoy_tokenpools.core.admission import Lease, Reason, Refusal, Terms
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.ledger import Ledger
from envoy_tokenpools.core.pool import Limits
from envoy_tokenpools.core.resources import Resources
from tests.support.pools import claim, terms

USABLE = Resources(tokens_per_second=240, kv_bytes=10**9, concurrency=16)

REQUEST = Cost(prompt_tokens=20, output_tokens=128, kv_bytes=1_000, concurrency=1)
"""A share of the pool's rate of 15 tokens a second: 8.5 s of output."""

LIMIT = 6

MAX_RETRIES = 2

JITTER = 0.25
"""Up to this part is added to what the ledger says."""


@dataclass(slots=True)
class Crowd:
    """Clients of one entitlement that each want one request served, at about the same time."""

    ledger: Ledger
    whose: Terms
    usable: Resources
    hold_ms: tuple[int, int]
    random: random.Random
    served: int = 0
    gave_up: int = 0
    told_ms: list[int] = field(default_factory=list)
    _events: list[tuple[int, int, str, int]] = field(default_factory=list)

    def run(self, clients: int, start_ms: int = 0, name: str = "client") -> "Crowd":
        """Until the last was served or has given up."""
        for number in range(clients):
            self._at(start_ms + number, f"{name}-{number}", 0)
        while self._events:
            now_ms, _, lease_id, tries = heapq.heappop(self._events)
            if tries < 0:
                self.ledger.settle(lease_id, REQUEST.tokens, now_ms)
                self.served += 1
            else:
                self._try(lease_id, tries, now_ms)
        return self

    def _try(self, lease_id: str, tries: int, now_ms: int) -> None:
        wanted = claim(
            lease_id,
            REQUEST,
            self.whose,
            self.usable,
            fingerprint=crc32(lease_id.encode()),
            window_ms=60_000,
        )
        outcome = self.ledger.reserve(wanted, now_ms)
        if isinstance(outcome, Lease):
            self._at(now_ms + self.random.randint(*self.hold_ms), lease_id, -1)
        elif tries < MAX_RETRIES:
            self.told_ms.append(outcome.retry_after_ms)
            wait_ms = round(outcome.retry_after_ms * (1 + JITTER * self.random.random()))
            self._at(now_ms + wait_ms, lease_id, tries + 1)
        else:
            self.gave_up += 1

    def _at(self, at_ms: int, lease_id: str, tries: int) -> None:
        heapq.heappush(self._events, (at_ms, len(self._events), lease_id, tries))


LIMITED = terms("a", limits=Limits(concurrency=LIMIT))

SURPLUS = terms("a")

SIX = replace(USABLE, concurrency=LIMIT, tokens_per_second=90)


@pytest.mark.parametrize(("whose", "usable"), [(LIMITED, USABLE), (SURPLUS, SIX)])
@pytest.mark.parametrize("seed", range(10))
def test_ten_clients_on_a_limit_of_six_are_all_served_right_after_a_start(
    seed: int, whose: Terms, usable: Resources
) -> None:
    """Nothing is known of how long requests run but what they reserve; their own limit or the pool's alike."""
    crowd = Crowd(Ledger(), whose, usable, (8_000, 8_600), random.Random(seed)).run(10)
    assert (crowd.served, crowd.gave_up) == (10, 0)


@pytest.mark.parametrize("hold_ms", [(300, 500), (2_000, 2_500), (25_000, 30_000)])
@pytest.mark.parametrize("seed", range(10))
def test_ten_clients_on_a_limit_of_six_are_all_served_once_something_is_known(
    seed: int, hold_ms: tuple[int, int]
) -> None:
    """However long requests run, be it far from what they reserve."""
    crowd = Crowd(Ledger(), LIMITED, USABLE, hold_ms, random.Random(seed))
    for turn in range(20):
        crowd.run(LIMIT, start_ms=turn * 60_000, name=f"before-{turn}")
    assert crowd.gave_up == 0
    crowd.run(10, start_ms=2_000_000)
    assert (crowd.served, crowd.gave_up) == (20 * LIMIT + 10, 0)


def test_nobody_is_told_to_wait_for_longer_than_what_runs_can_take() -> None:
    """The fourth in line waits for the fourth end: less than a hold more than the first."""
    crowd = Crowd(Ledger(), LIMITED, USABLE, (8_000, 8_000), random.Random(0)).run(10)
    assert 8_000 <= min(crowd.told_ms) <= max(crowd.told_ms) <= 2 * 8_600


def test_what_was_evicted_says_nothing_about_how_long_requests_run() -> None:
    """It was ended for others' sake: a wait is expected by those that ran to their end."""
    ledger = Ledger()
    promised = Resources(240, 10**9, 4)
    gold = terms("gold", guarantee=promised, share=promised)
    batch = replace(terms("batch"), evictable=True)
    ledger.reserve(claim("first", REQUEST, batch, SIX, window_ms=60_000), 0)
    ledger.settle("first", 148, 8_000)
    for number in range(LIMIT):
        wanted = claim(f"b{number}", REQUEST, batch, SIX, window_ms=60_000)
        assert isinstance(ledger.reserve(wanted, 20_000), Lease)
    for number in range(3):
        taken = ledger.reserve(claim(f"g{number}", REQUEST, gold, SIX, window_ms=60_000), 20_100)
        assert isinstance(taken, Lease)
        (victim,) = ledger.reclaim(taken)
        assert ledger.settle(victim.lease_id, 20, 20_100) is not None
    outcome = ledger.reserve(claim("late", REQUEST, batch, SIX, window_ms=60_000), 20_100)
    assert isinstance(outcome, Refusal)
    assert outcome.reason is Reason.POOL_CONTENDED
    assert outcome.retry_after_ms == 7_900
