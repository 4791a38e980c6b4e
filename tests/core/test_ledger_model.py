"""The ledger under any sequence of operations, against a model that only remembers which leases live."""

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from envoy_tokenpools.core.account import Account, Meters
from envoy_tokenpools.core.admission import WHOLE_PPM, Claim, Lease, Reason, Refusal
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.ledger import InUse, Ledger
from envoy_tokenpools.core.pool import Entitlement, Pool
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Tick, first_tick, next_tick
from tests.support.pools import pool
from tests.support.seven import CAPACITY, COSTS
from tests.support.seven import SEVEN as MEMBERS

DRAINED_MS = 10**9
"""Long after everything has drained."""


@dataclass(slots=True)
class Live:
    """What the model remembers of a live lease."""

    entitlement: str
    cost: Cost
    expires_at_ms: int


class LedgerModel(RuleBasedStateMachine):
    """Claims, settlements, renewals, sweeps and ticks in any order, at times that move on."""

    leases = Bundle("leases")

    @initialize(headroom=st.sampled_from([0.0, 0.3, 1.0]))
    def open(self, headroom: float) -> None:
        """A pool of seven entitlements of all classes."""
        self.ledger = Ledger()
        self.now_ms = 0
        self.model: dict[str, Live] = {}
        self.expired: set[str] = set()
        self.told: set[str] = set()
        self.evictable: set[str] = set()
        self.ends: Counter[str] = Counter()
        self.usable = CAPACITY
        self.pool: Pool = replace(pool(CAPACITY, *MEMBERS.values()), headroom=headroom)
        self.issued = 0
        self.tick: Tick = first_tick(self.pool, CAPACITY)
        self._publish()

    # ------------------------------------------------------------ operations

    @rule(
        target=leases,
        name=st.sampled_from(sorted(MEMBERS)),
        cost=COSTS,
        ttl_ms=st.integers(0, 20_000),
        fingerprint=st.integers(0, 3),
        is_retry=st.booleans(),
        enforce=st.integers(0, 9).map(bool),
    )
    def reserve(
        self,
        name: str,
        cost: Cost,
        ttl_ms: int,
        fingerprint: int,
        *,
        is_retry: bool,
        enforce: bool,
    ) -> object:
        """A claim under the terms in force; a refusal leaves the books as they were."""
        if name not in self.tick.terms:
            return multiple()
        self.issued += 1
        claim = Claim(
            lease_id=f"lease-{self.issued}",
            terms=self.tick.terms[name],
            cost=cost,
            usable=self.usable,
            window_ms=self.pool.window_ms,
            ttl_ms=ttl_ms,
            fingerprint=fingerprint,
            is_retry=is_retry,
            enforce=enforce,
        )
        before = self.ledger.view().total
        refusals = copy.deepcopy(self.ledger._refusals)
        outcome = self.ledger.reserve(claim, self.now_ms)
        if isinstance(outcome, Refusal):
            assert enforce
            assert self.ledger.view().total == before
            assert outcome.need > outcome.available >= 0 or outcome.need == 0
            assert outcome.retry_after_ms >= 1
            assert self.model or outcome.reason is not Reason.LOW_PRIORITY, "nobody to pass"
            if not self._fits_alone(name, cost):
                for log in (refusals, self.ledger._refusals):
                    log.blocks("nobody", (0, 0.0), self.now_ms)  # forgets what is over
                assert self.ledger._refusals == refusals, "nobody waits for what can never be"
            return multiple()
        self.model[claim.lease_id] = Live(name, cost, outcome.expires_at_ms)
        self._check_admission(outcome)
        if enforce and name == "preemptible":
            self.evictable.add(claim.lease_id)
        if enforce:
            self._reclaim(outcome)
        return claim

    @rule(target=leases, kv_bytes=st.sampled_from([0, 10, 700]))
    def flood(self, kv_bytes: int) -> object:
        """Preemptible requests take all that is free, and then a guarantee is claimed."""
        what = Cost(prompt_tokens=1, output_tokens=0, kv_bytes=kv_bytes, concurrency=1)
        names = ["preemptible"] * CAPACITY.concurrency + ["guaranteed", "guaranteed"]
        claims = [
            self.reserve(name, what, 20_000, 0, is_retry=False, enforce=True) for name in names
        ]
        return multiple(*(claim for claim in claims if isinstance(claim, Claim)))

    @rule(claim=leases)
    def replay(self, claim: Claim) -> None:
        """The same claim while its lease lives is the same lease."""
        if claim.lease_id in self.model:
            before = self.ledger.view()
            outcome = self.ledger.reserve(claim, self.now_ms)
            assert isinstance(outcome, Lease)
            assert outcome.lease_id == claim.lease_id
            assert self.ledger.view() == before

    @rule(claim=leases, tokens=st.integers(0, 3_000))
    def settle(self, claim: Claim, tokens: int) -> None:
        """Once it ends a live lease, once it corrects an expired one, and then never again."""
        settlement = self.ledger.settle(claim.lease_id, tokens, self.now_ms)
        if claim.lease_id in self.model:
            assert settlement is not None
            assert not settlement.late
            self._end(claim.lease_id)
        elif claim.lease_id in self.expired:
            assert settlement is not None
            assert settlement.late
            self.expired.discard(claim.lease_id)
        else:
            assert settlement is None
        assert self.ledger.settle(claim.lease_id, tokens, self.now_ms) is None

    @rule(claim=consumes(leases))
    def lose(self, claim: Claim) -> None:
        """Its owner is gone: nobody will settle it."""

    @rule(claim=leases, more_ms=st.integers(0, 20_000))
    def renew(self, claim: Claim, more_ms: int) -> None:
        """A live lease lives on; an ended one does not come back."""
        until_ms = self.now_ms + more_ms
        self.ledger.renew([claim.lease_id, "unknown"], until_ms)
        live = self.model.get(claim.lease_id)
        if live is not None:
            live.expires_at_ms = max(live.expires_at_ms, until_ms)

    @rule()
    def sweep(self) -> None:
        """Exactly the leases whose time is over return."""
        due = {name for name, live in self.model.items() if live.expires_at_ms <= self.now_ms}
        assert {lease.lease_id for lease in self.ledger.sweep(self.now_ms)} == due
        for lease_id in due:
            self._end(lease_id)
            self.expired.add(lease_id)

    @rule(ms=st.integers(1, 8_000))
    def wait(self, ms: int) -> None:
        """Time passes."""
        self.now_ms += ms

    @rule(
        share=st.sampled_from([1.0, 1.0, 0.5, 0.25, 0.0]),
        gone=st.frozensets(st.sampled_from(sorted(MEMBERS)), max_size=2),
        wait_ms=st.integers(0, 5_000),
    )
    def pass_tick(self, share: float, gone: frozenset[str], wait_ms: int) -> None:
        """A tick, at which capacity may be lost or back and entitlements may go or come."""
        self.now_ms += wait_ms
        elapsed_ms, readings = self.ledger.close_tick(self.now_ms)
        for meters in readings.values():
            assert min(meters.pending_tokens, meters.pending_concurrency) >= 0
            assert min(meters.pending_kv_bytes, meters.sequence_ms, meters.kv_byte_ms) >= 0
        self.usable = Resources(
            int(CAPACITY.tokens_per_second * share),
            int(CAPACITY.kv_bytes * share),
            int(CAPACITY.concurrency * share),
        )
        members = {name: one for name, one in MEMBERS.items() if name not in gone}
        self._next_tick(members, readings, elapsed_ms)

    # ------------------------------------------------------------ what always holds

    @invariant()
    def what_is_in_use_is_the_sum_of_the_live_leases(self) -> None:
        """For the pool and for each entitlement."""
        expected = {name: InUse() for name in MEMBERS}
        for live in self.model.values():
            held = expected[live.entitlement]
            expected[live.entitlement] = _plus(held, 1, live.cost)
        total = InUse()
        for live in self.model.values():
            total = _plus(total, 1, live.cost)
        view = self.ledger.view()
        assert view.total == total
        for name, held in expected.items():
            assert view.accounts.get(name, InUse()) == held

    @invariant()
    def what_is_being_freed_is_what_was_told_to_end_and_has_not(self) -> None:
        """Settled, expired or lost: its capacity counts once."""
        freeing = [live.cost for name, live in self.model.items() if name in self.told]
        evictions = self.ledger._evictions
        assert evictions.freeing_concurrency == sum(cost.concurrency for cost in freeing)
        assert evictions.freeing_kv_bytes == sum(cost.kv_bytes for cost in freeing)

    @invariant()
    def nothing_is_negative(self) -> None:
        """No counter, no bucket."""
        for account in self.ledger._accounts.values():
            assert min(account.concurrency, account.kv_bytes, account.reserved_tokens) >= 0
            assert all(bucket.used_milli >= 0 for bucket in account._buckets())
        assert self.ledger.tokens.used_milli >= 0
        assert self.ledger.tokens.rate >= 0

    @invariant()
    def what_is_withheld_is_the_sum_of_what_idles(self) -> None:
        """Of every guarantee its part, rounded up; only of entitlements that are there."""
        accounts = self.ledger._accounts.values()
        sequences, kv_bytes, tokens = 0, 0, 0
        for account in accounts:
            idle = max(0, account.terms.guarantee.concurrency - account.concurrency)
            resting = min(idle, account.resting_concurrency) * WHOLE_PPM
            assert account.withheld_sequences_ppm == max(idle * account.terms.withheld_ppm, resting)
            idle = max(0, account.terms.guarantee.kv_bytes - account.kv_bytes)
            resting = min(idle, account.resting_kv_bytes)
            assert account.withheld_kv_bytes == max(_part(idle, account), resting)
            sequences += account.withheld_sequences_ppm
            kv_bytes += account.withheld_kv_bytes
            tokens += _part(account.terms.guarantee.tokens_per_second, account)
        assert self.ledger._withheld.sequences_ppm == sequences
        assert self.ledger._withheld.kv_bytes == kv_bytes
        assert self.ledger._withheld.tokens_per_second == tokens
        assert self.ledger.tokens.rate == max(0, self.usable.tokens_per_second - tokens)

    def teardown(self) -> None:
        """After all have ended nothing is held, everything drains, and each lease ended once."""
        if not hasattr(self, "ledger"):
            return
        for lease_id in list(self.model):
            assert self.ledger.settle(lease_id, 10, self.now_ms) is not None
            self._end(lease_id)
        self.now_ms += DRAINED_MS
        assert self.ledger.sweep(self.now_ms) == ()
        assert self.ledger.view().total == InUse()
        self.usable = CAPACITY
        for _ in range(3):
            elapsed_ms, readings = self.ledger.close_tick(self.now_ms)
            self._next_tick(dict(MEMBERS), readings, elapsed_ms)
            self.now_ms += DRAINED_MS
        for account in self.ledger._accounts.values():
            account.drain(self.now_ms)
            self.ledger._withheld.end_rests(self.now_ms)
            assert account.is_idle
            assert account.meters.peak_concurrency == 0
            assert account.share.used_milli == account.guarantee.used_milli == 0
        self.ledger.tokens.drain(self.now_ms)
        assert self.ledger.tokens.used_milli == 0
        assert set(self.ends.values()) <= {1}

    # ------------------------------------------------------------ parts

    def _reclaim(self, lease: Lease) -> None:
        """Whoever is told to end is told once, may be evicted, and is needed; enough are, if there are enough."""
        ledger = self.ledger
        freeing = ledger._evictions.freeing_concurrency, ledger._evictions.freeing_kv_bytes
        sequences = ledger.concurrency - self.usable.concurrency - freeing[0]
        kv_bytes = ledger.kv_bytes - self.usable.kv_bytes - freeing[1]
        victims = ledger.reclaim(lease)
        assert lease.within_guarantee or not victims
        for victim in victims:
            assert sequences > 0 or (kv_bytes > 0 and victim.cost.kv_bytes), "ended in vain"
            assert victim.lease_id in self.model
            assert victim.lease_id in self.evictable - self.told
            self.told.add(victim.lease_id)
            sequences -= victim.cost.concurrency
            kv_bytes -= victim.cost.kv_bytes
        left = [self.model[name].cost for name in self.evictable - self.told if name in self.model]
        if lease.within_guarantee and left:
            assert sequences <= 0
            assert kv_bytes <= 0 or not any(cost.kv_bytes for cost in left)
        assert ledger.reclaim(lease) == (), "told twice"

    def _check_admission(self, lease: Lease) -> None:
        account = self.ledger._accounts[lease.entitlement]
        terms = account.terms
        if lease.within_guarantee:
            assert account.concurrency <= terms.guarantee.concurrency
            assert account.kv_bytes <= terms.guarantee.kv_bytes
        elif lease.shadowed is None:
            others = self.ledger._withheld.sequences_from(account)
            assert self.ledger.concurrency + others <= self.usable.concurrency
            others = self.ledger._withheld.kv_bytes_from(account)
            assert self.ledger.kv_bytes + others <= self.usable.kv_bytes
        if lease.shadowed is None:
            limits = terms.limits
            assert limits.concurrency is None or account.concurrency <= limits.concurrency
            assert limits.kv_bytes is None or account.kv_bytes <= limits.kv_bytes

    def _fits_alone(self, name: str, cost: Cost) -> bool:
        """Whether the pool has the room while all others leave of it what they do not withhold."""
        account = self.ledger._accounts[name]
        others = self.ledger._withheld.sequences_from(account)
        others_kv_bytes = self.ledger._withheld.kv_bytes_from(account)
        return (
            cost.concurrency <= self.usable.concurrency - others
            and cost.kv_bytes <= self.usable.kv_bytes - others_kv_bytes
        )

    def _end(self, lease_id: str) -> None:
        del self.model[lease_id]
        self.ends[lease_id] += 1

    def _next_tick(
        self, members: dict[str, Entitlement], readings: Mapping[str, Meters], elapsed_ms: int
    ) -> None:
        self.pool = replace(self.pool, entitlements=members)
        self.tick = next_tick(self.pool, self.tick, self.usable, readings, elapsed_ms)
        for standing in self.tick.standings.values():
            assert -1 <= standing.debt <= 1
            assert standing.burst >= 0
        self._publish()

    def _publish(self) -> None:
        self.ledger.publish(self.tick.terms, self.usable, self.pool.window_ms, self.now_ms)


def _plus(held: InUse, leases: int, cost: Cost) -> InUse:
    return InUse(
        held.in_flight + leases,
        held.concurrency + cost.concurrency,
        held.reserved_tokens + cost.tokens,
        held.kv_bytes + cost.kv_bytes,
    )


def _part(amount: int, account: Account) -> int:
    """The withheld millionths of an amount, rounded up."""
    return -(-amount * account.terms.withheld_ppm // 1_000_000)


LedgerModel.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

TestLedgerModel = LedgerModel.TestCase
