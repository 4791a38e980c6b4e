"""
The configuration as the rest of the package sees it: whole, validated and frozen.
"""

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from envoy_tokenpools.core.pool import Pool
from envoy_tokenpools.errors import Fault

# The books in this process; every other `state` is the address of a server (`address.py`).
EMBEDDED: Final = "memory://"


def credential_digest(text: str) -> bytes:
    """The SHA-256 of a credential (32 bytes): all that is kept of it."""
    # surrogatepass: any text a client can send has a digest
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class Trusted(enum.Enum):
    """Ways to know a caller that need no secret, because Envoy vouches for them."""

    CLAIM = "claim"
    PRINCIPAL = "principal"
    ANONYMOUS = "anonymous"


def trusted_digest(kind: Trusted, value: str) -> bytes:
    """
    What stands for a trusted identity among the digests of credentials (32 bytes).

    The NUL in front keeps them apart from every key: no header can carry it.
    """
    return credential_digest(f"\0{kind.value}\0{value}")


@dataclass(frozen=True, slots=True)
class ClaimSource:
    """
    Where the claim that names a tenant stands in Envoy's dynamic metadata.

    Attributes:
        namespace: the metadata namespace, that of the filter that verified the token.
        path: the names that lead to it, outermost first.
    """

    namespace: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EntitlementRef:
    """Names one entitlement of one pool."""

    pool: str
    entitlement: str


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """
    Limits of the server itself.

    Attributes:
        max_body_bytes: largest request body that is read; above it the answer is 413. Images as data URLs make
            megabytes usual.
        path_prefix: the path that the metered endpoints lie below.
        rejects_unknown_endpoints: whether a POST to any other path is refused with 404.
        lease_ttl_ms: after this time without a sign of life a lease counts as lost.
        drain_ms: how long a stopping server waits for requests in flight.
        explain_last: decisions that are kept, to be explained when asked.
        store_deadline_ms: how long a decision waits for a shared store.
    """

    max_body_bytes: int = 8 * 1_024**2
    path_prefix: str = ""
    rejects_unknown_endpoints: bool = True
    lease_ttl_ms: int = 60_000
    drain_ms: int = 30_000
    explain_last: int = 1_000
    store_deadline_ms: int = 50


@dataclass(frozen=True, slots=True)
class Config:
    """
    One valid configuration. A reload replaces it whole.

    Attributes:
        state: URL of the shared state. It may hold a password, so it is not in the repr.
        pools: by name.
        pool_of_model: model name -> pool name.
        default_pool: serves models that no pool names; None refuses them.
        keys: digest of a credential, or of a trusted identity -> the entitlements it identifies, at
            most one per pool.
        claim: where the claim that names a tenant is found; None if none is used.
        server: limits of the server.
        warnings: what is allowed but probably not meant.
    """

    state: str = field(repr=False)
    pools: Mapping[str, Pool]
    pool_of_model: Mapping[str, str]
    default_pool: str | None
    keys: Mapping[bytes, tuple[EntitlementRef, ...]] = field(repr=False)
    claim: ClaimSource | None = None
    server: ServerSettings = ServerSettings()
    warnings: tuple[Fault, ...] = ()
