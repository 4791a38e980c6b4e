"""The service classes at the ledger: what stands for the reserved ones, what the others may use, and who is gone."""

import pytest

from envoy_tokenpools.core.admission import Balance, Lease, Reason, Refusal, Resource
from envoy_tokenpools.core.ledger import InUse, Ledger
from envoy_tokenpools.core.pool import Entitlement, Limits, Pool, ServiceClass
from envoy_tokenpools.core.resources import Resources
from tests.support.pools import Desk, amount, claim, cost, entitlement, pool, terms

DEDICATED, GUARANTEED, ELASTIC, SPOT, PREEMPTIBLE = ServiceClass

CAPACITY = Resources(tokens_per_second=1_600, kv_bytes=16_000, concurrency=16)

BASELINE = Resources(tokens_per_second=600, kv_bytes=6_000, concurrency=6)

SPOT_TENANT = entitlement("spot", SPOT)


def desk(*entitlements: Entitlement, capacity: Resources = CAPACITY) -> Desk:
    """A pool of sixteen sequences; its token buckets are ten seconds deep."""
    return Desk.of(pool(capacity, *entitlements, SPOT_TENANT))


def flood(one: Desk, name: str = "spot", tokens: int = 1) -> list[Lease]:
    """Claims of one sequence until the first refusal."""
    leases = []
    while isinstance(outcome := one.claim(name, cost(tokens, kv_bytes=tokens)), Lease):
        leases.append(outcome)
    return leases


def refusal(one: Desk, name: str, tokens: int = 1, sequences: int = 1) -> Refusal:
    """The refusal that a claim must meet."""
    outcome = one.claim(name, cost(tokens, sequences))
    assert isinstance(outcome, Refusal), outcome
    return outcome


# ---------------------------------------------------------------- guaranteed


def test_a_guarantee_is_admitted_while_the_pool_is_full() -> None:
    """Spot has lent itself all sixteen sequences; the six of the baseline are admitted all the same."""
    one = desk(entitlement("g", GUARANTEED, BASELINE))
    assert len(flood(one)) == 16
    leases = [one.admit("g", cost(100)) for _ in range(6)]
    assert all(lease.within_guarantee for lease in leases)
    assert one.ledger.view().total.concurrency == 22
    assert refusal(one, "spot").available == 0


def test_a_guaranteed_baseline_is_a_ceiling() -> None:
    """It may not burst, however empty the pool."""
    one = desk(entitlement("g", GUARANTEED, BASELINE))
    flood(one, "g")
    assert one.ledger.view().total.concurrency == 6
    assert refusal(one, "g").reason is Reason.CONCURRENCY_LIMIT


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (cost(6_001, kv_bytes=1), None),
        (cost(10, kv_bytes=6_001), Reason.KV_CACHE_LIMIT),
        (cost(10, sequences=7), Reason.CONCURRENCY_LIMIT),
    ],
)
def test_the_ceiling_holds_in_each_resource(what: object, reason: Reason | None) -> None:
    """Tokens by their bucket, which is whole and so admits more than it holds."""
    one = desk(entitlement("g", GUARANTEED, BASELINE))
    assert isinstance(what, type(cost()))
    outcome = one.claim("g", what)
    assert (outcome.reason if isinstance(outcome, Refusal) else None) is reason


def test_a_guaranteed_token_rate_is_a_ceiling() -> None:
    """Six thousand tokens fill its bucket, and 600 come back each second."""
    one = desk(entitlement("g", GUARANTEED, BASELINE))
    one.settle(one.admit("g", cost(6_000)))
    short = refusal(one, "g", 600)
    assert (short.reason, short.resource) == (Reason.TOKEN_RATE_LIMIT, Resource.TOKENS)
    assert short.retry_after_ms == 1_000
    one.now_ms += 1_000
    assert one.admit("g", cost(600)).within_guarantee


def test_a_guarantee_that_does_not_lend_is_kept_free() -> None:
    """Spot gets ten sequences, 10,000 KV bytes and 1,000 tokens per second."""
    one = desk(entitlement("g", GUARANTEED, BASELINE, lend=False))
    assert len(flood(one)) == 10
    for _ in range(6):
        one.admit("g", cost(100))
    assert one.ledger.view().total.concurrency == 16


@pytest.mark.parametrize(("headroom", "lent"), [(0.0, 16), (0.1, 15), (0.5, 13), (1.0, 10)])
def test_headroom_is_kept_free_of_an_idle_guarantee(headroom: float, lent: int) -> None:
    """A share of what idles, rounded up: a tenth of six sequences is one."""
    members = (entitlement("g", GUARANTEED, BASELINE), SPOT_TENANT)
    shape = pool(CAPACITY, *members)
    one = Desk.of(
        Pool(
            name=shape.name,
            models=shape.models,
            capacity=CAPACITY,
            kv_bytes_per_token=1,
            headroom=headroom,
            entitlements=shape.entitlements,
        )
    )
    assert len(flood(one)) == lent


# ---------------------------------------------------------------- dedicated


def test_an_idle_dedicated_baseline_is_never_lent() -> None:
    """Not a sequence of it, however long it idles."""
    one = desk(entitlement("d", DEDICATED, BASELINE))
    assert len(flood(one)) == 10
    for _ in range(10):
        one.pass_tick()
        assert refusal(one, "spot").reason is Reason.POOL_CONTENDED


def test_the_kv_cache_of_an_idle_dedicated_baseline_is_never_lent() -> None:
    """Ten thousand bytes are for the others."""
    one = desk(entitlement("d", DEDICATED, BASELINE))
    assert isinstance(one.claim("spot", cost(1, kv_bytes=10_000)), Lease)
    short = one.claim("spot", cost(1, kv_bytes=1))
    assert isinstance(short, Refusal)
    assert (short.resource, short.available) == (Resource.KV_CACHE, 0)


def test_the_tokens_of_an_idle_dedicated_baseline_are_never_lent() -> None:
    """Spot fills a bucket of 10,000 tokens; the 6,000 of the baseline are still there."""
    one = desk(entitlement("d", DEDICATED, BASELINE))
    one.settle(one.admit("spot", cost(10_000)))
    assert refusal(one, "spot").resource is Resource.TOKENS
    assert one.admit("d", cost(6_000)).within_guarantee
    assert refusal(one, "spot").retry_after_ms == 1


def test_what_dedicated_uses_of_its_own_is_not_taken_from_the_others() -> None:
    """Its tokens are none of the others', nor are its sequences."""
    one = desk(entitlement("d", DEDICATED, BASELINE))
    assert len(flood(one, "d")) == 16, "six of its own and ten of the surplus"
    one = desk(entitlement("d", DEDICATED, BASELINE))
    for _ in range(6):
        one.admit("d", cost(1_000))
    assert one.admit("spot", cost(10_000, sequences=10)).entitlement == "spot"


def test_dedicated_bursts_into_what_is_free_and_no_further() -> None:
    """Its own six stay its own while it bursts into ten that spot shares."""
    one = desk(entitlement("d", DEDICATED, BASELINE))
    for _ in range(4):
        one.admit("spot", cost(1))
    assert len(flood(one, "d")) == 12
    assert refusal(one, "d").reason is Reason.POOL_CONTENDED


@pytest.mark.parametrize("ticks", [0, 3])
def test_a_bursting_dedicated_tenant_and_spot_never_get_more_tokens_than_there_are(
    ticks: int,
) -> None:
    """For a minute both ask for all they can get, after the share of one has grown to the whole pool."""
    one = desk(entitlement("d", DEDICATED, BASELINE))
    for _ in range(ticks * 50):
        while isinstance(outcome := one.claim("d", cost(100)), Lease):
            one.settle(outcome)
        one.now_ms += 100
        if one.now_ms % 5_000 == 0:
            one.pass_tick(0)
    start_ms, admitted = one.now_ms, 0
    while one.now_ms < start_ms + 60_000:
        for name in ("spot", "d"):
            while isinstance(outcome := one.claim(name, cost(100)), Lease):
                one.settle(outcome)
                admitted += 100
        one.now_ms += 100
        if one.now_ms % 5_000 == 0:
            one.pass_tick(0)
    assert admitted <= 1_600 * (60 + 10) * 1.02


def test_a_dedicated_tenant_alone_gets_all_the_tokens_of_the_pool() -> None:
    """Its burst in sequences does not keep it from the tokens of its own baseline."""
    one = desk(entitlement("d", DEDICATED, BASELINE))
    held = [one.admit("d", cost(1)) for _ in range(15)]
    admitted = 0
    while one.now_ms < 60_000:
        while isinstance(outcome := one.claim("d", cost(100)), Lease):
            one.settle(outcome)
            admitted += 100
        one.now_ms += 100
    assert admitted >= 1_600 * 60 * 0.98
    assert len(held) == 15


def test_a_dedicated_tenant_that_exhausts_its_tokens_hears_when_they_are_back() -> None:
    """All the pool's tokens are its own: the wait is that of its own bucket, not an hour."""
    whole = Resources(1_600, 6_000, 6)
    one = desk(entitlement("d", DEDICATED, whole))
    one.settle(one.admit("d", cost(16_000)))
    short = refusal(one, "d", 160)
    assert (short.resource, short.retry_after_ms) == (Resource.TOKENS, 100)
    one.now_ms += 100
    one.admit("d", cost(160))


def test_a_dedicated_burst_in_sequences_is_paid_from_its_own_tokens_first() -> None:
    """Spot has used up more than all share; the seventh sequence needs none of that while its own tokens last."""
    one = desk(entitlement("d", DEDICATED, BASELINE))
    one.settle(one.admit("spot", cost(10_000)), 12_000)
    for _ in range(6):
        one.admit("d", cost(500))
    burst = one.admit("d", cost(3_000))
    assert (burst.within_guarantee, burst.tokens_guaranteed) == (False, True)
    short = refusal(one, "d", 60)
    assert (short.resource, short.available, short.retry_after_ms) == (Resource.TOKENS, 0, 100)


def test_its_own_idle_baseline_does_not_stand_in_the_way_of_a_wide_dedicated_request() -> None:
    """Eight sequences and 8,000 KV bytes: six and 6,000 of its own, the rest of the surplus."""
    one = desk(entitlement("d", DEDICATED, BASELINE))
    one.admit("spot", cost(1, sequences=8, kv_bytes=8_000))
    wide = one.claim("d", cost(1, sequences=8, kv_bytes=8_000))
    assert isinstance(wide, Lease)
    assert not wide.within_guarantee


# ---------------------------------------------------------------- lost and changed


def test_an_entitlement_that_is_removed_keeps_its_leases_and_withholds_nothing() -> None:
    """What it holds counts until it ends, what it left idle is for all; then its account is forgotten."""
    one = desk(entitlement("d", DEDICATED, BASELINE))
    lease = one.admit("d", cost(100, kv_bytes=50))
    one.pool = pool(CAPACITY, SPOT_TENANT)
    one.pass_tick()
    assert one.ledger.view().accounts["d"] == InUse(1, 1, 100, 50)
    assert len(flood(one)) == 15
    one.settle(lease)
    one.pass_tick()
    assert "d" not in one.ledger.view().accounts
    assert len(flood(one)) == 1


def test_tokens_that_a_removed_entitlement_took_do_not_keep_its_account_for_ever() -> None:
    """Its share has no rate that would drain it."""
    one = desk(entitlement("e", ELASTIC, BASELINE))
    one.settle(one.admit("e", cost(5_000)))
    lease = one.admit("e", cost(10))
    one.pool = pool(CAPACITY, SPOT_TENANT)
    one.pass_tick()
    one.settle(lease, 700)
    one.pass_tick()
    assert "e" not in one.ledger.view().accounts


def test_publishing_the_same_terms_again_changes_nothing() -> None:
    """What is withheld is not withheld twice."""
    one = desk(entitlement("d", DEDICATED, BASELINE))
    one.publish()
    assert one.ledger.tokens.rate == 1_000
    assert len(flood(one)) == 10


def test_a_claim_under_withdrawn_terms_leaves_nothing_withheld() -> None:
    """It was on its way when its entitlement was removed: in the next tick the whole rate is everybody's."""
    one = desk(entitlement("d", DEDICATED, BASELINE))
    withdrawn = one.tick.terms["d"]
    one.pool = pool(CAPACITY, SPOT_TENANT)
    one.pass_tick()
    one.pass_tick()
    late = claim("late", cost(1), withdrawn, one.usable, window_ms=10_000)
    assert isinstance(one.ledger.reserve(late, one.now_ms), Lease)
    one.ledger.settle("late", 0, one.now_ms)
    for _ in range(3):
        one.pass_tick()
    assert one.ledger.tokens.rate == 1_600


def test_a_tenant_forgotten_while_its_lease_was_lost_is_still_charged() -> None:
    """Its account stays until its expired lease is settled, late."""
    one = desk(entitlement("e", ELASTIC, BASELINE))
    lease = one.claim("e", cost(100), ttl_ms=1_000)
    assert isinstance(lease, Lease)
    one.pool = pool(CAPACITY, SPOT_TENANT)
    one.pass_tick()
    one.ledger.sweep(one.now_ms)
    one.pass_tick()
    settlement = one.ledger.settle(lease.lease_id, 60, one.now_ms)
    assert settlement is not None
    assert settlement.late
    one.pass_tick()
    one.pass_tick()
    assert one.ledger.view().accounts.keys() == {"spot"}


def test_a_lost_half_of_the_pool_scales_the_guarantees_that_do_not_fit() -> None:
    """Two baselines of six on eight sequences: four each are admitted whatever spot holds."""
    members = [entitlement(name, GUARANTEED, BASELINE) for name in ("g", "h")]
    one = desk(*members)
    one.usable = Resources(800, 8_000, 8)
    assert one.pass_tick().degraded
    flood(one)
    for name in ("g", "h"):
        assert all(one.admit(name, cost(1)).within_guarantee for _ in range(4))
        assert refusal(one, name).reason is Reason.POOL_CONTENDED


# ---------------------------------------------------------------- what is left


def test_the_balance_of_a_guarantee_is_its_baseline() -> None:
    """Limits, what is left of them, and when it is back."""
    one = desk(entitlement("g", GUARANTEED, BASELINE))
    one.admit("g", cost(1_500))
    assert one.ledger.balance("g", 0) == Balance(
        limit_tokens=6_000,
        remaining_tokens=4_500,
        reset_tokens_ms=2_500,
        limit_concurrency=6,
        remaining_concurrency=5,
        reset_concurrency_ms=0,
    )


def test_the_balance_of_a_share_and_of_the_surplus() -> None:
    """Elastic sees the bucket of its share, spot that of the pool; both the sequences that are free."""
    one = desk(entitlement("e", ELASTIC, BASELINE))
    one.admit("e", cost(600))
    one.admit("spot", cost(1_000, sequences=15))
    elastic, spot = one.ledger.balance("e", 0), one.ledger.balance("spot", 0)
    assert (elastic.limit_tokens, elastic.remaining_tokens) == (6_000, 5_400)
    assert (spot.limit_tokens, spot.remaining_tokens) == (16_000, 14_400)
    assert (spot.limit_concurrency, spot.remaining_concurrency) == (15, 0)
    assert spot.reset_concurrency_ms >= 1


def test_the_balance_under_a_closed_ceiling() -> None:
    """A token rate of zero: nothing is left, and no time is named at which it would be."""
    ledger = Ledger()
    closed = terms("a", limits=Limits(tokens_per_second=0, concurrency=0))
    ledger.reserve(claim("l", cost(1), closed, amount()), 0)
    balance = ledger.balance("a", 0)
    assert (balance.limit_tokens, balance.remaining_tokens, balance.reset_tokens_ms) == (0, 0, 0)
    assert balance.remaining_concurrency == 0
