"""
One entitlement's page in the books of a pool: what is in use, and what was asked for since the last tick.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from envoy_tokenpools.core.admission import Lease, Terms
from envoy_tokenpools.core.bucket import TokenBucket
from envoy_tokenpools.core.cost import Cost

RETRY_WINDOW_MS = 60_000
"""The same body shed again within this time is the same demand, tried again."""

MAX_REMEMBERED_SHEDS = 4_096
"""Shed requests remembered per entitlement to recognise retries; a flood beyond it counts as new demand."""


@dataclass(slots=True)
class Meters:
    """
    What one entitlement did in one tick.

    Tokens are what was reserved, corrected when a lease settles; a correction may make them negative, which the
    next tick then carries.

    Attributes:
        demanded_tokens: offered: admitted, or shed and not a retry.
        delivered_tokens: admitted.
        pending_tokens: of distinct requests that were shed and not admitted later in this tick.
        pending_kv_bytes: KV bytes of those.
        pending_concurrency: sequences of those.
        peak_concurrency: most sequences in use at once.
        peak_kv_bytes: most KV bytes in use at once.
        sequence_ms: sequences in use, summed over milliseconds.
        kv_byte_ms: KV bytes in use, summed over milliseconds.
    """

    demanded_tokens: int = 0
    delivered_tokens: int = 0
    pending_tokens: int = 0
    pending_kv_bytes: int = 0
    pending_concurrency: int = 0
    peak_concurrency: int = 0
    peak_kv_bytes: int = 0
    sequence_ms: int = 0
    kv_byte_ms: int = 0

    def pend(self, cost: Cost, sign: int) -> None:
        """Count (`sign` 1) or discount (-1) a request that waits outside."""
        self.pending_tokens += sign * cost.tokens
        self.pending_kv_bytes += sign * cost.kv_bytes
        self.pending_concurrency += sign * cost.concurrency


QUIET = Meters()
"""Of an entitlement that did nothing; never written to."""


@dataclass(slots=True)
class _Shed:
    """A request that was shed: when first, in which tick its demand was counted, in which it last pended."""

    first_ms: int
    counted_tick: int
    pending_tick: int
    cost: Cost


@dataclass(slots=True)
class Account:
    """
    What one entitlement holds and did.

    Attributes:
        terms: the terms in force.
        share: bucket of its allocation.
        guarantee: bucket of its guarantee; of a rate of 0 for those without one.
        limit: bucket of its hard token ceiling, if it has one.
        in_flight: live leases.
        concurrency: sequences in use.
        kv_bytes: KV bytes in use.
        reserved_tokens: reserved by live leases.
        withheld_sequences_ppm: idle sequences of its guarantee that others may not use, in millionths.
        withheld_kv_bytes: idle KV bytes of its guarantee that others may not use.
        resting_concurrency: sequences of its guarantee that were given back a moment ago.
        resting_kv_bytes: KV bytes of those.
        leases: its live leases, oldest first.
        meters: since the last tick.
    """

    terms: Terms
    share: TokenBucket
    guarantee: TokenBucket = field(default_factory=lambda: TokenBucket(0, 0))
    limit: TokenBucket | None = None
    in_flight: int = 0
    concurrency: int = 0
    kv_bytes: int = 0
    reserved_tokens: int = 0
    withheld_sequences_ppm: int = 0
    withheld_kv_bytes: int = 0
    resting_concurrency: int = 0
    resting_kv_bytes: int = 0
    leases: dict[str, Lease] = field(default_factory=dict)
    meters: Meters = field(default_factory=Meters)
    _touched_at_ms: int = 0
    _tick: int = 0
    _sheds: OrderedDict[int, _Shed] = field(default_factory=OrderedDict)

    def set_rates(self, terms: Terms, window_ms: int, now_ms: int) -> None:
        """Put new terms in force."""
        self.terms = terms
        self.share.set_rate(terms.share.tokens_per_second, window_ms, now_ms)
        self.guarantee.set_rate(terms.guarantee.tokens_per_second, window_ms, now_ms)
        for bucket in (self.share, self.guarantee):
            if bucket.rate == 0:
                bucket.used_milli = 0  # nothing would ever drain it
        limit = terms.limits.tokens_per_second
        if limit is None:
            self.limit = None
        elif self.limit is None:
            self.limit = TokenBucket(limit, window_ms, drained_at_ms=now_ms)
        else:
            self.limit.set_rate(limit, window_ms, now_ms)

    def drain(self, now_ms: int) -> None:
        """Bring the buckets up to date."""
        for bucket in self._buckets():
            bucket.drain(now_ms)

    def hold(self, cost: Cost, sign: int, now_ms: int) -> None:
        """Take (`sign` 1) or give back (-1) what a lease holds while it lives."""
        self._integrate(now_ms)
        self.in_flight += sign
        self.concurrency += sign * cost.concurrency
        self.kv_bytes += sign * cost.kv_bytes
        self.reserved_tokens += sign * cost.tokens
        self.meters.peak_concurrency = max(self.meters.peak_concurrency, self.concurrency)
        self.meters.peak_kv_bytes = max(self.meters.peak_kv_bytes, self.kv_bytes)

    def rest(self, cost: Cost, sign: int) -> None:
        """Count (`sign` 1) or discount (-1) what was given back a moment ago."""
        self.resting_concurrency += sign * cost.concurrency
        self.resting_kv_bytes += sign * cost.kv_bytes

    def charge(self, tokens: int, *, within_share: bool, guaranteed: bool) -> None:
        """Take tokens from the buckets, or give them back when negative."""
        if within_share:
            self.share.take(tokens)
        if guaranteed:
            self.guarantee.take(tokens)
        if self.limit is not None:
            self.limit.take(tokens)

    def count_admitted(self, fingerprint: int, cost: Cost) -> None:
        """Meter an admitted request; one shed earlier in this tick is no longer pending, nor new demand."""
        self.meters.delivered_tokens += cost.tokens
        shed = self._sheds.pop(fingerprint, None) if fingerprint else None
        if shed is not None and shed.pending_tick == self._tick:
            self.meters.pend(shed.cost, -1)
        if shed is None or shed.counted_tick != self._tick:
            self.meters.demanded_tokens += cost.tokens

    def count_correction(self, tokens: int) -> None:
        """A lease was settled at `tokens` more (or less) than reserved: that was neither offered nor delivered."""
        self.meters.demanded_tokens += tokens
        self.meters.delivered_tokens += tokens

    def count_shed(self, fingerprint: int, cost: Cost, now_ms: int, *, is_retry: bool) -> None:
        """
        Meter a shed request: it pends once per tick, and is demanded once per `RETRY_WINDOW_MS`.

        A fingerprint of 0 is unknown and always new.
        """
        shed = self._sheds.get(fingerprint) if fingerprint else None
        if shed is not None and now_ms - shed.first_ms < RETRY_WINDOW_MS:
            if shed.pending_tick != self._tick:
                shed.pending_tick = self._tick
                self.meters.pend(cost, 1)
            return
        self.meters.pend(cost, 1)
        if not is_retry:
            self.meters.demanded_tokens += cost.tokens
        if fingerprint:
            counted = -1 if is_retry else self._tick
            self._sheds[fingerprint] = _Shed(now_ms, counted, self._tick, cost)
            self._sheds.move_to_end(fingerprint)
            if len(self._sheds) > MAX_REMEMBERED_SHEDS:
                self._sheds.popitem(last=False)

    def close_tick(self, now_ms: int) -> Meters:
        """The meters since the last tick, `QUIET` if nothing happened; new ones start with what is in use."""
        if not (self.in_flight or self._sheds) and self.meters == QUIET:
            self._touched_at_ms = now_ms
            self._tick += 1
            return QUIET
        self._integrate(now_ms)
        closed = self.meters
        self.meters = Meters(
            demanded_tokens=min(0, closed.demanded_tokens),
            delivered_tokens=min(0, closed.delivered_tokens),
            peak_concurrency=self.concurrency,
            peak_kv_bytes=self.kv_bytes,
        )
        self._tick += 1
        while self._sheds:
            fingerprint, oldest = next(iter(self._sheds.items()))
            if now_ms - oldest.first_ms < RETRY_WINDOW_MS:
                break
            del self._sheds[fingerprint]
        return closed

    @property
    def is_idle(self) -> bool:
        """Whether forgetting this account would lose nothing."""
        return not (self.in_flight or self._sheds or self.resting_concurrency) and not any(
            bucket.rate and bucket.used_milli for bucket in self._buckets()
        )

    def _buckets(self) -> tuple[TokenBucket, ...]:
        if self.limit is None:
            return self.share, self.guarantee
        return self.share, self.guarantee, self.limit

    def _integrate(self, now_ms: int) -> None:
        elapsed_ms = now_ms - self._touched_at_ms
        if elapsed_ms > 0:
            self._touched_at_ms = now_ms
            self.meters.sequence_ms += self.concurrency * elapsed_ms
            self.meters.kv_byte_ms += self.kv_bytes * elapsed_ms
