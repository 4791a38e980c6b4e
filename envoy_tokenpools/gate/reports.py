"""
A live pool as a report: configuration, books and standings side by side.
"""

from envoy_tokenpools.core.ledger import InUse
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import NEW_STANDING
from envoy_tokenpools.gate.live import LivePool
from envoy_tokenpools.observer import EntitlementReport, PoolReport


def pool_report(live: LivePool, usable: Resources, now_ms: int) -> PoolReport:
    """The report of one pool: its books as of their last reading, and who waits here at `now_ms`."""
    pool, tick, total = live.pool, live.tick, live.view.total
    waiting = live.waiting.counts()
    entitlements = []
    for entitlement in pool.entitlements.values():
        in_use = live.view.accounts.get(entitlement.name, InUse())
        standing = tick.standings.get(entitlement.name, NEW_STANDING)
        terms = tick.terms.get(entitlement.name)
        entitlements.append(
            EntitlementReport(
                name=entitlement.name,
                service_class=entitlement.service_class,
                state=entitlement.state,
                baseline=entitlement.baseline,
                allocation=terms.share if terms is not None else Resources.NONE,
                in_flight=in_use.in_flight,
                concurrency=in_use.concurrency,
                reserved_tokens=in_use.reserved_tokens,
                reserved_kv_bytes=in_use.kv_bytes,
                waiting=waiting.get(entitlement.name, 0),
                weight=standing.weight,
                debt=standing.debt,
                burst=standing.burst,
            )
        )
    return PoolReport(
        name=pool.name,
        models=pool.models,
        mode=pool.mode,
        degraded=tick.degraded,
        capacity=pool.capacity,
        usable=usable,
        in_flight=total.in_flight,
        concurrency=total.concurrency,
        reserved_tokens=total.reserved_tokens,
        reserved_kv_bytes=total.kv_bytes,
        waiting=live.waiting.total,
        oldest_wait_ms=live.waiting.oldest_ms(now_ms),
        entitlements=entitlements,
        prompt_ratios={model: ratio.value for model, ratio in live.ratios.items()},
    )
