"""
The shape of the YAML document: fields, types, ranges, defaults, and what one mapping must agree on.

Pools, entitlements and keys are validated one by one, so that a fault in one hides none in
another; hence the `list[object]` fields. Rules between fields are field validators that look at
the fields before them (`info.data` has only valid ones), so that they too are told at once.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from envoy_tokenpools.config.quantity import (
    MAX_QUANTITY,
    DurationRange,
    QuantityRange,
    format_bytes,
)
from envoy_tokenpools.config.settings import ServerSettings
from envoy_tokenpools.core.pool import (
    EntitlementState,
    Fairness,
    Gains,
    Mode,
    OnStoreError,
    OutputEstimate,
    Pool,
    Reclaim,
    ServiceClass,
)

# Names are metric labels and parts of store keys.
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LONGEST_MODEL: Final = 256
_PATH: Final = re.compile(r"(?:/[A-Za-z0-9._~-]+)*")
# Defaults are said once, by what the document becomes.
_POOL: Final[Mapping[str, Any]] = {one.name: one.default for one in fields(Pool)}
_GAINS: Final = Gains()
_SERVER: Final = ServerSettings()
_ON_STORE_ERROR: Final = Pool.DEFAULT_ON_STORE_ERROR
_BYTES: Final = QuantityRange(1, in_bytes=True)


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            "must be 1 to 63 letters, digits, '.', '_' or '-', with a letter or digit at both ends"
        )
    return value


def _model_name(value: str) -> str:
    if not 0 < len(value) <= _LONGEST_MODEL or not value.isprintable() or value != value.strip():
        raise ValueError(f"must be 1 to {_LONGEST_MODEL} printable characters, no blanks around")
    return value


def _path_prefix(value: str) -> str:
    if value and (not value.startswith("/") or value.endswith("/") or not _PATH.fullmatch(value)):
        raise ValueError("must be a path such as /team-a, without a slash at its end")
    return value


def _dotted_path(value: str) -> str:
    if not value or len(value) > _LONGEST_MODEL or not all(value.split(".")):
        raise ValueError("must be names separated by dots, such as jwt_payload.tenant")
    return value


def _on_store_error(value: object) -> Mapping[ServiceClass, OnStoreError]:
    """One word for all classes, or a word for some of them; the others keep their default."""
    words = {each.value: each for each in OnStoreError}
    classes = {each.value: each for each in ServiceClass}
    named = dict.fromkeys(classes, value) if isinstance(value, str) else value
    if not isinstance(named, dict) or not named.keys() <= classes.keys():
        raise ValueError(f"must be allow, deny, or a mapping of these to {', '.join(classes)}")
    if not all(isinstance(word, str) and word in words for word in named.values()):
        raise ValueError("must be allow or deny")
    return {**_ON_STORE_ERROR, **{classes[name]: words[word] for name, word in named.items()}}


Name = Annotated[str, AfterValidator(_name)]
ModelName = Annotated[str, AfterValidator(_model_name)]
Count = Annotated[int, BeforeValidator(QuantityRange(1))]
CountOrZero = Annotated[int, BeforeValidator(QuantityRange(0))]
Bytes = Annotated[int, BeforeValidator(_BYTES)]
Vocabulary = Literal["cl100k_base", "o200k_base"]


class _Fields(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False
    )


class ResourcesFields(_Fields):
    """All three resources: a capacity or a baseline."""

    tokens_per_second: Count
    kv_cache: Bytes
    concurrency: Count


class LimitsFields(_Fields):
    """Ceilings; one that is absent leaves the resource to the pool."""

    tokens_per_second: Count | None = None
    kv_cache: Bytes | None = None
    concurrency: Count | None = None


class ModelShapeFields(_Fields):
    """What the KV cache of a token is computed from; 4-bit values have 0.5 bytes."""

    layers: Count
    kv_heads: Count
    head_dim: Count
    bytes_per_value: Annotated[float, Field(gt=0, le=16)]

    @field_validator("bytes_per_value")
    @classmethod
    def _must_be_whole(cls, value: float, info: ValidationInfo) -> float:
        if {"layers", "kv_heads", "head_dim"} <= info.data.keys():
            size = _kv_bytes(
                info.data["layers"], info.data["kv_heads"], info.data["head_dim"], value
            )
            if size.denominator != 1 or size > MAX_QUANTITY:
                raise ValueError(f"must come to whole bytes per token, at most {MAX_QUANTITY}")
        return value

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token occupies."""
        return int(_kv_bytes(self.layers, self.kv_heads, self.head_dim, self.bytes_per_value))


def _kv_bytes(layers: int, kv_heads: int, head_dim: int, bytes_per_value: float) -> Fraction:
    """A key and a value of every layer and KV head (paper section 3.1)."""
    return 2 * layers * kv_heads * head_dim * Fraction(bytes_per_value)


class GainsFields(_Fields):
    """Constants of the weight."""

    slo: Annotated[float, Field(ge=0, le=1_000)] = _GAINS.slo
    burst: Annotated[float, Field(ge=0, le=1_000)] = _GAINS.burst
    debt: Annotated[float, Field(ge=0, le=1_000)] = _GAINS.debt
    gamma: Annotated[float, Field(ge=0, lt=1)] = _GAINS.gamma


class KeyFields(_Fields):
    """One way to know the tenant; exactly one of them is given."""

    sha256: str | None = Field(default=None, repr=False)
    env: str | None = Field(default=None, repr=False)
    plain: str | None = Field(default=None, repr=False)
    claim: str | None = None
    principal: str | None = None
    anonymous: Literal[True] | None = None


class IdentityFields(_Fields):
    """Where trusted identities come from."""

    claim: Annotated[str, AfterValidator(_dotted_path)] | None = None
    claim_namespace: Annotated[str, Field(min_length=1, max_length=256)] = (
        "envoy.filters.http.jwt_authn"
    )


class PromiseFields(_Fields):
    """What an entitlement is promised."""

    # strict takes enum members only, and a document holds their values
    service_class: Annotated[ServiceClass, Field(alias="class", strict=False)]
    state: Annotated[EntitlementState, Field(strict=False)] = EntitlementState.BOUND
    baseline: ResourcesFields | None = Field(default=None, validate_default=True)

    @field_validator("baseline")
    @classmethod
    def _must_suit_class(
        cls, value: ResourcesFields | None, info: ValidationInfo
    ) -> ResourcesFields | None:
        service_class = info.data.get("service_class")
        if service_class is not None and service_class.has_baseline != (value is not None):
            has = "is required for" if service_class.has_baseline else "is not for"
            raise ValueError(f"{has} class {service_class.value}")
        return value


class EntitlementFields(PromiseFields):
    """One entitlement."""

    name: Name
    slo_target: Annotated[int, BeforeValidator(DurationRange(1, 3_600_000))] | None = None
    limits: LimitsFields = LimitsFields()
    lend: bool | None = None
    reclaim: Annotated[Reclaim | None, Field(strict=False)] = None
    max_wait: Annotated[int, BeforeValidator(DurationRange(0, 300_000))] | None = None
    keys: list[object] = Field(default=[], repr=False)

    @field_validator("limits")
    @classmethod
    def _must_reach_baseline(cls, value: LimitsFields, info: ValidationInfo) -> LimitsFields:
        baseline = info.data.get("baseline")
        if baseline is not None:
            below = [
                name
                for name, limit in value
                if limit is not None and limit < getattr(baseline, name)
            ]
            if below:
                raise ValueError(f"must not be below the baseline: {', '.join(below)}")
        return value

    @field_validator("lend")
    @classmethod
    def _must_be_guaranteed(cls, value: object, info: ValidationInfo) -> object:
        service_class = info.data.get("service_class", ServiceClass.GUARANTEED)
        if value is not None and service_class is not ServiceClass.GUARANTEED:
            raise ValueError("is for class guaranteed only")
        return value

    @field_validator("reclaim")
    @classmethod
    def _must_have_no_baseline(cls, value: Reclaim | None, info: ValidationInfo) -> Reclaim | None:
        service_class = info.data.get("service_class", ServiceClass.SPOT)
        if value is not None and service_class.has_baseline:
            raise ValueError("is for classes spot and preemptible only")
        return value


class CapacityFields(_Fields):
    """What all replicas of a pool hold."""

    capacity: ResourcesFields
    replicas: Annotated[int, BeforeValidator(QuantityRange(1, 100_000))] = 1

    @field_validator("replicas")
    @classmethod
    def _must_stay_countable(cls, value: int, info: ValidationInfo) -> int:
        capacity = info.data.get("capacity")
        if capacity is not None and value * max(amount for _, amount in capacity) > MAX_QUANTITY:
            raise ValueError(f"must keep every capacity at or below {MAX_QUANTITY}")
        return value


class PoolFields(CapacityFields):
    """One pool."""

    name: Name
    models: Annotated[list[ModelName], Field(min_length=1)]
    model_shape: ModelShapeFields | None = None
    kv_bytes_per_token: int = Field(default=None, validate_default=True)
    tokenizer: Vocabulary = _POOL["tokenizer"]
    default_max_tokens: Count = _POOL["default_max_tokens"]
    image_tokens: CountOrZero = _POOL["image_tokens"]
    audio_tokens: CountOrZero = _POOL["audio_tokens"]
    flat_tokens: CountOrZero = _POOL["flat_tokens"]
    inject_usage: bool = _POOL["inject_usage"]
    output_estimate: Annotated[OutputEstimate, Field(strict=False)] = _POOL["output_estimate"]
    mode: Annotated[Mode, Field(strict=False)] = _POOL["mode"]
    window: Annotated[int, BeforeValidator(DurationRange(1_000, 3_600_000))] = _POOL["window_ms"]
    tick: Annotated[int, BeforeValidator(DurationRange(1_000, 30_000))] = _POOL["tick_ms"]
    headroom: Annotated[float, Field(ge=0, le=1)] = _POOL["headroom"]
    ramp_per_second: Annotated[float, Field(gt=0, le=1)] = _POOL["ramp_per_second"]
    max_waiting: Annotated[int, BeforeValidator(QuantityRange(0, 100_000))] = _POOL["max_waiting"]
    fairness: Annotated[Fairness, Field(strict=False)] = _POOL["fairness"]
    on_store_error: Annotated[
        Mapping[ServiceClass, OnStoreError], BeforeValidator(_on_store_error)
    ] = _ON_STORE_ERROR
    gains: GainsFields = GainsFields()
    entitlements: Annotated[list[object], Field(min_length=1)] = Field(repr=False)

    @field_validator("kv_bytes_per_token", mode="before")
    @classmethod
    def _stated_or_computed(cls, value: object, info: ValidationInfo) -> int:
        stated = None if value is None else _BYTES(value)
        if "model_shape" not in info.data:  # it has faults, so any size will do
            return stated or 1
        shape = info.data["model_shape"]
        if (stated is None) == (shape is None):
            raise ValueError("exactly one of kv_bytes_per_token and model_shape is required")
        size: int = stated or shape.kv_bytes_per_token
        if {"capacity", "replicas"} <= info.data.keys():
            held = info.data["capacity"].kv_cache * info.data["replicas"]
            if held < size:
                raise ValueError(f"{format_bytes(size)} is more than the pool's whole kv_cache")
        return size


class ServerFields(_Fields):
    """Limits of the server itself."""

    max_body: Annotated[int, BeforeValidator(QuantityRange(1_024, 1_024**3, in_bytes=True))] = (
        _SERVER.max_body_bytes
    )
    path_prefix: Annotated[str, AfterValidator(_path_prefix)] = _SERVER.path_prefix
    unknown_endpoints: Literal["pass", "reject"] = "reject"
    lease_ttl: Annotated[int, BeforeValidator(DurationRange(5_000, 3_600_000))] = (
        _SERVER.lease_ttl_ms
    )
    drain: Annotated[int, BeforeValidator(DurationRange(0, 3_600_000))] = _SERVER.drain_ms
    explain_last: Annotated[int, BeforeValidator(QuantityRange(0, 1_000_000))] = (
        _SERVER.explain_last
    )
    store_deadline: Annotated[int, BeforeValidator(DurationRange(1, 10_000))] = (
        _SERVER.store_deadline_ms
    )


class RootFields(_Fields):
    """The whole document."""

    state: str = Field(default="memory://", repr=False)
    default_pool: Name | None = None
    server: ServerFields = ServerFields()
    identity: IdentityFields = IdentityFields()
    pools: Annotated[list[object], Field(min_length=1)] = Field(repr=False)
