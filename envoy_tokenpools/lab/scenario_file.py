"""
YAML -> the scenarios of one experiment, or every fault at once.

The pool is written as in a configuration file, less what an experiment need not say: an entitlement
without keys is given one, and `copies: 40` makes forty of it, `NAME-1` to `NAME-40`. Each of `runs`
is the same scenario with some fields replaced; without `runs` there is one.
"""

import copy
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from envoy_tokenpools.config import Config, load_config
from envoy_tokenpools.config.document import read_document
from envoy_tokenpools.config.findings import Findings, field_path, item_path
from envoy_tokenpools.config.quantity import DurationRange, QuantityRange
from envoy_tokenpools.errors import ConfigError, Fault
from envoy_tokenpools.lab.engine import EngineShape
from envoy_tokenpools.lab.lengths import Fixed, Lengths, LogNormal, Uniform
from envoy_tokenpools.lab.scenario import Change, Load, Role, Scenario

_LONGEST_MS: Final = 366 * 24 * 3_600_000
_OPEN_LOOP_RETRIES: Final = 2
"""As often as the OpenAI SDKs; a closed-loop client asks until it is served."""

_Duration = Annotated[int, BeforeValidator(DurationRange(0, _LONGEST_MS))]
_Count = Annotated[int, BeforeValidator(QuantityRange(1))]
_CountOrZero = Annotated[int, BeforeValidator(QuantityRange(0))]
_Positive = Annotated[float, Field(gt=0, le=1e6)]
_Factor = Annotated[float, Field(ge=0, le=1e6)]


class _Fields(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False
    )


class _LogNormalFields(_Fields):
    median: _Count
    sigma: Annotated[float, Field(gt=0, le=5)]
    most: _Count


class _LengthsFields(_Fields):
    """One of the two; a plain number stands for itself."""

    uniform: Annotated[list[_Count], Field(min_length=2, max_length=2)] | None = None
    lognormal: _LogNormalFields | None = None

    def lengths(self) -> Lengths:
        if self.lognormal is not None:
            return LogNormal(self.lognormal.median, self.lognormal.sigma, self.lognormal.most)
        low, high = self.uniform or (1, 1)
        return Uniform(low, high)


def _lengths(value: object) -> Lengths:
    if isinstance(value, dict) and len(value) == 1:
        shape = _LengthsFields.model_validate(value)
        if shape.uniform is not None and shape.uniform[0] > shape.uniform[1]:
            raise ValueError("must have the shorter length first")
        if shape.uniform is not None or shape.lognormal is not None:
            return shape.lengths()
    if not isinstance(value, dict):
        return Fixed(QuantityRange(1)(value))
    raise ValueError("must be a number, {uniform: [LOW, HIGH]} or {lognormal: {…}}")


_Lengths = Annotated[Fixed | Uniform | LogNormal, BeforeValidator(_lengths)]


class _EngineFields(_Fields):
    slots: _Count
    tokens_per_second: _Count
    prefill_tokens_per_second: _Count
    max_waiting: _CountOrZero | None = None
    kv_tokens: _Count = 262_144


class _LoadFields(_Fields):
    entitlement: str
    clients: _Count | None = None
    rate: _Positive | None = Field(default=None, validate_default=True)
    curve: list[_Factor] = []
    prompt: _Lengths
    output: _Lengths
    max_tokens: _Count | None = None
    think: _Duration = 0
    start: _Duration = 0
    stop: _Duration | None = None
    retries: _CountOrZero | None = None

    @field_validator("rate")
    @classmethod
    def _must_be_one_loop(cls, value: float | None, info: ValidationInfo) -> float | None:
        if "clients" in info.data and (info.data["clients"] is None) == (value is None):
            raise ValueError("exactly one of clients and rate is required")
        return value


class _ChangeFields(_Fields):
    at: _Duration
    slots: _CountOrZero


class _RunFields(_Fields):
    name: Annotated[str, Field(min_length=1, max_length=63)]
    about: str = ""
    role: Annotated[Role, Field(strict=False)] = Role.SHOWN
    pool: dict[str, object] = {}
    entitlements: dict[str, dict[str, object]] = {}
    clients: dict[str, _CountOrZero] = {}


class _ScenarioFields(_Fields):
    name: Annotated[str, Field(min_length=1, max_length=63)]
    about: str = ""
    checks: str = ""
    seed: _CountOrZero = 1
    duration: Annotated[int, BeforeValidator(DurationRange(1, _LONGEST_MS))]
    engine: _EngineFields
    pool: dict[str, object]
    loads: Annotated[list[_LoadFields], Field(min_length=1)]
    changes: list[_ChangeFields] = []
    runs: Annotated[list[_RunFields], Field(min_length=1)] = [_RunFields(name="run")]


def shipped_scenarios(name: str) -> tuple[Scenario, ...]:
    """The runs of one of the experiments that come with the package, such as `protection`."""
    text = files("envoy_tokenpools.lab").joinpath("scenarios", f"{name}.yaml").read_text("utf-8")
    return load_scenarios(text)


def read_scenarios(path: Path) -> tuple[Scenario, ...]:
    """
    The runs in the file at `path`.

    Raises:
        ConfigError: the file cannot be read, or has faults (see `load_scenarios`).
    """
    try:
        return load_scenarios(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError([Fault(str(path), f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Fault(str(path), f"is not UTF-8 (byte {error.start})")]) from None


def load_scenarios(text: str) -> tuple[Scenario, ...]:
    """
    The runs of an experiment written as YAML.

    Raises:
        ConfigError: every fault with its path, such as `loads[1].prompt`; those of the pool as in
            a configuration file, after the name of the run that has them.
    """
    findings = Findings()
    raw = read_document(text, findings)
    fields = findings.shaped(_ScenarioFields, raw, "")
    if fields is None or findings.faults:
        raise ConfigError(findings.faults)
    _check(fields, findings)
    if findings.faults:
        raise ConfigError(findings.faults)
    configs = [_config(fields, run, item_path("runs", i)) for i, run in enumerate(fields.runs)]
    return tuple(
        _scenario(fields, run, config) for run, config in zip(fields.runs, configs, strict=True)
    )


def _check(fields: _ScenarioFields, findings: Findings) -> None:
    """What several fields must agree on."""
    copies = _copies(fields.pool)
    for index, load in enumerate(fields.loads):
        path = item_path("loads", index)
        if load.entitlement not in copies:
            findings.fault(field_path(path, "entitlement"), "is no entitlement of the pool")
        stop = fields.duration if load.stop is None else load.stop
        if not load.start < stop <= fields.duration:
            findings.fault(field_path(path, "stop"), "must be after start and within the duration")
    times = [change.at for change in fields.changes]
    if times != sorted(times):
        findings.fault("changes", "must be in order of time")
    names = [run.name for run in fields.runs]
    if len(set(names)) < len(names):
        findings.fault("runs", "must have different names")
    sent_by = {load.entitlement for load in fields.loads if load.clients is not None}
    for index, run in enumerate(fields.runs):
        path = item_path("runs", index)
        for name in run.entitlements.keys() - copies.keys():
            findings.fault(
                field_path(field_path(path, "entitlements"), name), "is no entitlement of the pool"
            )
        for name in run.clients.keys() - sent_by:
            findings.fault(field_path(field_path(path, "clients"), name), "has no closed loop")


def _raw_entitlements(pool: Mapping[str, object]) -> list[dict[str, object]]:
    listed = pool.get("entitlements")
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


def _copies(pool: Mapping[str, object]) -> dict[str, list[str]]:
    """The names that each entitlement of the document stands for."""
    names: dict[str, list[str]] = {}
    for raw in _raw_entitlements(pool):
        name, copies = raw.get("name"), raw.get("copies")
        if isinstance(name, str):
            several = isinstance(copies, int) and copies > 0
            names[name] = (
                [f"{name}-{number}" for number in range(1, int(str(copies)) + 1)]
                if several
                else [name]
            )
    return names


def _config(fields: _ScenarioFields, run: _RunFields, path: str) -> Config:
    pool = copy.deepcopy(fields.pool) | run.pool
    if "entitlements" not in run.pool:
        pool["entitlements"] = [
            one for raw in _raw_entitlements(pool) for one in _expanded(raw, run.entitlements)
        ]
    # at its end nothing is in flight: there is nothing to drain for
    document = {"server": {"drain": "1s"}, "pools": [pool]}
    try:
        return load_config(yaml.safe_dump(document, allow_unicode=True), env={})
    except ConfigError as error:
        where = "" if len(fields.runs) == 1 else f"{path} "
        raise ConfigError(
            [
                Fault(where + fault.path.replace("pools[0]", "pool", 1), fault.message)
                for fault in error.faults
            ]
        ) from None


def _expanded(
    raw: Mapping[str, object], replaced: Mapping[str, Mapping[str, object]]
) -> list[dict[str, object]]:
    """One entitlement as the configuration has it: each copy of it, with a key."""
    name = raw.get("name")
    fields = {field: value for field, value in raw.items() if field != "copies"}
    if not isinstance(name, str):
        return [fields]
    fields |= replaced.get(name, {})
    names = _copies({"entitlements": [raw]})[name]
    if len(names) == 1 and "keys" in fields:
        return [fields]
    return [copy.deepcopy(fields) | {"name": one, "keys": [{"plain": _key(one)}]} for one in names]


def _key(entitlement: str) -> str:
    return f"key-{entitlement}"


def _scenario(fields: _ScenarioFields, run: _RunFields, config: Config) -> Scenario:
    engine = fields.engine
    copies = _copies(fields.pool)
    return Scenario(
        name=fields.name,
        run=run.name,
        about=run.about or fields.about,
        role=run.role,
        checks=fields.checks,
        config=config,
        engine=EngineShape(
            engine.slots,
            engine.tokens_per_second,
            engine.prefill_tokens_per_second,
            engine.max_waiting,
            engine.kv_tokens,
        ),
        loads=tuple(
            _load(load, name, run, fields.duration)
            for load in fields.loads
            for name in copies[load.entitlement]
        ),
        changes=tuple(Change(change.at, change.slots) for change in fields.changes),
        duration_ms=fields.duration,
        seed=fields.seed,
    )


def _load(fields: _LoadFields, entitlement: str, run: _RunFields, duration_ms: int) -> Load:
    is_open = fields.clients is None
    retries = _OPEN_LOOP_RETRIES if is_open and fields.retries is None else fields.retries
    clients = 0 if is_open else run.clients.get(fields.entitlement, fields.clients or 0)
    return Load(
        entitlement=entitlement,
        key=_key(entitlement),
        prompt=fields.prompt,
        output=fields.output,
        max_tokens=fields.max_tokens,
        clients=clients,
        rate=fields.rate or 0.0,
        curve=tuple(fields.curve),
        think_ms=fields.think,
        start_ms=fields.start,
        stop_ms=duration_ms if fields.stop is None else fields.stop,
        retries=retries,
    )


def runs_named(scenarios: Sequence[Scenario], wanted: Sequence[str]) -> tuple[Scenario, ...]:
    """
    Those of an experiment's runs that are wanted; all if none is named.

    Raises:
        ConfigError: there is none of that name.
    """
    known = {scenario.run: scenario for scenario in scenarios}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ConfigError(
            [Fault("runs", f"has none named {name!r}, only {', '.join(known)}") for name in unknown]
        )
    return tuple(known[name] for name in wanted) if wanted else tuple(scenarios)
