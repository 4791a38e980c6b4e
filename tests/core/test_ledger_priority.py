"""Who is shed first: nobody slips past one with a better claim, and nobody is passed over for ever."""

import pytest

from envoy_tokenpools.core.admission import Reason, Resource
from envoy_tokenpools.core.ledger import Ledger
from envoy_tokenpools.core.resources import Resources
from tests.support.pools import admitted, amount, claim, cost, refused, take, terms

CRITICAL, BATCH = terms("critical", weight=10.0), terms("batch", weight=1.0)


def test_batch_is_shed_and_critical_is_not() -> None:
    """950 of 1,000 reserved: batch 100 no, critical 50 yes, batch 50 no."""
    ledger, usable = Ledger(), amount(1_000)
    take(ledger, "held", 950, usable, whose=CRITICAL)
    assert not admitted(take(ledger, "b1", 100, usable, whose=BATCH))
    assert admitted(take(ledger, "c1", 50, usable, whose=CRITICAL))
    assert not admitted(take(ledger, "b2", 50, usable, whose=BATCH))


def test_nobody_of_lower_weight_passes_one_who_was_refused() -> None:
    """Critical was refused, so batch waits though it would fit: for as long as critical was told to stay away."""
    ledger, usable = Ledger(), amount(1_000, sequences=4)
    take(ledger, "held", 1, usable, whose=CRITICAL)
    assert not admitted(take(ledger, "c", 1, usable, whose=CRITICAL, sequences=4))
    refusal = refused(take(ledger, "b", 1, usable, whose=BATCH))
    assert refusal.reason is Reason.LOW_PRIORITY
    assert admitted(take(ledger, "c2", 1, usable, whose=CRITICAL))
    assert not admitted(take(ledger, "b", 1, usable, whose=BATCH, now_ms=1_300))
    assert admitted(take(ledger, "b", 1, usable, whose=BATCH, now_ms=5_000))


def test_whoever_was_refused_and_then_admitted_blocks_nobody() -> None:
    """All that critical wanted it has."""
    ledger, usable = Ledger(), amount(1_000, sequences=4)
    take(ledger, "held", 1, usable, whose=CRITICAL, sequences=2)
    wanted = claim("c", cost(1, 3), CRITICAL, usable, fingerprint=7)
    refused(ledger.reserve(wanted, 0))
    refused(take(ledger, "b", 1, usable, whose=BATCH))
    ledger.settle("held", 1, 10)
    assert admitted(ledger.reserve(wanted, 10))
    assert admitted(take(ledger, "b", 1, usable, whose=BATCH, now_ms=10))


def test_who_still_waits_inside_its_share_is_not_passed_because_another_of_it_was_served() -> None:
    """Two were refused inside their share and a tick has passed since: the second is still wanted."""
    ledger, usable = Ledger(), amount(sequences=4)
    small = terms("small", share=amount(sequences=3))
    for number in range(4):
        take(ledger, f"held{number}", 1, usable, whose=CRITICAL)
    wanted = [claim(f"s{number}", cost(), small, usable, fingerprint=number) for number in (1, 2)]
    for one in wanted:
        refused(ledger.reserve(one, 0))
    ledger.close_tick(100)
    ledger.settle("held0", 1, 100)
    assert admitted(ledger.reserve(wanted[0], 100))
    ledger.settle("held1", 1, 200)
    assert refused(take(ledger, "c", 1, usable, whose=CRITICAL, now_ms=200)).reason is (
        Reason.LOW_PRIORITY
    )
    assert admitted(ledger.reserve(wanted[1], 300))
    ledger.settle("held2", 1, 300)
    assert admitted(take(ledger, "c", 1, usable, whose=CRITICAL, now_ms=300))


def test_nobody_beyond_its_share_passes_one_who_was_refused_inside_its_own() -> None:
    """Even a heavier one; whoever is inside its share passes."""
    ledger, usable = Ledger(), amount(sequences=4)
    small = terms("small", weight=1.0, share=amount(sequences=4))
    take(ledger, "held", 1, usable, whose=CRITICAL, sequences=2)
    assert not admitted(take(ledger, "s", 1, usable, whose=small, sequences=3))
    refusal = refused(take(ledger, "c", 1, usable, whose=CRITICAL))
    assert refusal.reason is Reason.LOW_PRIORITY
    heir = terms("heir", weight=0.1, share=amount(sequences=1))
    assert admitted(take(ledger, "h", 1, usable, whose=heir))


@pytest.mark.parametrize(
    ("share", "need", "resource", "available"),
    [
        (amount(sequences=3), (1, 3, 0), Resource.CONCURRENCY, 2),
        (amount(kv_bytes=50), (1, 1, 60), Resource.KV_CACHE, 50),
        (amount(tokens_per_second=30), (31, 1, 0), Resource.TOKENS, 29),
    ],
)
def test_a_low_priority_refusal_names_what_of_the_share_was_short(
    share: Resources, need: tuple[int, int, int], resource: Resource, available: int
) -> None:
    """Not always the sequences: need is more than available."""
    ledger, usable = Ledger(), amount(sequences=100)
    whose = terms("light", weight=0.1, share=share)
    take(ledger, "held", 1, usable, whose=CRITICAL)
    assert not admitted(take(ledger, "c", 1, usable, whose=CRITICAL, sequences=100))
    assert admitted(take(ledger, "l1", 1, usable, whose=whose))
    tokens, sequences, kv_bytes = need
    refusal = refused(
        take(ledger, "l2", tokens, usable, whose=whose, sequences=sequences, kv_bytes=kv_bytes)
    )
    assert (refusal.reason, refusal.resource) == (Reason.LOW_PRIORITY, resource)
    assert (refusal.need, refusal.available) == (max(need), available)


@pytest.mark.parametrize(
    ("share", "admits"),
    [
        (Resources(10, 50, 1), True),
        (Resources(10, 0, 1), False),
        (Resources(10, 50, 0), False),
        (Resources(0, 50, 1), False),
    ],
)
def test_the_first_request_is_inside_a_share_that_is_smaller_than_it(
    share: Resources, *, admits: bool
) -> None:
    """A tenant that holds nothing is not passed over for ever; the second request counts in full."""
    ledger, usable = Ledger(), amount(sequences=100)
    take(ledger, "held", 1, usable, whose=CRITICAL)
    assert not admitted(take(ledger, "c", 1, usable, whose=CRITICAL, sequences=100))
    whose = terms("light", weight=0.1, share=share)
    first = take(ledger, "l1", 60, usable, whose=whose, sequences=2, kv_bytes=60)
    assert admitted(first) is admits
    assert not admitted(take(ledger, "l2", 1, usable, whose=whose, kv_bytes=1))


def test_the_last_slot_goes_to_the_under_served() -> None:
    """Two want it and both were refused: the one whose debt raised its weight gets it, whoever asks first."""
    ledger, usable = Ledger(), amount(sequences=2)
    owed, even = terms("owed", weight=300.0), terms("even", weight=100.0)
    take(ledger, "held", 1, usable)
    take(ledger, "ends", 1, usable)
    assert not admitted(take(ledger, "e1", 1, usable, whose=even))
    assert not admitted(take(ledger, "o1", 1, usable, whose=owed))
    ledger.settle("ends", 1, 0)
    assert not admitted(take(ledger, "e2", 1, usable, whose=even))
    assert admitted(take(ledger, "o2", 1, usable, whose=owed))


def test_a_lone_batch_request_on_an_idle_pool_is_admitted() -> None:
    """Whoever was refused before: priority is for a pool that is in use."""
    ledger, usable = Ledger(), amount(sequences=4)
    take(ledger, "held", 1, usable, whose=CRITICAL)
    assert not admitted(take(ledger, "c", 1, usable, whose=CRITICAL, sequences=4))
    assert not admitted(take(ledger, "b", 1, usable, whose=BATCH))
    ledger.settle("held", 1, 0)
    assert admitted(take(ledger, "b", 1, usable, whose=BATCH))


@pytest.mark.parametrize(
    ("sequences", "kv_bytes", "waits"), [(4, 100, True), (5, 1, False), (1, 101, False)]
)
def test_nobody_waits_for_what_can_never_be(sequences: int, kv_bytes: int, *, waits: bool) -> None:
    """A refusal counts against the others only if an empty pool would have had the room, at its limit too."""
    ledger, usable = Ledger(), amount(sequences=4, kv_bytes=100)
    take(ledger, "held", 1, usable, whose=CRITICAL, kv_bytes=1)
    absurd = take(ledger, "c", 1, usable, whose=CRITICAL, sequences=sequences, kv_bytes=kv_bytes)
    assert refused(absurd).reason is Reason.POOL_CONTENDED
    assert admitted(take(ledger, "b", 1, usable, whose=BATCH)) is not waits
