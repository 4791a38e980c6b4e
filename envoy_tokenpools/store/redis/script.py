"""
The script that keeps the books on the server: the Lua files put together, and the keys of a pool.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from urllib.parse import quote

from envoy_tokenpools.core import account, admission, holds, judging, ledger, refusals, withheld
from envoy_tokenpools.core.pool import ServiceClass

_FILES = (
    *("bucket", "books", "withheld", "refusals", "account", "terms", "leases", "judging"),
    *("reserve", "settle", "keep", "tick", "snapshot"),
    "call",
)
"""In this order: what is used stands before what uses it."""

KEY_NAMES = (
    *("pool", "accounts", "active", "leases", "expiry", "taken", "held", "evictable", "freeing"),
    *("expired", "expired_order", "sheds", "shed_order", "away", "rests"),
    *("standings", "versions", "owners", "replies"),
)
"""The keys of a pool, in the order in which the script is given them."""

MAX_STEP_MS = 10_000
"""Pool time moves by at most this much from one call to the next."""

OWNER_TTL_MS = 10_000
"""A replica that has not looked for this long shares the pool no more."""

LEAD_MS = 3_000
"""A replica that leads is replaced when it has given no sign of life for this long; it gives one whenever it looks."""

MAX_SWEPT = 2_000
"""Expired leases taken back in one call, so that it stays short."""

_CONSTANTS: Mapping[str, int] = {
    "WHOLE_PPM": admission.WHOLE_PPM,
    "MAX_LEASES_PER_ENTITLEMENT": ledger.MAX_LEASES_PER_ENTITLEMENT,
    "MAX_EXPIRED": ledger.MAX_EXPIRED,
    "OVERCHARGE": ledger.OVERCHARGE,
    "RETRY_WINDOW_MS": account.RETRY_WINDOW_MS,
    "MAX_REMEMBERED_SHEDS": account.MAX_REMEMBERED_SHEDS,
    "NEVER_MS": judging.NEVER_MS,
    "DEFAULT_HOLD_MS": holds.DEFAULT_HOLD_MS,
    "MAX_GUESSED_HOLD_MS": holds.MAX_GUESSED_HOLD_MS,
    "HOLD_PART": holds.HOLD_PART,
    "MAX_REST_MS": withheld.MAX_REST_MS,
    "REST_PART": withheld.REST_PART,
    "PATIENCE_UP": refusals.PATIENCE[0],
    "PATIENCE_DOWN": refusals.PATIENCE[1],
    "RETURN_MS": refusals.RETURN_MS,
    "MAX_SPAN_MS": refusals.MAX_SPAN_MS,
    "MAX_AWAY": refusals.MAX_AWAY,
    "MAX_RANK": max(each.rank for each in ServiceClass),
    "MAX_STEP_MS": MAX_STEP_MS,
    "OWNER_TTL_MS": OWNER_TTL_MS,
    "LEAD_MS": LEAD_MS,
    "MAX_SWEPT": MAX_SWEPT,
}

_PRELUDE = """
local call, pack, unpack_ = redis.call, cmsgpack.pack, cmsgpack.unpack
local max, min, floor, ceil = math.max, math.min, math.floor, math.ceil
local operations, request = {}, nil
"""


@cache
def script() -> str:
    """The whole script; the constants are those of the core, so that both keep the same rules."""
    folder = files("envoy_tokenpools.store.redis").joinpath("lua")
    constants = "".join(f"local {name} = {value}\n" for name, value in _CONSTANTS.items())
    keys = ", ".join(f"{name} = KEYS[{i}]" for i, name in enumerate(KEY_NAMES, 1))
    parts = [folder.joinpath(f"{name}.lua").read_text("utf-8") for name in _FILES]
    return "\n".join((_PRELUDE, constants, f"local KEY = {{{keys}}}", *parts))


def pool_keys(prefix: str, pool: str) -> tuple[str, ...]:
    """
    The keys of `pool`, all in one hash slot: its name stands in braces, and can supply none itself.
    """
    tag = quote(pool, safe="")
    return tuple(f"{prefix}:{{{tag}}}:{name}" for name in KEY_NAMES)


def channel(prefix: str, pool: str) -> str:
    """Where owners of leases in `pool` are told to end them."""
    return f"{prefix}:{{{quote(pool, safe='')}}}:evicted"
