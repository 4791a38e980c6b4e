"""
What an exchange wants done.
"""

from dataclasses import dataclass

from envoy_tokenpools.gate.order import Order, Outcome
from envoy_tokenpools.observer import Decided, FirstToken


@dataclass(frozen=True, slots=True)
class Reply:
    """Send these bytes to Envoy."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Admit:
    """Ask the gate; the exchange waits for `admitted`, `refused` or `rejected`."""

    order: Order


@dataclass(frozen=True, slots=True)
class Settle:
    """Settle the lease."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the observer."""

    event: Decided | FirstToken


@dataclass(frozen=True, slots=True)
class Abort:
    """End the gRPC stream with an error, upon which Envoy resets the request on both of its sides."""


Action = Reply | Admit | Settle | Tell | Abort
Actions = tuple[Action, ...]
