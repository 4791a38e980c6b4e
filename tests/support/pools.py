"""Small pools, entitlements, terms and claims, with the numbers that a test does not care about filled in."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from envoy_tokenpools.core.account import Meters
from envoy_tokenpools.core.admission import Claim, Lease, Refusal, Terms
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.ledger import Ledger
from envoy_tokenpools.core.pool import Entitlement, Limits, Mode, Pool, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Tick, first_tick, next_tick

KV_BYTES_PER_TOKEN = 1_000

PLENTY = 1_000_000_000_000
"""More of any resource than a test asks for."""


def amount(
    tokens_per_second: int = PLENTY, sequences: int = PLENTY, kv_bytes: int = PLENTY
) -> Resources:
    """An amount of the three resources; what is not named is plenty."""
    return Resources(tokens_per_second, kv_bytes, sequences)


def entitlement(
    name: str,
    service_class: ServiceClass,
    baseline: Resources = Resources.NONE,
    *,
    slo_target_ms: int | None = None,
    lend: bool = True,
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> Entitlement:
    """A bound entitlement."""
    return Entitlement(
        name=name,
        service_class=service_class,
        slo_target_ms=slo_target_ms,
        baseline=baseline,
        limits=limits,
        lend=lend,
    )


def pool(capacity: Resources, *entitlements: Entitlement, tick_ms: int = 5_000) -> Pool:
    """A pool whose KV cache holds `capacity.kv_bytes / 1000` tokens."""
    return Pool(
        name="pool",
        models=("m",),
        capacity=capacity,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        tick_ms=tick_ms,
        entitlements={one.name: one for one in entitlements},
    )


def cost(tokens: int = 1, sequences: int = 1, kv_bytes: int = 0) -> Cost:
    """The cost of a request; its tokens are all prompt."""
    return Cost(prompt_tokens=tokens, output_tokens=0, kv_bytes=kv_bytes, concurrency=sequences)


def terms(
    name: str = "a",
    *,
    weight: float = 1.0,
    share: Resources = Resources.NONE,
    guarantee: Resources = Resources.NONE,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    withheld_ppm: int = 0,
) -> Terms:
    """Terms of an entitlement that lives from the surplus, unless a share or guarantee is given."""
    return Terms(name, weight, guarantee, share, limits, withheld_ppm)


def claim(
    lease_id: str,
    what: Cost,
    whose: Terms,
    usable: Resources,
    *,
    window_ms: int = 1_000,
    ttl_ms: int = 60_000,
    fingerprint: int = 0,
    is_retry: bool = False,
    enforce: bool = True,
) -> Claim:
    """A claim on a pool whose token buckets are a second deep."""
    return Claim(
        lease_id=lease_id,
        terms=whose,
        cost=what,
        usable=usable,
        window_ms=window_ms,
        ttl_ms=ttl_ms,
        fingerprint=fingerprint,
        is_retry=is_retry,
        enforce=enforce,
    )


SURPLUS = terms("spot")
"""Lives from what nobody else uses."""


def take(
    ledger: Ledger,
    lease_id: str,
    tokens: int,
    usable: Resources,
    *,
    whose: Terms = SURPLUS,
    now_ms: int = 0,
    sequences: int = 1,
    kv_bytes: int = 0,
    ttl_ms: int = 60_000,
    enforce: bool = True,
) -> Lease | Refusal:
    """Claim `tokens`; the token buckets are a second deep."""
    what = cost(tokens, sequences, kv_bytes)
    wanted = claim(lease_id, what, whose, usable, ttl_ms=ttl_ms, enforce=enforce)
    return ledger.reserve(wanted, now_ms)


def admitted(outcome: Lease | Refusal) -> bool:
    """Whether a claim became a lease."""
    return isinstance(outcome, Lease)


def refused(outcome: Lease | Refusal) -> Refusal:
    """The refusal that a claim must have met."""
    assert isinstance(outcome, Refusal), outcome
    return outcome


@dataclass(slots=True)
class Desk:
    """
    One pool with its books and its ticks, on a time that moves only when told.

    It does what a server does around the ledger: claims carry the terms of the latest tick, ticks read and publish.
    """

    pool: Pool
    usable: Resources
    tick: Tick
    ledger: Ledger = field(default_factory=Ledger)
    now_ms: int = 0
    readings: Mapping[str, Meters] = field(default_factory=dict)
    _claims: int = 0

    @classmethod
    def of(cls, pool: Pool) -> "Desk":
        """A desk in its first tick."""
        desk = cls(pool, pool.capacity, first_tick(pool, pool.capacity))
        desk.publish()
        return desk

    def publish(self) -> None:
        """Put the latest tick in force."""
        self.ledger.publish(self.tick.terms, self.usable, self.pool.window_ms, self.now_ms)

    def claim(
        self,
        name: str,
        what: Cost,
        *,
        fingerprint: int = 0,
        is_retry: bool = False,
        ttl_ms: int = 10_000_000,
    ) -> Lease | Refusal:
        """Claim `what` for an entitlement, now."""
        self._claims += 1
        wanted = claim(
            f"lease-{self._claims}",
            what,
            self.tick.terms[name],
            self.usable,
            window_ms=self.pool.window_ms,
            ttl_ms=ttl_ms,
            fingerprint=fingerprint,
            is_retry=is_retry,
            enforce=self.pool.mode is Mode.ENFORCE,
        )
        return self.ledger.reserve(wanted, self.now_ms)

    def admit(self, name: str, what: Cost) -> Lease:
        """Claim what must be admitted."""
        outcome = self.claim(name, what)
        assert isinstance(outcome, Lease), outcome
        return outcome

    def settle(self, lease: Lease, tokens: int | None = None) -> None:
        """End a lease, at what it reserved unless `tokens` is given."""
        charged = lease.cost.tokens if tokens is None else tokens
        assert self.ledger.settle(lease.lease_id, charged, self.now_ms) is not None

    def pass_tick(self, elapsed_ms: int | None = None) -> Tick:
        """Let a tick's time pass and take the tick."""
        self.now_ms += self.pool.tick_ms if elapsed_ms is None else elapsed_ms
        elapsed_ms, self.readings = self.ledger.close_tick(self.now_ms)
        self.tick = next_tick(self.pool, self.tick, self.usable, self.readings, elapsed_ms)
        self.publish()
        return self.tick
