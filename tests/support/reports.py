"""A pool to report on, and a reporter that is told what to report."""

from collections.abc import Sequence

from envoy_tokenpools.core.pool import EntitlementState, Mode, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.observer import EntitlementReport, PoolReport

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
    entitlements=(SEARCH,),
    prompt_ratios={"Qwen/Qwen3-8B": 1.08},
)


class FakeReporter:
    """Reports `fresh` once it was refreshed, and nothing before."""

    def __init__(self) -> None:
        self.fresh: Sequence[PoolReport] = (QWEN,)
        self.is_ready = True
        self.refreshes = 0
        self._last: Sequence[PoolReport] = ()

    async def refresh(self) -> None:
        """Take over what is fresh."""
        self.refreshes += 1
        self._last = self.fresh

    def report(self) -> Sequence[PoolReport]:
        """As of the last refresh."""
        return self._last
