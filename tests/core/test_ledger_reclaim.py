"""A guarantee that is claimed in a full pool takes capacity back."""

from dataclasses import replace

from envoy_tokenpools.core.admission import Lease, Terms
from envoy_tokenpools.core.ledger import Ledger
from envoy_tokenpools.core.withheld import MAX_REST_MS
from tests.support.pools import amount, claim, cost, refused, take, terms

FULL = amount(sequences=4)
VIP = terms("vip", share=amount(100, 3, 100), guarantee=amount(100, 3, 100))
NIGHT = replace(terms("night", weight=0.1), evictable=True, rank=0)
CHEAP = replace(terms("cheap", weight=1.0), evictable=True, rank=1)
STEADY = replace(terms("steady", weight=1.0), rank=1)


def full_of(*whose: Terms) -> Ledger:
    """A pool of four sequences, taken one by one."""
    ledger = Ledger()
    for number, each in enumerate(whose):
        assert isinstance(take(ledger, f"{each.entitlement}-{number}", 1, FULL, whose=each), Lease)
    return ledger


def arrives(ledger: Ledger, lease_id: str, *, sequences: int = 1) -> list[str]:
    """A request inside the guarantee; who has to go for it."""
    lease = ledger.reserve(claim(lease_id, cost(1, sequences), VIP, FULL), 0)
    assert isinstance(lease, Lease)
    return [victim.lease_id for victim in ledger.reclaim(lease)]


def test_the_newest_of_the_lowest_class_goes_first() -> None:
    """One for one; preemptible before spot; who throttles stays, and the guarantee is admitted all the same."""
    ledger = full_of(NIGHT, CHEAP, NIGHT, STEADY)
    assert arrives(ledger, "v1") == ["night-2"]
    assert arrives(ledger, "v2") == ["night-0"]
    assert arrives(ledger, "v3") == ["cheap-1"]
    assert ledger.concurrency == 7


def test_nothing_is_taken_back_while_there_is_room() -> None:
    """Neither for a guarantee, nor for anybody else."""
    ledger = full_of(NIGHT, NIGHT, NIGHT)
    assert arrives(ledger, "v1") == []
    assert arrives(ledger, "v2") == ["night-2"]


def test_a_wide_request_takes_back_as_much_as_it_needs() -> None:
    """What is already being freed counts for the next one, too, once it has ended."""
    ledger = full_of(NIGHT, NIGHT, NIGHT, NIGHT)
    assert arrives(ledger, "v1", sequences=2) == ["night-3", "night-2"]
    ledger.settle("night-3", 0, 0)
    ledger.settle("night-2", 0, 0)
    assert arrives(ledger, "v2") == ["night-1"]


def test_an_expired_lease_is_not_waited_for() -> None:
    """It is taken back by the sweep, and frees nothing twice."""
    ledger = full_of(NIGHT, NIGHT, NIGHT, NIGHT)
    assert arrives(ledger, "v1") == ["night-3"]
    ledger.renew(["v1", "night-0", "night-1", "night-2"], 10**9)
    ledger.sweep(60_000)
    assert ledger.concurrency == 4
    assert arrives(ledger, "v2") == ["night-2"]


def test_only_a_guarantee_takes_back() -> None:
    """A request of the same entitlement beyond it is refused as anybody else's."""
    ledger = full_of(NIGHT, NIGHT, NIGHT, NIGHT)
    elastic = terms("elastic", weight=10.0, share=amount(100, 4, 100))
    refused(take(ledger, "e", 1, FULL, whose=elastic))
    assert arrives(ledger, "v1", sequences=3) == ["night-3", "night-2", "night-1"]
    refused(ledger.reserve(claim("v2", cost(), VIP, FULL), 0))


def test_capacity_that_was_lost_is_taken_back_too() -> None:
    """What the pool can hold no more would keep the guarantee waiting in the backend's queue."""
    ledger = full_of(NIGHT, NIGHT, NIGHT, NIGHT)
    lease = ledger.reserve(claim("v1", cost(), VIP, replace(FULL, concurrency=2)), 0)
    assert isinstance(lease, Lease)
    assert len(ledger.reclaim(lease)) == 3


def test_nobody_is_evicted_whose_request_cannot_be_ended() -> None:
    """In shadow mode requests only seem to be admitted."""
    ledger = Ledger()
    for number in range(4):
        ledger.reserve(claim(f"n{number}", cost(), NIGHT, FULL, enforce=False), 0)
    assert arrives(ledger, "v1") == []


def test_a_replayed_claim_evicts_nobody_again() -> None:
    """What it needed is being freed."""
    ledger = full_of(NIGHT, NIGHT, NIGHT, NIGHT)
    assert arrives(ledger, "v1") == ["night-3"]
    assert arrives(ledger, "v1") == []


def test_many_small_guarantees_withhold_no_more_than_their_part() -> None:
    """Fifty guarantees of one sequence with a tenth of headroom keep five free, not fifty."""
    ledger, usable = Ledger(), amount(sequences=100)
    promises = {
        name: terms(name, guarantee=amount(1, 1, 1), withheld_ppm=100_000)
        for name in (f"g{number}" for number in range(50))
    }
    ledger.publish(promises, usable, 1_000, 0)
    spot = terms("spot")
    for number in range(95):
        assert isinstance(take(ledger, f"s{number}", 1, usable, whose=spot), Lease)
    refused(take(ledger, "more", 1, usable, whose=spot))


# ---------------------------------------------------------------- a moment's rest


def lending(ledger: Ledger, hold_ms: int) -> int:
    """A guarantee that was in use for `hold_ms`, and has just been given back; when."""
    ledger.publish({"vip": VIP, "spot": terms("spot")}, FULL, 1_000, 0)
    for number in range(3):
        take(ledger, f"v{number}", 1, FULL, whose=VIP)
    for number in range(3):
        ledger.settle(f"v{number}", 1, hold_ms)
    return hold_ms


def test_what_a_guarantee_gives_back_rests_for_a_moment() -> None:
    """A twentieth of how long leases are held: its next request is on its way, and finds its place."""
    ledger = Ledger()
    now_ms = lending(ledger, 2_000)
    spot = terms("spot")
    assert isinstance(take(ledger, "s1", 1, FULL, whose=spot, now_ms=now_ms), Lease)
    refused(take(ledger, "s2", 1, FULL, whose=spot, now_ms=now_ms + 99))
    assert isinstance(take(ledger, "v", 1, FULL, whose=VIP, now_ms=now_ms + 99), Lease)
    refused(take(ledger, "s2", 1, FULL, whose=spot, now_ms=now_ms + 99))
    assert isinstance(take(ledger, "s2", 1, FULL, whose=spot, now_ms=now_ms + 100), Lease)


def test_the_rest_is_short_however_long_leases_are_held() -> None:
    """A quarter of a second: idle capacity is lent."""
    ledger = Ledger()
    now_ms = lending(ledger, 60_000)
    spot = terms("spot")
    for number in range(4):
        at_ms = now_ms + MAX_REST_MS
        assert isinstance(take(ledger, f"s{number}", 1, FULL, whose=spot, now_ms=at_ms), Lease)


def test_an_entitlement_that_is_gone_rests_nothing() -> None:
    """Its guarantee is nobody's any more."""
    ledger = Ledger()
    now_ms = lending(ledger, 60_000)
    spot = terms("spot")
    ledger.publish({"spot": spot}, FULL, 1_000, now_ms)
    for number in range(4):
        assert isinstance(take(ledger, f"s{number}", 1, FULL, whose=spot, now_ms=now_ms), Lease)
    ledger.close_tick(now_ms)
    ledger.close_tick(now_ms + 10_000)
    assert "vip" not in ledger.view().accounts
