"""One entitlement's meters: what counts as demand, once, and what a tick carries over."""

from envoy_tokenpools.core.account import MAX_REMEMBERED_SHEDS, RETRY_WINDOW_MS, Account
from envoy_tokenpools.core.bucket import TokenBucket
from envoy_tokenpools.core.pool import Limits
from envoy_tokenpools.core.resources import Resources
from tests.support.pools import amount, cost, terms

BODY = 0xBEEF
"""A fingerprint."""

REQUEST = cost(100, sequences=2, kv_bytes=700)


def account() -> Account:
    """An account that has done nothing."""
    return Account(terms(share=amount()), TokenBucket(1_000, 1_000))


def pending(one: Account) -> tuple[int, int, int]:
    """What waits outside."""
    meters = one.meters
    return meters.pending_tokens, meters.pending_kv_bytes, meters.pending_concurrency


def test_a_shed_request_is_demand_and_pends() -> None:
    """Its tokens were offered, and all three resources wait outside."""
    one = account()
    one.count_shed(BODY, REQUEST, 0, is_retry=False)
    assert one.meters.demanded_tokens == 100
    assert one.meters.delivered_tokens == 0
    assert pending(one) == (100, 700, 2)


def test_the_same_body_again_within_a_minute_is_the_same_demand() -> None:
    """However often it is tried."""
    one = account()
    for now_ms in range(0, RETRY_WINDOW_MS, 1_000):
        one.count_shed(BODY, REQUEST, now_ms, is_retry=False)
    assert one.meters.demanded_tokens == 100
    assert pending(one) == (100, 700, 2)


def test_after_a_minute_it_is_a_new_request() -> None:
    """The window counts from the first time, so that a patient client is demand again."""
    one = account()
    one.count_shed(BODY, REQUEST, 0, is_retry=False)
    one.count_shed(BODY, REQUEST, RETRY_WINDOW_MS, is_retry=False)
    assert one.meters.demanded_tokens == 200


def test_other_bodies_are_other_demand() -> None:
    """Two fingerprints, two requests; an unknown fingerprint is always new."""
    one = account()
    for fingerprint in (1, 2, 0, 0):
        one.count_shed(fingerprint, REQUEST, 0, is_retry=False)
    assert one.meters.demanded_tokens == 400


def test_a_declared_retry_pends_but_is_no_new_demand() -> None:
    """Another replica counted it when it was tried first."""
    one = account()
    one.count_shed(BODY, REQUEST, 0, is_retry=True)
    assert one.meters.demanded_tokens == 0
    assert pending(one) == (100, 700, 2)


def test_a_request_that_still_waits_pends_in_every_tick_it_is_tried() -> None:
    """Demand was counted in the first tick, the wish for capacity is there in both."""
    one = account()
    one.count_shed(BODY, REQUEST, 0, is_retry=False)
    one.close_tick(5_000)
    assert pending(one) == (0, 0, 0)
    one.count_shed(BODY, REQUEST, 6_000, is_retry=True)
    one.count_shed(BODY, REQUEST, 7_000, is_retry=True)
    assert one.meters.demanded_tokens == 0
    assert pending(one) == (100, 700, 2)


def test_a_request_admitted_in_the_tick_it_was_shed_in_counts_once() -> None:
    """Offered once, delivered once, and nothing waits any more."""
    one = account()
    one.count_shed(BODY, REQUEST, 0, is_retry=False)
    one.count_admitted(BODY, REQUEST)
    assert (one.meters.demanded_tokens, one.meters.delivered_tokens) == (100, 100)
    assert pending(one) == (0, 0, 0)


def test_a_request_admitted_a_tick_later_is_demand_of_that_tick_too() -> None:
    """Else the tick would deliver what nobody asked for, and give credit for it."""
    one = account()
    one.count_shed(BODY, REQUEST, 0, is_retry=False)
    one.close_tick(5_000)
    one.count_admitted(BODY, REQUEST)
    assert (one.meters.demanded_tokens, one.meters.delivered_tokens) == (100, 100)
    assert pending(one) == (0, 0, 0)


def test_a_retry_that_is_admitted_was_demanded() -> None:
    """Its first try was counted elsewhere, its delivery is here."""
    one = account()
    one.count_shed(BODY, REQUEST, 0, is_retry=True)
    one.count_admitted(BODY, REQUEST)
    assert (one.meters.demanded_tokens, one.meters.delivered_tokens) == (100, 100)


def test_a_correction_moves_demand_and_delivery_alike() -> None:
    """What turned out cheaper was neither offered nor delivered; below zero it is carried to the next tick."""
    one = account()
    one.count_admitted(0, REQUEST)
    one.close_tick(5_000)
    one.count_correction(-90)
    one.close_tick(10_000)
    one.count_admitted(0, REQUEST)
    assert (one.meters.demanded_tokens, one.meters.delivered_tokens) == (10, 10)


def test_only_so_many_sheds_are_remembered() -> None:
    """The oldest is forgotten first: it counts as new demand then."""
    one = account()
    for fingerprint in range(1, MAX_REMEMBERED_SHEDS + 2):
        one.count_shed(fingerprint, cost(1), 0, is_retry=False)
    one.count_shed(MAX_REMEMBERED_SHEDS + 1, cost(1), 1, is_retry=False)
    assert one.meters.demanded_tokens == MAX_REMEMBERED_SHEDS + 1
    one.count_shed(1, cost(1), 1, is_retry=False)
    assert one.meters.demanded_tokens == MAX_REMEMBERED_SHEDS + 2


def test_old_sheds_are_forgotten_at_a_tick() -> None:
    """An account with a minute of silence behind it can be forgotten itself."""
    one = account()
    one.count_shed(1, cost(1), 0, is_retry=False)
    one.count_shed(2, cost(1), 4_000, is_retry=False)
    one.close_tick(RETRY_WINDOW_MS)
    assert not one.is_idle
    one.close_tick(RETRY_WINDOW_MS + 4_000)
    assert one.is_idle


def test_a_shed_that_became_new_demand_is_the_youngest_again() -> None:
    """It does not keep older ones from being forgotten."""
    one = account()
    one.count_shed(1, cost(1), 0, is_retry=False)
    one.count_shed(2, cost(1), 1_000, is_retry=False)
    one.count_shed(1, cost(1), RETRY_WINDOW_MS, is_retry=False)
    one.close_tick(RETRY_WINDOW_MS + 1_000)
    assert list(one._sheds) == [1]


def test_use_is_integrated_over_time_and_its_peak_kept() -> None:
    """Two sequences for a second and four for two are ten sequence-seconds."""
    one = account()
    one.hold(REQUEST, 1, 0)
    one.hold(REQUEST, 1, 1_000)
    one.hold(REQUEST, -1, 3_000)
    one.hold(REQUEST, -1, 3_000)
    closed = one.close_tick(5_000)
    assert (closed.sequence_ms, closed.kv_byte_ms) == (10_000, 700 * 5_000)
    assert (closed.peak_concurrency, closed.peak_kv_bytes) == (4, 1_400)


def test_a_new_tick_starts_with_what_is_in_use() -> None:
    """A stream that lasts for ticks is a peak in each of them."""
    one = account()
    one.hold(REQUEST, 1, 0)
    one.close_tick(5_000)
    closed = one.close_tick(10_000)
    assert (closed.peak_concurrency, closed.sequence_ms) == (2, 10_000)
    assert closed.delivered_tokens == 0


def test_a_clock_that_steps_back_is_no_use() -> None:
    """The integral waits until time has caught up."""
    one = account()
    one.hold(REQUEST, 1, 5_000)
    one.hold(REQUEST, 1, 1_000)
    assert one.close_tick(6_000).sequence_ms == 4_000


def test_a_ceiling_gets_a_bucket_when_it_is_set_and_loses_it_when_it_is_lifted() -> None:
    """What was taken stays taken while the ceiling only changes."""
    one = account()
    one.set_rates(terms(share=amount(), limits=Limits(tokens_per_second=100)), 1_000, 0)
    assert one.limit is not None
    one.charge(100, within_share=False, guaranteed=False)
    one.set_rates(terms(share=amount(), limits=Limits(tokens_per_second=200)), 1_000, 0)
    assert one.limit.remaining == 100
    assert one.share.remaining == amount().tokens_per_second
    one.set_rates(terms(share=amount()), 1_000, 0)
    assert one.limit is None


def test_a_share_that_was_withdrawn_is_not_charged_to_its_successor() -> None:
    """No rate drains a bucket without one; a tenant that slept through a shortage starts afresh."""
    one = account()
    one.charge(1_000, within_share=True, guaranteed=False)
    one.set_rates(terms(share=Resources.NONE), 1_000, 100)
    one.set_rates(terms(share=amount(1_000)), 1_000, 3_600_000)
    assert one.share.fits(1_000)


def test_an_account_that_holds_or_owes_anything_is_not_idle() -> None:
    """A lease, a remembered shed, or a bucket that still drains."""
    one = account()
    assert one.is_idle
    one.charge(10, within_share=True, guaranteed=False)
    assert not one.is_idle
    one.drain(1_000)
    assert one.is_idle
    one.hold(REQUEST, 1, 1_000)
    assert not one.is_idle
    one.hold(REQUEST, -1, 1_000)
    one.set_rates(terms(share=amount(), limits=Limits(tokens_per_second=10)), 1_000, 1_000)
    one.charge(10, within_share=False, guaranteed=False)
    assert not one.is_idle
    one.drain(2_000)
    assert one.is_idle
