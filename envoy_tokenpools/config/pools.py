"""
One pool of the document -> a core `Pool` and the keys of its entitlements.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from envoy_tokenpools.config.credentials import read_keys
from envoy_tokenpools.config.findings import Findings, field_path, item_path
from envoy_tokenpools.config.quantity import format_bytes
from envoy_tokenpools.config.shape import (
    CapacityFields,
    EntitlementFields,
    PoolFields,
    PromiseFields,
    ResourcesFields,
)
from envoy_tokenpools.core.pool import (
    Entitlement,
    EntitlementState,
    Gains,
    Limits,
    Pool,
    Reclaim,
    ServiceClass,
)
from envoy_tokenpools.core.resources import Resources

# The resources: field of the document, how an amount is read, how it is shown.
_RESOURCES: Final[tuple[tuple[str, Callable[[Resources], int], Callable[[int], str]], ...]] = (
    ("tokens_per_second", lambda amount: amount.tokens_per_second, str),
    ("kv_cache", lambda amount: amount.kv_bytes, format_bytes),
    ("concurrency", lambda amount: amount.concurrency, str),
)


# An elastic request rather waits a moment than to be sent away, but not for most of the time that it has.
_ELASTIC_MAX_WAIT_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class ReadPool:
    """A pool and, by digest, which of its entitlements each key identifies."""

    pool: Pool
    keys: Mapping[bytes, str]


def read_pool(
    raw: object, path: str, findings: Findings, env: Mapping[str, str]
) -> ReadPool | None:
    """The pool at `path`, or None when it has faults; all of them are noted."""
    noted = len(findings.faults)
    fields = findings.shaped(PoolFields, raw, path)
    listed = raw.get("entitlements") if isinstance(raw, dict) else None
    raw_entitlements = listed if isinstance(listed, list) else []
    reading = _Entitlements(field_path(path, "entitlements"), findings, env)
    reading.read(raw_entitlements)
    _check_promises(raw, raw_entitlements, path, findings)
    if fields is None or len(findings.faults) > noted:
        return None
    return ReadPool(_pool(fields, reading.entitlements), reading.keys)


def check_unique(named: Iterable[tuple[str, str]], what: str, findings: Findings) -> None:
    """Note each (path, name) whose name an earlier one has."""
    first: dict[str, str] = {}
    for path, name in named:
        if name in first:
            findings.fault(path, f"{what} is taken by {first[name]}")
        else:
            first[name] = path


def texts_at(raw: Sequence[object], path: str, name: str) -> list[tuple[str, str]]:
    """
    The path and value of text field `name` of each item of `raw`.

    Read before validation, so that items with other faults take part.
    """
    return [
        (field_path(item_path(path, index), name), item[name])
        for index, item in enumerate(raw)
        if isinstance(item, dict) and isinstance(item.get(name), str)
    ]


class _Entitlements:
    """Reads the entitlements of one pool."""

    def __init__(self, path: str, findings: Findings, env: Mapping[str, str]) -> None:
        self._path = path
        self._findings = findings
        self._env = env
        self._path_of_key: dict[bytes, str] = {}
        self.entitlements: dict[str, Entitlement] = {}
        self.keys: dict[bytes, str] = {}

    def read(self, raw: Sequence[object]) -> None:
        """Fill `entitlements` and `keys`; those with faults are of no use, but checked."""
        check_unique(texts_at(raw, self._path, "name"), "the name", self._findings)
        for index, item in enumerate(raw):
            path = item_path(self._path, index)
            fields = self._findings.shaped(EntitlementFields, item, path)
            keys = item.get("keys") if isinstance(item, dict) else None
            name = fields.name if fields else ""
            self._read_keys(keys if isinstance(keys, list) else [], path, name)
            if fields is not None:
                self.entitlements[name] = _entitlement(fields)
                if not fields.keys:
                    message = "has no keys: no request can be identified as its own"
                    self._findings.warn(path, message)

    def _read_keys(self, raw: Sequence[object], path: str, name: str) -> None:
        for where, digest in read_keys(raw, field_path(path, "keys"), self._findings, self._env):
            if digest in self._path_of_key:
                self._findings.fault(where, f"the same key as {self._path_of_key[digest]}")
            else:
                self._path_of_key[digest] = where
                self.keys[digest] = name


def _check_promises(
    raw: object, raw_entitlements: Sequence[object], path: str, findings: Findings
) -> None:
    """
    Reserved baselines must fit the pool; elastic ones beyond it are averaged, so only odd.

    Reads what it needs for itself, so that faults elsewhere hide nothing here.
    """
    held = findings.part(CapacityFields, raw)
    if held is None:
        return
    promises = [findings.part(PromiseFields, item) for item in raw_entitlements]
    reserved, promised = Resources.NONE, Resources.NONE
    for promise in promises:
        if promise and promise.baseline and promise.state is EntitlementState.BOUND:
            promised += _resources(promise.baseline)
            if promise.service_class.is_reserved:
                reserved += _resources(promise.baseline)
    for field, of, text in _RESOURCES:
        capacity = of(_capacity(held))
        where = field_path(field_path(path, "capacity"), field)
        beyond = f"more than the {text(capacity)} of all replicas"
        if of(reserved) > capacity:
            findings.fault(where, f"reserved baselines come to {text(of(reserved))}, {beyond}")
        elif of(promised) > capacity:
            findings.warn(where, f"baselines come to {text(of(promised))}, {beyond}")


def _pool(fields: PoolFields, entitlements: Mapping[str, Entitlement]) -> Pool:
    gains = fields.gains
    return Pool(
        name=fields.name,
        models=tuple(fields.models),
        capacity=_capacity(fields),
        kv_bytes_per_token=fields.kv_bytes_per_token,
        tokenizer=fields.tokenizer,
        default_max_tokens=fields.default_max_tokens,
        image_tokens=fields.image_tokens,
        flat_tokens=fields.flat_tokens,
        inject_usage=fields.inject_usage,
        audio_tokens=fields.audio_tokens,
        output_estimate=fields.output_estimate,
        mode=fields.mode,
        window_ms=fields.window,
        tick_ms=fields.tick,
        headroom=fields.headroom,
        ramp_per_second=fields.ramp_per_second,
        max_waiting=fields.max_waiting,
        fairness=fields.fairness,
        on_store_error=fields.on_store_error,
        gains=Gains(slo=gains.slo, burst=gains.burst, debt=gains.debt, gamma=gains.gamma),
        entitlements=entitlements,
    )


def _entitlement(fields: EntitlementFields) -> Entitlement:
    baseline, limits = fields.baseline, fields.limits
    return Entitlement(
        name=fields.name,
        service_class=fields.service_class,
        slo_target_ms=fields.slo_target,
        baseline=Resources.NONE if baseline is None else _resources(baseline),
        limits=Limits(limits.tokens_per_second, limits.kv_cache, limits.concurrency),
        lend=True if fields.lend is None else fields.lend,
        reclaim=_reclaim(fields),
        max_wait_ms=_max_wait_ms(fields),
        state=fields.state,
    )


def _reclaim(fields: EntitlementFields) -> Reclaim:
    if fields.reclaim is not None:
        return fields.reclaim
    is_preemptible = fields.service_class is ServiceClass.PREEMPTIBLE
    return Reclaim.EVICT if is_preemptible else Reclaim.THROTTLE


def _max_wait_ms(fields: EntitlementFields) -> int:
    """As stated; else elastic requests wait for a quarter of their target, and no other ones."""
    if fields.max_wait is not None:
        return fields.max_wait
    if fields.service_class is not ServiceClass.ELASTIC:
        return 0
    target_ms = fields.slo_target
    return _ELASTIC_MAX_WAIT_MS if target_ms is None else min(target_ms // 4, _ELASTIC_MAX_WAIT_MS)


def _capacity(fields: CapacityFields) -> Resources:
    return _resources(fields.capacity).times(fields.replicas)


def _resources(fields: ResourcesFields) -> Resources:
    return Resources(fields.tokens_per_second, fields.kv_cache, fields.concurrency)
