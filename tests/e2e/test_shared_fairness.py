"""The fair-share experiment on one and on three replicas: shares and debts are the pool's, not a replica's."""

from dataclasses import replace

import pytest
import pytest_asyncio

from envoy_tokenpools.config import EMBEDDED
from envoy_tokenpools.lab.books import own_books
from envoy_tokenpools.lab.live_run import run_live
from envoy_tokenpools.lab.measures import Measured
from envoy_tokenpools.lab.record import RunRecord
from envoy_tokenpools.lab.scenario_file import runs_named, shipped_scenarios
from tests.support.shared_redis import shared_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

TIME_SCALE = 0.1
REPLICAS = 3

WITHIN = 0.05
"""
Shares of two runs differ by up to 0.02 by chance, on a busy machine by up to 0.04; those of replicas that do not share
their books by 0.12 and more from those that do.
"""

PATIENCE_MS = 1_000
"""A decision may take so long: that other processes keep this one waiting is not what is tested."""


async def fair_share(replicas: int, server: str) -> RunRecord:
    """One run in half a minute, on books of its own."""
    (scenario,) = runs_named(shipped_scenarios("fair-share"), ["with"])
    async with own_books(server, scenario.pool.name) as state:
        shortened = scenario.scaled(TIME_SCALE).keeping_books_at(state)
        patient = replace(shortened.config.server, store_deadline_ms=PATIENCE_MS)
        config = replace(shortened.config, server=patient)
        return await run_live(replace(shortened, config=config), replica_count=replicas)


def largest_difference(one: RunRecord, other: RunRecord) -> float:
    """Between the shares that a tenant has of all tokens."""
    shares, others = Measured(one).shares(), Measured(other).shares()
    return max(abs(shares[name] - others[name]) for name in shares)


def debts_that_all_saw(record: RunRecord) -> float:
    """Of the debts that any replica reported, the part that each of them did; they take turns."""
    seen = [
        {
            tuple(standing.debt for standing in sample.standings.values())
            for sample in record.samples[replica::REPLICAS]
        }
        for replica in range(REPLICAS)
    ]
    return len(set.intersection(*seen)) / len(set.union(*seen))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lone() -> RunRecord:
    """What one replica does."""
    return await fair_share(1, shared_server())


async def test_three_replicas_share_a_pool_as_one_does(lone: RunRecord) -> None:
    """Each decides a third; tenants get what they get from one replica, and no more runs than there are slots."""
    shared = await fair_share(REPLICAS, shared_server())
    made = [each.made for each in shared.decisions]
    assert min(made) > sum(made) / REPLICAS / 2
    assert not any(each.alone for each in (*lone.decisions, *shared.decisions))
    assert largest_difference(lone, shared) < WITHIN
    # A debt is published every second, and seen by all within a quarter of one; the last one may come too late.
    assert debts_that_all_saw(shared) > 0.8
    queues = [Measured(record).most_queued(within=lambda _: True) for record in (lone, shared)]
    assert max(queue or 0 for queue in queues) < shared.slots / 2


async def test_replicas_that_decide_for_themselves_do_not(lone: RunRecord) -> None:
    """The control: books that are not shared give each tenant what it grabs, and each replica debts of its own."""
    apart = await fair_share(REPLICAS, EMBEDDED)
    assert largest_difference(lone, apart) > 2 * WITHIN
    assert debts_that_all_saw(apart) < 0.2
    assert (Measured(apart).most_queued(within=lambda _: True) or 0) > apart.slots / 2
