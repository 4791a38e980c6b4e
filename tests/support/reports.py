"""A pool to report on, and a reporter that is told what to report."""

from collections.abc import Sequence

from envoy_tokenpools.core.admission import Resource
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.pool import EntitlementState, Limits, Mode, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.weight import Factors
from envoy_tokenpools.observer import (
    EntitlementReport,
    Explanation,
    Outcome,
    PoolReport,
    Priority,
    Shortage,
)

SEARCH = EntitlementReport(
    name="search",
    service_class=ServiceClass.GUARANTEED,
    state=EntitlementState.BOUND,
    baseline=Resources(90, 2_000, 6),
    allocation=Resources(95, 2_500, 7),
    in_flight=2,
    concurrency=3,
    reserved_tokens=360,
    reserved_kv_bytes=1_500,
    waiting=1,
    weight=333.25,
    debt=-0.25,
    burst=0.5,
)
QWEN = PoolReport(
    name="qwen",
    models=("Qwen/Qwen3-8B", "qwen3-8b"),
    mode=Mode.ENFORCE,
    degraded=True,
    capacity=Resources(240, 16_000, 16),
    usable=Resources(200, 14_000, 14),
    in_flight=4,
    concurrency=5,
    reserved_tokens=700,
    reserved_kv_bytes=3_100,
    waiting=1,
    oldest_wait_ms=1_700,
    entitlements=(SEARCH,),
    prompt_ratios={"Qwen/Qwen3-8B": 1.08},
)

SHED = Explanation(
    request_id="8f3c",
    at_ms=70_000,
    age_ms=2_500,
    pool="qwen",
    entitlement="batch",
    service_class=ServiceClass.SPOT,
    state=EntitlementState.BOUND,
    mode=Mode.ENFORCE,
    outcome=Outcome.SHED,
    reason="pool_contended",
    rule="rule 5b: the pool has no free capacity for it",
    priority=Priority(
        weight=0.25,
        factors=Factors(1.0, 0.5, 0.5, 1.0),
        debt=0.0,
        burst=1.0,
        slo_target_ms=None,
        mean_slo_ms=500.0,
    ),
    cost=Cost(prompt_tokens=30, output_tokens=70, kv_bytes=400, concurrency=2),
    usable=Resources(200, 14_000, 14),
    share=Resources(5, 500, 1),
    guarantee=Resources.NONE,
    limits=Limits(concurrency=4),
    inside_share=None,
    inside_guarantee=False,
    shortage=Shortage(Resource.CONCURRENCY, need=2, available=1, retry_after_ms=850),
    waited_ms=0,
    ended=None,
)


class FakeReporter:
    """Reports `fresh` once it was refreshed, and nothing before; knows the decisions in `explanations`."""

    def __init__(self) -> None:
        self.fresh: Sequence[PoolReport] = (QWEN,)
        self.explanations: dict[str, Explanation] = {SHED.request_id: SHED}
        self.is_ready = True
        self.store_answers = True
        self.refreshes = 0
        self._last: Sequence[PoolReport] = ()

    async def refresh(self) -> None:
        """Take over what is fresh."""
        self.refreshes += 1
        self._last = self.fresh

    def report(self) -> Sequence[PoolReport]:
        """As of the last refresh."""
        return self._last

    def explain(self, request_id: str) -> Explanation | None:
        """One of `explanations`."""
        return self.explanations.get(request_id)
