"""
The books of one pool: what is leased, by whom, and what was asked for since the last tick.

The rules, which every store must keep (the memory store is this class; Redis mirrors it):

1. What is in use is the sum of the live leases; no counter is ever negative.
2. A lease is settled once. Settling it again, or an unknown one, changes nothing.
3. A lease that expired gives back concurrency and KV bytes by itself; a late settlement still corrects the tokens.
4. The same claim twice is one lease.
5. A refusal takes nothing.
6. What was published is in force for everybody, whatever terms a claim brings with it; those count only for an
   entitlement of which nothing was published.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from envoy_tokenpools.core.account import Account, Meters
from envoy_tokenpools.core.admission import (
    WHOLE_PPM,
    Balance,
    Claim,
    Lease,
    Reason,
    Refusal,
    Settlement,
    Terms,
)
from envoy_tokenpools.core.bucket import TokenBucket
from envoy_tokenpools.core.evictions import Evictions
from envoy_tokenpools.core.holds import HoldTime
from envoy_tokenpools.core.judging import (
    beyond_share,
    fits,
    fits_share,
    own_refusal,
    room_refusal,
    short_of_tokens,
    too_many_leases,
)
from envoy_tokenpools.core.pool import Limits
from envoy_tokenpools.core.refusals import RefusalLog
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.withheld import Withheld

MAX_LEASES_PER_ENTITLEMENT = 100_000
"""More than any pool runs at once. In shadow mode and without a concurrency limit nothing else bounds the memory."""

MAX_EXPIRED = 10_000
"""Expired leases remembered for a late settlement; older ones lose only the correction of their tokens."""

_NO_EXPIRY_MS = 1 << 52
"""When nothing is held, nothing expires until then."""

OVERCHARGE = 4
"""A settlement beyond this many times what the pool is said to process in the time is a broken report."""


@dataclass(frozen=True, slots=True)
class InUse:
    """What one entitlement, or the whole pool, holds: live leases and what they reserve."""

    in_flight: int = 0
    concurrency: int = 0
    reserved_tokens: int = 0
    kv_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LedgerView:
    """A pool's books at one moment."""

    total: InUse
    accounts: Mapping[str, InUse]


@dataclass(slots=True)
class Ledger:
    """The mutable books of one pool. Not thread safe; time is an argument."""

    tokens: TokenBucket = field(default_factory=lambda: TokenBucket(0, 0))
    concurrency: int = 0
    kv_bytes: int = 0
    _accounts: dict[str, Account] = field(default_factory=dict)
    _leases: dict[str, Lease] = field(default_factory=dict)
    _expired: OrderedDict[str, Lease] = field(default_factory=OrderedDict)
    _no_expiry_before_ms: int = _NO_EXPIRY_MS
    _refusals: RefusalLog = field(default_factory=RefusalLog)
    _terms: Mapping[str, Terms] = field(default_factory=dict)
    _withheld: Withheld = field(default_factory=Withheld)
    _evictions: Evictions = field(default_factory=Evictions)
    _hold_time: HoldTime = field(default_factory=HoldTime)
    _tick_at_ms: int = 0
    _usable: Resources = Resources.NONE
    _best_rate: int = 0
    _is_published: bool = False

    @classmethod
    def opened_at(cls, now_ms: int) -> "Ledger":
        """Empty books whose first tick began at `now_ms`."""
        return cls(_tick_at_ms=now_ms)

    def reserve(self, claim: Claim, now_ms: int) -> Lease | Refusal:
        """
        Take the claim's cost, or say why not (design: admission rules 4 and 5).

        In shadow mode the lease is taken in any case and carries the refusal.
        """
        known = self._leases.get(claim.lease_id)
        if known is not None:
            return known
        account = self._account(claim, now_ms)
        terms = account.terms
        within_share = fits_share(account, terms.share, claim.cost)
        within_guarantee = terms.guarantee.concurrency > 0 and fits(
            account, terms.guarantee, account.guarantee, claim.cost
        )
        tokens_guaranteed = account.guarantee.rate > 0 and account.guarantee.fits(claim.cost.tokens)
        refusal = own_refusal(account, claim.cost, lambda: self._own_wait_ms(account, now_ms))
        if refusal is None and not within_guarantee:
            refusal = self._pool_refusal(
                account,
                claim,
                now_ms,
                within_share=within_share,
                tokens_guaranteed=tokens_guaranteed,
            )
        is_full = account.in_flight >= MAX_LEASES_PER_ENTITLEMENT
        if is_full:
            refusal = too_many_leases(claim.cost, self._own_wait_ms(account, now_ms))
        if refusal is not None and (claim.enforce or is_full):
            account.count_shed(claim.fingerprint, claim.cost, now_ms, is_retry=claim.is_retry)
            return refusal
        lease = Lease(
            lease_id=claim.lease_id,
            entitlement=terms.entitlement,
            cost=claim.cost,
            within_share=within_share,
            within_guarantee=within_guarantee,
            tokens_guaranteed=tokens_guaranteed,
            pool_ppm=WHOLE_PPM - (terms.withheld_ppm if tokens_guaranteed else 0),
            admitted_at_ms=now_ms,
            expires_at_ms=now_ms + claim.ttl_ms,
            eviction_rank=terms.rank if terms.evictable and claim.enforce else None,
            shadowed=refusal,
        )
        self._expired.pop(lease.lease_id, None)
        self._hold(account, lease, 1, now_ms)
        self._charge(account, lease, 0, claim.cost.tokens)
        account.count_admitted(claim.fingerprint, claim.cost)
        self._refusals.admitted(lease.entitlement, claim.fingerprint, now_ms)
        return lease

    def holds(self, lease_id: str) -> bool:
        """Whether a lease is held under this id: its claim is being sent again."""
        return lease_id in self._leases

    def reclaim(self, lease: Lease) -> tuple[Lease, ...]:
        """
        The leases that are to be ended because `lease` was just taken inside a guarantee in a pool that was full.

        Each is told once, and holds what it holds until it is settled or expires; what is being freed already is not
        asked for again. Whoever holds them has to end them. Without any, the pool holds more than it should.
        """
        if not lease.within_guarantee:
            return ()
        return self._evictions.take_back(
            sequences=self.concurrency - self._usable.concurrency,
            kv_bytes=self.kv_bytes - self._usable.kv_bytes,
        )

    def settle(self, lease_id: str, tokens: int, now_ms: int) -> Settlement | None:
        """
        End a lease and charge `tokens` in place of what was reserved; None if it is not known (any more).

        More than `OVERCHARGE` times what the pool can process in the time is not believed: it would block the
        entitlement for good.
        """
        lease = self._leases.get(lease_id)
        late = lease is None
        if lease is None:
            lease = self._expired.pop(lease_id, None)
            if lease is None:
                return None
        account = self._accounts[lease.entitlement]
        account.drain(now_ms)
        self.tokens.drain(now_ms)
        held_ms = max(0, now_ms - lease.admitted_at_ms)
        tokens = min(tokens, self._most_tokens(lease, held_ms))
        self._charge(account, lease, lease.cost.tokens, tokens)
        account.count_correction(tokens - lease.cost.tokens)
        if not late:
            if not self._evictions.is_freeing(lease_id):  # else its end was not its own
                self._hold_time.learn(held_ms)
            if lease.within_guarantee:
                self._withheld.rest(
                    account, lease.cost, now_ms, (self._hold_time.mean_us or 0) // 1_000
                )
            self._hold(account, lease, -1, now_ms)
        return Settlement(lease, tokens, held_ms, late)

    def renew(self, lease_ids: Iterable[str], expires_at_ms: int) -> tuple[str, ...]:
        """Let live leases expire no earlier than `expires_at_ms`; those that are not held are returned."""
        missing: list[str] = []
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None:
                missing.append(lease_id)
            elif lease.expires_at_ms < expires_at_ms:
                self._leases[lease_id] = replace(lease, expires_at_ms=expires_at_ms)
        return tuple(missing)

    def restore(self, lease: Lease, now_ms: int) -> None:
        """
        Hold a lease again whose request runs on though the books have lost it, whether it fits or not.

        One that expired is only held; one that is not known at all is charged, too.
        """
        if lease.lease_id in self._leases:
            self.renew([lease.lease_id], lease.expires_at_ms)
            return
        is_charged = self._expired.pop(lease.lease_id, None) is not None
        account = self._accounts.get(lease.entitlement)
        if account is None:
            unknown = Terms(lease.entitlement, 0.0, Resources.NONE, Resources.NONE, Limits())
            account = self._open(unknown, self.tokens.window_ms, now_ms)
        account.drain(now_ms)
        self.tokens.drain(now_ms)
        self._hold(account, lease, 1, now_ms)
        if not is_charged:
            self._charge(account, lease, 0, lease.cost.tokens)
            account.count_admitted(0, lease.cost)

    def is_freeing(self, lease_id: str) -> bool:
        """Whether a lease was told to end, and has not."""
        return self._evictions.is_freeing(lease_id)

    def sweep(self, now_ms: int) -> tuple[Lease, ...]:
        """Take back the leases whose owner is gone; their tokens stay charged as reserved."""
        if self._no_expiry_before_ms > now_ms:
            return ()
        expired = tuple(lease for lease in self._leases.values() if lease.expires_at_ms <= now_ms)
        for lease in expired:
            self._hold(self._accounts[lease.entitlement], lease, -1, now_ms)
            self._expired[lease.lease_id] = lease
            if len(self._expired) > MAX_EXPIRED:
                self._expired.popitem(last=False)
        expiries = (lease.expires_at_ms for lease in self._leases.values())
        self._no_expiry_before_ms = min(expiries, default=_NO_EXPIRY_MS)
        return expired

    def tick_ms(self, now_ms: int) -> int:
        """How long the tick has lasted."""
        return now_ms - self._tick_at_ms

    def close_tick(self, now_ms: int) -> tuple[int, dict[str, Meters]]:
        """
        How many milliseconds passed since the last tick, and what every entitlement did; new meters start.
        """
        elapsed_ms = now_ms - self._tick_at_ms
        self._tick_at_ms = now_ms
        self._withheld.end_rests(now_ms)
        owners = {lease.entitlement for lease in self._expired.values()}
        readings: dict[str, Meters] = {}
        for name, account in list(self._accounts.items()):
            readings[name] = account.close_tick(now_ms)
            if name in self._terms or name in owners:
                continue
            account.drain(now_ms)
            if account.is_idle:
                self._apply(account, _withdrawn(account.terms), 0, now_ms)
                del self._accounts[name]
        return elapsed_ms, readings

    def publish(
        self, terms: Mapping[str, Terms], usable: Resources, window_ms: int, now_ms: int
    ) -> None:
        """
        Put the outcome of a tick in force. Entitlements that are gone keep their leases and withhold nothing.
        """
        self._terms, self._is_published = terms, True
        for name, account in self._accounts.items():
            if name not in terms:
                self._agree(account, _withdrawn(account.terms), window_ms, now_ms)
        for entitlement_terms in terms.values():
            account = self._open(entitlement_terms, window_ms, now_ms)
            self._agree(account, entitlement_terms, window_ms, now_ms)
        self._set_usable(usable, window_ms, now_ms)

    def balance(self, entitlement: str, now_ms: int) -> Balance:
        """What an entitlement has left, as of its last claim."""
        account = self._accounts[entitlement]
        bucket = account.limit
        if bucket is None:
            bucket = account.share if account.share.rate else self.tokens
        limit = account.terms.limits.concurrency
        if limit is None:
            withheld = self._withheld.sequences_from(account)
            limit = account.concurrency + max(
                0, self._usable.concurrency - self.concurrency - withheld
            )
        free = max(0, limit - account.concurrency)
        return Balance(
            limit_tokens=bucket.depth_milli // 1_000,
            remaining_tokens=bucket.remaining,
            reset_tokens_ms=-(-bucket.used_milli // bucket.rate) if bucket.rate else 0,
            limit_concurrency=limit,
            remaining_concurrency=free,
            reset_concurrency_ms=0 if free else self._own_wait_ms(account, now_ms, ahead=0),
        )

    def view(self) -> LedgerView:
        """The books as plain numbers."""
        accounts = {
            name: InUse(
                account.in_flight, account.concurrency, account.reserved_tokens, account.kv_bytes
            )
            for name, account in self._accounts.items()
        }
        reserved_tokens = sum(in_use.reserved_tokens for in_use in accounts.values())
        total = InUse(len(self._leases), self.concurrency, reserved_tokens, self.kv_bytes)
        return LedgerView(total, accounts)

    # ------------------------------------------------------------------ judging

    def _pool_refusal(
        self,
        account: Account,
        claim: Claim,
        now_ms: int,
        *,
        within_share: bool,
        tokens_guaranteed: bool,
    ) -> Refusal | None:
        """Rule 5: the free capacity, and those who were refused before with a better claim."""
        usable, terms = self._usable, account.terms
        withheld_sequences = self._withheld.sequences_from(account)
        withheld_kv_bytes = self._withheld.kv_bytes_from(account)

        def wait_ms() -> int:
            return self._pool_wait_ms(account.meters.pending_concurrency, now_ms)

        refusal = room_refusal(
            claim.cost,
            free_sequences=usable.concurrency - self.concurrency - withheld_sequences,
            free_kv_bytes=usable.kv_bytes - self.kv_bytes - withheld_kv_bytes,
            wait_ms=wait_ms,
        )
        if refusal is None and not (tokens_guaranteed or self.tokens.fits(claim.cost.tokens)):
            refusal = short_of_tokens(
                Reason.POOL_CONTENDED, self.tokens, claim.cost, account.guarantee
            )
        passes_somebody = (
            not within_share
            and bool(self._leases)
            and self._refusals.blocks(terms.entitlement, terms.precedence, now_ms)
        )
        if refusal is None and passes_somebody:
            refusal = beyond_share(account, claim.cost, wait_ms())
        fits_alone = (
            claim.cost.concurrency <= usable.concurrency - withheld_sequences
            and claim.cost.kv_bytes <= usable.kv_bytes - withheld_kv_bytes
        )
        if refusal is not None and fits_alone:  # else nobody has to wait for what can never be
            self._refusals.add(
                terms.entitlement,
                terms.precedence,
                claim.fingerprint,
                inside_share=within_share,
                retry_after_ms=refusal.retry_after_ms,
                now_ms=now_ms,
            )
        return refusal

    def _pool_wait_ms(self, ahead: int, now_ms: int) -> int:
        """When a lease of the pool is expected to end for whoever has `ahead` others before it."""
        return self._hold_time.wait_ms(self._leases, self._usable, ahead, now_ms)

    def _own_wait_ms(self, account: Account, now_ms: int, ahead: int | None = None) -> int:
        """The same of the entitlement's own leases; without `ahead`, behind those that it has waiting."""
        if ahead is None:
            ahead = account.meters.pending_concurrency
        return self._hold_time.wait_ms(account.leases, self._usable, ahead, now_ms)

    def _most_tokens(self, lease: Lease, held_ms: int) -> int:
        """The most that a report of this lease is believed; by the best rate that was, for it may be lost by now."""
        in_time = self._best_rate * (held_ms + self.tokens.window_ms) // 1_000
        return lease.cost.tokens + OVERCHARGE * in_time

    # ------------------------------------------------------------------ booking

    def _hold(self, account: Account, lease: Lease, sign: int, now_ms: int) -> None:
        self.concurrency += sign * lease.cost.concurrency
        self.kv_bytes += sign * lease.cost.kv_bytes
        account.hold(lease.cost, sign, now_ms)
        if sign > 0:
            self._leases[lease.lease_id] = account.leases[lease.lease_id] = lease
            self._no_expiry_before_ms = min(self._no_expiry_before_ms, lease.expires_at_ms)
            self._evictions.add(lease)
        else:
            del self._leases[lease.lease_id], account.leases[lease.lease_id]
            self._evictions.remove(lease)
        self._withheld.update(account)

    def _charge(self, account: Account, lease: Lease, charged: int, tokens: int) -> None:
        """Charge `tokens` in place of `charged` before."""
        account.charge(
            tokens - charged, within_share=lease.within_share, guaranteed=lease.tokens_guaranteed
        )
        now, before = tokens * lease.pool_ppm, charged * lease.pool_ppm
        self.tokens.take(now // WHOLE_PPM - before // WHOLE_PPM)

    # ------------------------------------------------------------------ terms

    def _account(self, claim: Claim, now_ms: int) -> Account:
        terms = claim.terms
        if terms.entitlement in self._terms:  # put in force when it was published
            account = self._accounts[terms.entitlement]
        else:
            account = self._open(terms, claim.window_ms, now_ms)
            self._agree(account, terms, claim.window_ms, now_ms)
        if self._is_published:
            self._set_usable(self._usable, self.tokens.window_ms, now_ms)
        else:
            self._set_usable(claim.usable, claim.window_ms, now_ms)
        self._withheld.end_rests(now_ms)
        account.drain(now_ms)
        return account

    def _open(self, terms: Terms, window_ms: int, now_ms: int) -> Account:
        account = self._accounts.get(terms.entitlement)
        if account is None:
            blank = replace(terms, guarantee=Resources.NONE)
            account = Account(blank, TokenBucket(0, window_ms, drained_at_ms=now_ms))
            self._accounts[terms.entitlement] = account
            self._apply(account, terms, window_ms, now_ms)
        return account

    def _agree(self, account: Account, terms: Terms, window_ms: int, now_ms: int) -> None:
        """Put terms in force unless they are: most ticks change few."""
        is_same_window = account.share.window_ms == window_ms
        if is_same_window and account.terms is terms:
            return
        if is_same_window and account.terms == terms:
            account.terms = terms  # the same object costs nothing next time
        else:
            self._apply(account, terms, window_ms, now_ms)

    def _apply(self, account: Account, terms: Terms, window_ms: int, now_ms: int) -> None:
        self._withheld.replace_rate(account.terms, terms)
        account.set_rates(terms, window_ms, now_ms)
        self._withheld.update(account)

    def _set_usable(self, usable: Resources, window_ms: int, now_ms: int) -> None:
        """What is withheld of the token rate is never in the bucket that everybody shares."""
        self._usable = usable
        self._best_rate = max(self._best_rate, usable.tokens_per_second)
        rate = max(0, usable.tokens_per_second - self._withheld.tokens_per_second)
        self.tokens.set_rate(rate, window_ms, now_ms)


def _withdrawn(terms: Terms) -> Terms:
    """Terms of an entitlement that is gone."""
    return replace(terms, guarantee=Resources.NONE, share=Resources.NONE)
