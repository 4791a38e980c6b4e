"""Whatever is done to the books, what is in use is the sum of the live leases."""

import asyncio
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envoy_tokenpools.core.admission import Lease
from envoy_tokenpools.core.ledger import InUse
from tests.store.books import Books, Opener
from tests.support.pools import amount, claim, cost, terms

USABLE = amount(1_000, sequences=8, kv_bytes=50_000)
NAMES = st.sampled_from(["a", "b", "c"])
IDS = st.builds("{}-{}".format, NAMES, st.integers(0, 3))

RESERVE = st.tuples(st.just("reserve"), IDS, st.integers(0, 400), st.integers(1, 3), st.booleans())
SETTLE = st.tuples(st.just("settle"), IDS, st.integers(0, 900))
PASS = st.tuples(st.just("pass"), st.integers(0, 3_000))
RENEW = st.tuples(st.just("renew"), st.lists(IDS, max_size=3))
OTHERS = st.sampled_from([("sweep",), ("tick",)])


async def check(books: Books, steps: list[tuple[Any, ...]]) -> None:
    """Do the steps, and after each compare with leases remembered in a plain dict."""
    live: dict[str, Lease] = {}
    for kind, *arguments in steps:
        await _do(books, live, kind, arguments)
        view = await books.store.snapshot(books.pool)
        for name in {lease.entitlement for lease in live.values()} | set(view.accounts):
            mine = [lease.cost for lease in live.values() if lease.entitlement == name]
            assert view.accounts.get(name, InUse()) == InUse(
                in_flight=len(mine),
                concurrency=sum(one.concurrency for one in mine),
                reserved_tokens=sum(one.tokens for one in mine),
                kv_bytes=sum(one.kv_bytes for one in mine),
            )
        assert view.total.in_flight == len(live)
    for lease_id in list(live):
        assert await books.settle(lease_id, 0) is not None
    assert (await books.store.snapshot(books.pool)).total == InUse()


async def _do(books: Books, live: dict[str, Lease], kind: str, arguments: list[Any]) -> None:
    match kind, arguments:
        case "reserve", [str(lease_id), int(tokens), int(sequences), bool(enforce)]:
            wanted = claim(
                lease_id,
                cost(tokens, sequences, tokens * 100),
                terms(lease_id[0]),
                USABLE,
                ttl_ms=2_000,
                enforce=enforce,
            )
            outcome = await books.reserve(wanted)
            if isinstance(outcome, Lease):
                assert live.setdefault(lease_id, outcome).cost == outcome.cost
            else:
                assert lease_id not in live
        case "settle", [str(lease_id), int(tokens)]:
            settlement = await books.settle(lease_id, tokens)
            assert (settlement is not None and not settlement.late) == (lease_id in live)
            live.pop(lease_id, None)
        case "pass", [int(ms)]:
            await books.pass_ms(ms)
        case "renew", [list(lease_ids)]:
            await books.store.renew(books.pool, lease_ids, 2_000)
        case "sweep", []:
            for lease in await books.store.sweep(books.pool):
                del live[lease.lease_id]
        case _:
            await books.store.close_tick(books.pool)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(RESERVE, SETTLE, PASS, RENEW, OTHERS), max_size=40))
def test_in_use_is_the_sum_of_the_live_leases(
    open_books: Opener, steps: list[tuple[Any, ...]]
) -> None:
    """By entitlement and in total, after every step, and nothing when all are settled."""

    async def run() -> None:
        async with open_books() as books:
            await check(books, steps)

    asyncio.run(run())
