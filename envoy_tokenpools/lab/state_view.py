"""
The filter's `/state` as typed values: the part of it that the laboratory reads.
"""

from collections.abc import Mapping

import msgspec

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.core.resources import Resources


class InUse(msgspec.Struct, frozen=True):
    """What all leases of a pool hold together."""

    tokens_reserved: int
    kv_bytes: int
    concurrency: int


class EntitlementView(msgspec.Struct, frozen=True):
    """One entitlement as the filter sees it."""

    name: str
    service_class: ServiceClass
    in_flight: int
    reserved_tokens: int
    reserved_kv_bytes: int
    baseline: Resources
    allocation: Resources
    weight: float
    debt: float
    burst: float
    waiting: int = 0

    @property
    def holds_something(self) -> bool:
        """Whether any lease of it is open."""
        return any((self.in_flight, self.reserved_tokens, self.reserved_kv_bytes))


class PoolView(msgspec.Struct, frozen=True):
    """One pool."""

    name: str
    mode: str
    degraded: bool
    capacity: Resources
    in_use: InUse
    entitlements: list[EntitlementView]

    @property
    def holds_something(self) -> bool:
        """Whether any lease of it is open."""
        in_use = self.in_use
        return any((in_use.tokens_reserved, in_use.kv_bytes, in_use.concurrency))


class StateView(msgspec.Struct, frozen=True):
    """The whole report."""

    pools: list[PoolView]


def read_state(state: Mapping[str, object]) -> StateView:
    """
    Type the JSON of `/state`; fields that are not read here are ignored.

    Raises:
        msgspec.ValidationError: a field is missing or of another type.
    """
    return msgspec.convert(state, StateView)
