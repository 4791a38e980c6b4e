"""Seven entitlements of all classes on one pool, and costs that they ask for: for models of the books."""

from dataclasses import replace

from hypothesis import strategies as st

from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.pool import Limits, Reclaim, ServiceClass
from envoy_tokenpools.core.resources import Resources
from tests.support.pools import entitlement

DEDICATED, GUARANTEED, ELASTIC, SPOT, PREEMPTIBLE = ServiceClass

CAPACITY = Resources(tokens_per_second=1_000, kv_bytes=10_000, concurrency=16)

SEVEN = {
    one.name: one
    for one in (
        entitlement("dedicated", DEDICATED, Resources(100, 1_000, 2)),
        entitlement("guaranteed", GUARANTEED, Resources(200, 2_000, 4)),
        entitlement("keeps", GUARANTEED, Resources(100, 1_500, 2), lend=False),
        entitlement("elastic", ELASTIC, Resources(300, 3_000, 5), slo_target_ms=500),
        entitlement("limited", ELASTIC, Resources(50, 500, 1), limits=Limits(60, 4_000, 3)),
        entitlement("spot", SPOT),
        replace(entitlement("preemptible", PREEMPTIBLE), reclaim=Reclaim.EVICT),
    )
}

COSTS = st.builds(
    Cost,
    prompt_tokens=st.integers(0, 1_500),
    output_tokens=st.integers(0, 500),
    kv_bytes=st.integers(0, 3_000) | st.integers(0, CAPACITY.kv_bytes),
    concurrency=st.integers(1, 4) | st.integers(1, CAPACITY.concurrency),
)
