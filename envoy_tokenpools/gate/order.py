"""
What the gate is asked, and what it answers.
"""

import hashlib
from dataclasses import dataclass

from envoy_tokenpools.core.admission import Balance, Lease
from envoy_tokenpools.core.pool import Entitlement, Pool
from envoy_tokenpools.gate.holding import Holding
from envoy_tokenpools.observer import Ending
from envoy_tokenpools.openai.answers import Answer
from envoy_tokenpools.openai.request import RequestFacts
from envoy_tokenpools.openai.usage import Metered


@dataclass(frozen=True, slots=True)
class Order:
    """
    A request that asks to be admitted.

    Attributes:
        pool: the pool that serves its model.
        entitlement: the caller's entitlement there.
        facts: what the body states.
        fingerprint: of the body; the same one again is a retry.
        is_retry: the client says that it tried before.
        arrived_us: when the exchange began.
        enforce: False if nothing can be refused any more (Envoy only observes).
        request_id: Envoy's id of it, by which a decision can be asked for; empty if there is none.
    """

    pool: Pool
    entitlement: Entitlement
    facts: RequestFacts
    fingerprint: int
    is_retry: bool
    arrived_us: int
    enforce: bool = True
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Admitted:
    """
    An admitted request.

    Attributes:
        order: what was asked.
        lease: the reservation; to be settled exactly once.
        balance: what the entitlement has left.
        raw_prompt_tokens: the tokenizer's count, before the learned ratio was applied.
        holding: the lease in this replica's hands; tells when it is evicted.
    """

    order: Order
    lease: Lease
    balance: Balance
    raw_prompt_tokens: int
    holding: Holding


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that was not admitted, with the answer for its client."""

    answer: Answer


Verdict = Admitted | Refused


@dataclass(frozen=True, slots=True)
class Outcome:
    """
    How an admitted request ended.

    Attributes:
        admitted: which one.
        ending: how.
        status: the backend's HTTP status; None if it never answered.
        metered: what was seen of its body; None if that could not be read.
    """

    admitted: Admitted
    ending: Ending
    status: int | None
    metered: Metered | None


def fingerprint_of(body: bytes) -> int:
    """63 bits of a body's BLAKE2b hash, never 0: equal on every replica, and safe as a Lua number's string."""
    return int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "big") >> 1 | 1
