"""Which leases are taken back, in which order, and how many."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.core.admission import Lease
from envoy_tokenpools.core.evictions import Evictions
from tests.support.pools import cost

SPOT, PREEMPTIBLE = 1, 0


def lease(
    lease_id: str, rank: int | None = PREEMPTIBLE, *, sequences: int = 1, kv_bytes: int = 0
) -> Lease:
    """One that may be taken back, by its rank."""
    return Lease(
        lease_id=lease_id,
        entitlement="e",
        cost=cost(1, sequences, kv_bytes),
        within_share=False,
        within_guarantee=False,
        tokens_guaranteed=False,
        pool_ppm=1_000_000,
        admitted_at_ms=0,
        expires_at_ms=60_000,
        eviction_rank=rank,
    )


def evictions(*leases: Lease) -> Evictions:
    """All of them, in the order of admission."""
    evictions = Evictions()
    for one in leases:
        evictions.add(one)
    return evictions


def taken(evictions: Evictions, sequences: int = 0, kv_bytes: int = 0) -> list[str]:
    """Ids of those that are to be ended."""
    victims = evictions.take_back(sequences=sequences, kv_bytes=kv_bytes)
    return [victim.lease_id for victim in victims]


def test_preemptible_goes_before_spot_and_the_newest_before_the_oldest() -> None:
    """And whoever may not be evicted never goes."""
    held = evictions(
        lease("p1"), lease("s1", SPOT), lease("p2"), lease("safe", None), lease("s2", SPOT)
    )
    assert taken(held, 3) == ["p2", "p1", "s2"]
    assert taken(held, 5) == ["s1"]
    assert taken(held, 9) == []


def test_what_is_being_freed_counts() -> None:
    """Nobody else is ended for the same shortage, until what was told to end has ended without being enough."""
    first, second = lease("a"), lease("b")
    held = evictions(first, second)
    assert taken(held, 1) == ["b"]
    assert taken(held, 1) == []
    assert taken(held, 2) == ["a"]
    held.remove(second)
    assert held.freeing_concurrency == 1
    held.remove(first)
    assert (held.freeing_concurrency, taken(held, 1)) == (0, [])


def test_nobody_is_ended_in_vain() -> None:
    """Who holds no KV cache does not help where KV cache is short; the last one may free more than is needed."""
    held = evictions(lease("kv", kv_bytes=100), lease("none"))
    assert taken(held, kv_bytes=30) == ["kv"]
    assert taken(held, kv_bytes=90) == []
    assert held.freeing_kv_bytes == 100


def test_nothing_is_taken_where_nothing_is_short() -> None:
    """Also where there is more than enough."""
    held = evictions(lease("a"))
    assert taken(held, 0, -5) == []


@given(
    st.lists(
        st.tuples(st.sampled_from([None, 0, 1]), st.integers(1, 4), st.integers(0, 9)), max_size=12
    ),
    st.lists(st.tuples(st.integers(-3, 12), st.integers(-9, 30), st.integers(0, 11)), max_size=8),
)
def test_what_is_being_freed_is_what_was_told_and_not_removed(
    leases: list[tuple[int | None, int, int]], steps: list[tuple[int, int, int]]
) -> None:
    """However shortages and ends alternate; each is told once; enough is freed where there is enough."""
    held = Evictions()
    live = {}
    for number, (rank, sequences, kv_bytes) in enumerate(leases):
        one = lease(f"l{number}", rank, sequences=sequences, kv_bytes=kv_bytes)
        live[one.lease_id] = one
        held.add(one)
    told: dict[str, Lease] = {}
    for sequences, kv_bytes, ended in steps:
        for victim in held.take_back(sequences=sequences, kv_bytes=kv_bytes):
            assert victim.lease_id not in told
            told[victim.lease_id] = victim
        freeing = [one for name, one in told.items() if name in live]
        assert held.freeing_concurrency == sum(one.cost.concurrency for one in freeing)
        assert held.freeing_kv_bytes == sum(one.cost.kv_bytes for one in freeing)
        left = [
            one for name, one in live.items() if name not in told and one.eviction_rank is not None
        ]
        if left:
            assert held.freeing_concurrency >= sequences
        gone = live.pop(f"l{ended}", None)
        if gone is not None:
            held.remove(gone)


def test_a_renewed_lease_is_the_same_one() -> None:
    """It is known by its id."""
    one = lease("a")
    held = evictions(one)
    held.remove(replace(one, expires_at_ms=90_000))
    assert taken(held, 1) == []
