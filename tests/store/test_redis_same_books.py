"""The books on a server against the embedded ones: the same operations have the same replies and the same books."""

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from envoy_tokenpools.clock import ManualClock
from envoy_tokenpools.core.account import QUIET, Meters
from envoy_tokenpools.core.admission import Claim, Lease
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.pool import Entitlement, Reclaim
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Tick, first_tick, next_tick
from envoy_tokenpools.store.base import Reply, Store, Survivor, TickReading
from envoy_tokenpools.store.memory import MemoryStore
from tests.store.books import redis_store
from tests.support.pools import pool
from tests.support.seven import CAPACITY, COSTS, SEVEN

T = TypeVar("T")

ODD = replace(SEVEN["elastic"], name="elastic {ünï}")

MEMBERS = {
    **{name: one for name, one in SEVEN.items() if name != "elastic"},
    "spot": replace(SEVEN["spot"], reclaim=Reclaim.EVICT),
    ODD.name: ODD,
}

POOL = "{pool}"


class SameBooks(RuleBasedStateMachine):
    """Both stores, driven alike."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()

    @initialize(headroom=st.sampled_from([0.0, 0.3, 1.0]), is_published=st.booleans())
    def open(self, headroom: float, *, is_published: bool) -> None:
        """A pool of seven entitlements of all classes, of which nothing may be published yet."""
        self.clock = ManualClock(1_000_000)
        self.memory: Store = MemoryStore(self.clock)
        self.redis: Store = redis_store(self.clock)
        self.pool = replace(pool(CAPACITY, *MEMBERS.values()), headroom=headroom)
        self.usable = CAPACITY
        self.tick: Tick = first_tick(self.pool, CAPACITY)
        self.issued = 0
        self.taken: dict[str, Lease] = {}
        if is_published:
            self._publish()

    def teardown(self) -> None:
        """Close what was opened."""
        if hasattr(self, "redis"):
            self._run(self.redis.close())
        self.loop.close()

    # ------------------------------------------------------------ operations

    @rule(
        target=leases,
        name=st.sampled_from(sorted(MEMBERS)),
        cost=COSTS,
        ttl_ms=st.integers(0, 20_000),
        fingerprint=st.integers(0, 3) | st.just((1 << 63) - 1),
        is_retry=st.booleans(),
        enforce=st.integers(0, 9).map(bool),
    )
    def reserve(
        self, name: str, cost: Cost, ttl_ms: int, fingerprint: int, *, is_retry: bool, enforce: bool
    ) -> object:
        """A claim; also of an entitlement that is not published (any more)."""
        terms = self.tick.terms.get(name) or first_tick(self.pool, CAPACITY).terms.get(name)
        if terms is None:
            return multiple()
        self.issued += 1
        claim = Claim(
            lease_id=f"lease-{self.issued}",
            terms=terms,
            cost=cost,
            usable=self.usable,
            window_ms=self.pool.window_ms,
            ttl_ms=ttl_ms,
            fingerprint=fingerprint,
            is_retry=is_retry,
            enforce=enforce,
        )
        self._reserve(claim)
        return claim

    @rule(target=leases, kv_bytes=st.sampled_from([0, 10, 700]))
    def flood(self, kv_bytes: int) -> object:
        """Spot and preemptible requests take all that is free, and then guarantees are claimed."""
        what = Cost(prompt_tokens=1, output_tokens=3, kv_bytes=kv_bytes, concurrency=1)
        names = ["preemptible", "spot"] * (CAPACITY.concurrency // 2) + ["guaranteed"] * 3
        claims = [
            self.reserve(name, what, 20_000, 0, is_retry=False, enforce=True) for name in names
        ]
        return multiple(*(claim for claim in claims if isinstance(claim, Claim)))

    @rule(claim=leases)
    def replay(self, claim: Claim) -> None:
        """A claim again, whatever became of it."""
        self._reserve(claim)

    @rule(claim=leases, tokens=st.integers(0, 3_000) | st.just(1 << 50))
    def settle(self, claim: Claim, tokens: int) -> None:
        """A settlement, perhaps the second one."""
        one, other = self._both(lambda store: store.settle(POOL, claim.lease_id, tokens))
        assert one == other

    @rule(some=st.lists(leases, max_size=3), more_ms=st.integers(0, 20_000))
    def renew(self, some: list[Claim], more_ms: int) -> None:
        """Live leases, ended ones and unknown ones."""
        ids = [claim.lease_id for claim in some] + ["unknown"]
        one, other = self._both(lambda store: store.renew(POOL, ids, more_ms))
        assert one == other

    @rule(claim=leases, held_ms=st.integers(0, 9_000), ttl_ms=st.integers(0, 9_000))
    def restore(self, claim: Claim, held_ms: int, ttl_ms: int) -> None:
        """A lease that was granted once: it may be held, expired, or settled and forgotten."""
        lease = self.taken.get(claim.lease_id)
        if lease is not None:
            survivors = [Survivor(lease, held_ms)]
            self._both(lambda store: store.restore(POOL, survivors, ttl_ms))

    @rule()
    def sweep(self) -> None:
        """Leases expire."""
        one, other = self._both(lambda store: store.sweep(POOL))
        assert sorted(one, key=_by_id) == sorted(other, key=_by_id)

    @rule(ms=st.integers(1, 8_000) | st.sampled_from([100, 250, 61_000]))
    def wait(self, ms: int) -> None:
        """Time passes."""
        self.clock.advance(ms)

    @rule(
        share=st.sampled_from([1.0, 1.0, 0.5, 0.25, 0.0]),
        gone=st.frozensets(st.sampled_from(sorted(MEMBERS)), max_size=2),
        window_ms=st.sampled_from([10_000, 10_000, 2_000]),
        after_ms=st.sampled_from([0, 0, 1_000]),
        is_published=st.booleans(),
    )
    def pass_tick(
        self,
        share: float,
        gone: frozenset[str],
        window_ms: int,
        after_ms: int,
        *,
        is_published: bool,
    ) -> None:
        """A tick, at which capacity may be lost or back and entitlements may go or come."""
        one, other = self._both(lambda store: store.close_tick(POOL, after_ms))
        assert (one is None) == (other is None)
        if one is None or other is None:
            return
        assert _told(one) == _told(other)
        self.usable = Resources(
            int(CAPACITY.tokens_per_second * share),
            int(CAPACITY.kv_bytes * share),
            int(CAPACITY.concurrency * share),
        )
        members: Mapping[str, Entitlement] = {n: m for n, m in MEMBERS.items() if n not in gone}
        self.pool = replace(self.pool, entitlements=members, window_ms=window_ms)
        elapsed_ms = max(1, one.elapsed_ms)
        self.tick = next_tick(self.pool, self.tick, self.usable, one.meters, elapsed_ms)
        if is_published:
            self._publish()

    # ------------------------------------------------------------ what always holds

    @invariant()
    def the_books_show_the_same(self) -> None:
        """In all, and for each entitlement."""
        if not hasattr(self, "redis"):
            return
        one, other = self._both(lambda store: store.snapshot(POOL))
        assert one.total == other.total
        accounts = {name: held for name, held in one.accounts.items() if held != InUse()}
        assert accounts == other.accounts

    # ------------------------------------------------------------ parts

    def _reserve(self, claim: Claim) -> None:
        one, other = self._both(lambda store: store.reserve(POOL, claim))
        assert one == other
        assert isinstance(one, Reply)
        if isinstance(one.outcome, Lease):
            self.taken.setdefault(claim.lease_id, one.outcome)

    def _publish(self) -> None:
        one, other = self._both(lambda store: store.publish(POOL, self.tick, self.pool.window_ms))
        assert one is other is True

    def _both(self, call: Any) -> tuple[Any, Any]:
        return self._run(call(self.memory)), self._run(call(self.redis))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)


def _by_id(lease: Lease) -> str:
    return lease.lease_id


def _told(reading: TickReading) -> tuple[int, dict[str, Meters]]:
    """Whoever did nothing need not be named."""
    return reading.elapsed_ms, {n: one for n, one in reading.meters.items() if one != QUIET}


TestSameBooks = SameBooks.TestCase
TestSameBooks.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
