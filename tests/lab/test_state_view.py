"""The laboratory reads what the admin interface really writes."""

import msgspec

from envoy_tokenpools.admin.state import state_document
from envoy_tokenpools.core.pool import EntitlementState, Mode, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.lab.state_view import read_state
from envoy_tokenpools.observer import EntitlementReport, PoolReport


def test_the_state_document_of_the_admin_interface_is_read() -> None:
    """Through JSON, as over HTTP; a renamed field is found here and not in a demo."""
    entitlement = EntitlementReport(
        name="batch",
        service_class=ServiceClass.SPOT,
        state=EntitlementState.BOUND,
        baseline=Resources.NONE,
        allocation=Resources(10, 20, 3),
        in_flight=1,
        concurrency=2,
        reserved_tokens=300,
        reserved_kv_bytes=400,
        waiting=4,
        weight=1.0,
        debt=0.0,
        burst=0.5,
    )
    report = PoolReport(
        name="qwen",
        models=("qwen",),
        mode=Mode.ENFORCE,
        degraded=True,
        capacity=Resources(240, 1_000, 16),
        usable=Resources(120, 1_000, 8),
        in_flight=1,
        concurrency=2,
        reserved_tokens=300,
        reserved_kv_bytes=400,
        prompt_ratios={},
        entitlements=(entitlement,),
    )
    written = msgspec.json.encode(state_document("0.1.0", [report]))
    (pool,) = read_state(msgspec.json.decode(written)).pools
    assert (pool.name, pool.mode, pool.degraded) == ("qwen", "enforce", True)
    assert pool.capacity == Resources(240, 1_000, 16)
    in_use = pool.in_use
    assert (in_use.tokens_reserved, in_use.kv_bytes, in_use.concurrency) == (300, 400, 2)
    (seen,) = pool.entitlements
    assert (seen.service_class, seen.in_flight, seen.reserved_tokens) == (ServiceClass.SPOT, 1, 300)
    assert seen.waiting == 4
    assert seen.allocation == Resources(10, 20, 3)
    assert seen.holds_something
    assert pool.holds_something
