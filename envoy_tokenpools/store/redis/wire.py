"""
Operations and replies as MessagePack: what the script reads and writes.

What comes back is checked: a server that answers wrongly is an error, never a decision.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from envoy_tokenpools.core.account import Meters
from envoy_tokenpools.core.admission import (
    Balance,
    Claim,
    Lease,
    Reason,
    Refusal,
    Resource,
    Settlement,
    Terms,
)
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.ledger import InUse, LedgerView
from envoy_tokenpools.core.pool import Limits
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.core.tick import Standing
from envoy_tokenpools.errors import StoreError
from envoy_tokenpools.store.base import Reply, Survivor

Operation = Sequence[Any]
"""Its name, and its arguments as the Lua file of that name says."""

Answer = Any
"""As that file says."""

NO_LIMIT = -1

MOST = (1 << 53) - 1
"""Above this a number of Lua is not exact."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, list[Any]]).decode
_decode_ids = msgspec.msgpack.Decoder(list[str]).decode


class WrongAnswerError(StoreError):
    """The server said something that its script cannot have said."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the store answered wrongly: {what}", transient=True)


def encode_operations(operations: Sequence[Operation]) -> bytes:
    """The script's last argument."""
    return _encode(operations)


def decode_answers(reply: object, expected: int) -> tuple[str, list[Answer]]:
    """
    The epoch of the books and the answers.

    Raises:
        WrongAnswerError: it is nothing that the script replies.
    """
    if not isinstance(reply, bytes):
        raise WrongAnswerError(f"a reply of type {type(reply).__name__}")
    try:
        epoch, answers = _decode(reply)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WrongAnswerError(str(error)) from error
    if len(answers) != expected:
        raise WrongAnswerError(f"{len(answers)} answers to {expected} operations")
    return epoch, answers


def decode_lease_ids(message: bytes) -> tuple[str, ...]:
    """The leases that a message on the channel names; none if it is no such message."""
    try:
        return tuple(_decode_ids(message))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ()


# ---------------------------------------------------------------------- operations


def reserve_operation(claim: Claim) -> Operation:
    """See `reserve.lua`."""
    cost, terms = claim.cost, claim.terms
    return (
        "reserve",
        claim.lease_id,
        terms.entitlement,
        (_terms(terms), resources(claim.usable), claim.window_ms),
        (cost.prompt_tokens, cost.output_tokens, cost.kv_bytes, cost.concurrency),
        claim.ttl_ms,
        str(claim.fingerprint),
        claim.is_retry,
        claim.enforce,
    )


def settle_operation(lease_id: str, tokens: int) -> Operation:
    """See `settle.lua`."""
    return ("settle", lease_id, min(tokens, MOST))


def restore_operation(survivors: Sequence[Survivor], ttl_ms: int) -> Operation:
    """See `keep.lua`."""
    shown = [(_shown(survivor.lease), survivor.held_ms) for survivor in survivors]
    return ("restore", shown, ttl_ms)


def publish_entry(standing: Standing, terms: Terms, *, with_terms: bool) -> Operation:
    """One entitlement of a tick: see `tick.lua`."""
    name = terms.entitlement
    return (name, _standing_text(standing, terms), _terms(terms) if with_terms else False)


def resources(amount: Resources) -> tuple[int, int, int]:
    """An amount as the script knows it."""
    return (amount.tokens_per_second, amount.kv_bytes, amount.concurrency)


def _limits(limits: Limits) -> tuple[int, int, int]:
    amounts = (limits.tokens_per_second, limits.kv_bytes, limits.concurrency)
    tokens, kv_bytes, concurrency = (NO_LIMIT if each is None else each for each in amounts)
    return (tokens, kv_bytes, concurrency)


def _terms(terms: Terms) -> tuple[Any, ...]:
    return (
        terms.rank,
        terms.weight,
        terms.evictable,
        terms.withheld_ppm,
        resources(terms.guarantee),
        resources(terms.share),
        _limits(terms.limits),
    )


def _shown(lease: Lease) -> tuple[Any, ...]:
    cost, refusal = lease.cost, lease.shadowed
    return (
        lease.lease_id,
        lease.entitlement,
        cost.prompt_tokens,
        cost.output_tokens,
        cost.kv_bytes,
        cost.concurrency,
        lease.within_share,
        lease.within_guarantee,
        lease.tokens_guaranteed,
        lease.pool_ppm,
        lease.admitted_at_ms,
        lease.expires_at_ms,
        -1 if lease.eviction_rank is None else lease.eviction_rank,
        refusal is not None
        and (
            refusal.reason.value,
            refusal.resource.value,
            refusal.need,
            refusal.available,
            refusal.retry_after_ms,
        ),
    )


# ---------------------------------------------------------------------- answers

T = TypeVar("T")

_Ids = list[str]
_Refusal = tuple[str, str, int, int, int]
_Lease = tuple[
    str, str, int, int, int, int, bool, bool, bool, int, int, int, int, _Refusal | bool
]  # fmt: skip
_News = tuple[int, tuple[int, int, int], bool, bool, list[str]]
_Meters = tuple[int, int, int, int, int, int, int, int, int]

_FORMS: Mapping[str, Any] = {
    "reserve": tuple[_Lease | bool, _Refusal | bool, tuple[int, int, int, int, int, int], _Ids],
    "settle": tuple[_Lease, int, int, bool] | bool,
    "renew": tuple[_Ids, _Ids],
    "restore": bool,
    "sweep": list[_Lease],
    "open": tuple[int, int, bool],
    "look": tuple[int, _News | bool, _Ids, int],
    "leave": bool,
    "close_tick": tuple[int, int, list[tuple[str, _Meters]]] | bool,
    "publish": int | Literal["fenced", "stale"],
    "snapshot": tuple[tuple[int, int, int], list[tuple[str, int, int, int, int]]],
}
"""By operation, what it may answer; where something may be false, true is nothing."""


def checked(operation: Operation, answer: Answer) -> Answer:
    """
    The answer, of the form that it has to have.

    Raises:
        WrongAnswerError: it has another one.
    """
    name = operation[0]
    try:
        form: Answer = msgspec.convert(answer, _FORMS[name])
    except msgspec.ValidationError as error:
        raise WrongAnswerError(f"{name}: {error}") from error
    if form is True and _FORMS[name] is not bool:
        raise WrongAnswerError(f"{name}: true")
    return form


def read(reader: Callable[[Answer], T], answer: Answer) -> T:
    """
    The answer as `reader` understands it.

    Raises:
        WrongAnswerError: it does not.
    """
    try:
        return reader(answer)
    except (TypeError, ValueError) as error:
        raise WrongAnswerError(str(error)) from error


def read_reply(answer: Answer) -> Reply:
    """The answer to `reserve`."""
    lease, refusal, balance, evicted = answer
    outcome = read_lease(lease) if lease else read_refusal(refusal)
    return Reply(outcome, Balance(*balance), tuple(evicted))


def read_lease(answer: Answer) -> Lease:
    """A lease as it is told."""
    (lease_id, entitlement, prompt, output, kv_bytes, concurrency, *flags) = answer
    within_share, within_guarantee, guaranteed, ppm, at_ms, expires_ms, rank, shadowed = flags
    return Lease(
        lease_id=lease_id,
        entitlement=entitlement,
        cost=Cost(prompt, output, kv_bytes, concurrency),
        within_share=within_share,
        within_guarantee=within_guarantee,
        tokens_guaranteed=guaranteed,
        pool_ppm=ppm,
        admitted_at_ms=at_ms,
        expires_at_ms=expires_ms,
        eviction_rank=None if rank < 0 else rank,
        shadowed=read_refusal(shadowed) if shadowed else None,
    )


def read_refusal(answer: Answer) -> Refusal:
    """A refusal as it is told."""
    reason, resource, need, available, retry_after_ms = answer
    return Refusal(Reason(reason), Resource(resource), need, available, retry_after_ms)


def read_settlement(answer: Answer) -> Settlement | None:
    """The answer to `settle`."""
    if not answer:
        return None
    lease, charged, held_ms, late = answer
    return Settlement(read_lease(lease), charged, held_ms, late)


def read_meters(answer: Answer) -> Mapping[str, Meters]:
    """The meters of a tick, of those that did anything."""
    return {name: Meters(*meters) for name, meters in answer}


def read_view(answer: Answer) -> LedgerView:
    """The answer to `snapshot`."""
    (leases, concurrency, kv_bytes), each = answer
    accounts = {name: InUse(*amounts) for name, *amounts in each}
    reserved = sum(in_use.reserved_tokens for in_use in accounts.values())
    return LedgerView(InUse(leases, concurrency, reserved, kv_bytes), accounts)


# ---------------------------------------------------------------------- what others read of a tick

_text_encode = msgspec.json.Encoder().encode
_text_decode = msgspec.json.Decoder(tuple[Standing, Terms]).decode


def _standing_text(standing: Standing, terms: Terms) -> str:
    return _text_encode((standing, terms)).decode()


def read_standing(text: str) -> tuple[Standing, Terms]:
    """
    One entitlement of a tick that another replica has published.

    Raises:
        WrongAnswerError: it is of another version of this program, or broken.
    """
    try:
        return _text_decode(text)
    except (msgspec.DecodeError, ValueError) as error:
        raise WrongAnswerError(f"a standing that cannot be read: {error}") from error
