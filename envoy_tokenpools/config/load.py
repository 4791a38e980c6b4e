"""
Text -> `Config`, or every fault at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from envoy_tokenpools.config.address import parse_address
from envoy_tokenpools.config.document import read_document
from envoy_tokenpools.config.findings import Findings, field_path, item_path
from envoy_tokenpools.config.pools import ReadPool, check_unique, read_pool, texts_at
from envoy_tokenpools.config.settings import (
    EMBEDDED,
    ClaimSource,
    Config,
    EntitlementRef,
    ServerSettings,
)
from envoy_tokenpools.config.shape import IdentityFields, RootFields
from envoy_tokenpools.errors import ConfigError, Fault


def read_config(path: Path, env: Mapping[str, str]) -> Config:
    """
    The configuration in the file at `path`.

    Raises:
        ConfigError: the file cannot be read, or its content has faults (see `load_config`).
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([Fault(str(path), f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Fault(str(path), f"is not UTF-8 (byte {error.start})")]) from None
    return load_config(text, env=env)


def load_config(text: str, *, env: Mapping[str, str]) -> Config:
    """
    The configuration written as YAML in `text`; `env` answers the keys given as `{env: NAME}`.

    Raises:
        ConfigError: every fault with its path, such as
            `pools[0].entitlements[1].baseline.kv_cache`; a syntax error alone, with its line
            and column. No fault repeats a key or a password.
    """
    findings = Findings()
    raw = read_document(text, findings)
    if raw is None and not findings.faults:
        raise ConfigError([Fault("", "the configuration is empty")])
    _resolve_state(raw, findings, env)
    root = findings.shaped(RootFields, raw, "")
    listed = raw.get("pools") if isinstance(raw, dict) else None
    raw_pools = listed if isinstance(listed, list) else []
    pools = [
        read_pool(item, item_path("pools", index), findings, env)
        for index, item in enumerate(raw_pools)
    ]
    _check_names(raw_pools, findings)
    _check_state(raw, findings)
    _check_default_pool(raw, raw_pools, findings)
    _check_claims(raw, raw_pools, findings)
    if root is None or findings.faults:
        raise ConfigError(findings.faults)
    return _config(root, [pool for pool in pools if pool is not None], findings)


def _check_names(raw_pools: Sequence[object], findings: Findings) -> None:
    check_unique(texts_at(raw_pools, "pools", "name"), "the name", findings)
    models = [
        (item_path(field_path(item_path("pools", index), "models"), position), model)
        for index, pool in enumerate(raw_pools)
        if isinstance(pool, dict) and isinstance(pool.get("models"), list)
        for position, model in enumerate(pool["models"])
        if isinstance(model, str)
    ]
    check_unique(models, "the model", findings)


def _resolve_state(raw: object, findings: Findings, env: Mapping[str, str]) -> None:
    """`state: {env: NAME}` keeps the URL, which may hold a password, out of the document."""
    state = raw.get("state") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(state, dict):
        return
    name = state.get("env")
    if not isinstance(name, str) or len(state) != 1:
        findings.fault("state", "must be a URL or {env: NAME}")
        raw["state"] = EMBEDDED
    elif not env.get(name):
        findings.fault("state.env", f"the environment has no variable {name}")
        raw["state"] = EMBEDDED
    else:
        raw["state"] = env[name]


def _check_state(raw: object, findings: Findings) -> None:
    """Nothing of the URL is ever repeated: it may be a password."""
    url = raw.get("state") if isinstance(raw, dict) else None
    if not isinstance(url, str) or url == EMBEDDED:
        return
    if url.startswith(EMBEDDED):
        findings.fault("state", f"must be exactly {EMBEDDED}")
        return
    try:
        parse_address(url)
    except ValueError as error:
        findings.fault("state", str(error))


def _check_default_pool(raw: object, raw_pools: Sequence[object], findings: Findings) -> None:
    name = raw.get("default_pool") if isinstance(raw, dict) else None
    known = [known for _, known in texts_at(raw_pools, "pools", "name")]
    if isinstance(name, str) and name not in known:
        findings.fault("default_pool", "no pool has this name")


def _check_claims(raw: object, raw_pools: Sequence[object], findings: Findings) -> None:
    """A claim names nobody unless it is said where claims are found."""
    identity = raw.get("identity") if isinstance(raw, dict) else None
    if isinstance(identity, dict) and identity.get("claim") is not None:
        return
    for pool_path, pool in _dicts(raw_pools, "pools"):
        for path, entitlement in _dicts(
            pool.get("entitlements"), field_path(pool_path, "entitlements")
        ):
            for where, key in _dicts(entitlement.get("keys"), field_path(path, "keys")):
                if "claim" in key:
                    findings.fault(f"{where}.claim", "needs identity.claim, where claims are found")


def _dicts(raw: object, path: str) -> Iterator[tuple[str, dict[object, object]]]:
    """The path and value of each item of a list that is a mapping."""
    for index, item in enumerate(raw if isinstance(raw, list) else []):
        if isinstance(item, dict):
            yield item_path(path, index), item


def _config(root: RootFields, pools: Sequence[ReadPool], findings: Findings) -> Config:
    keys: dict[bytes, tuple[EntitlementRef, ...]] = {}
    for read in pools:
        for digest, entitlement in read.keys.items():
            ref = EntitlementRef(read.pool.name, entitlement)
            keys[digest] = (*keys.get(digest, ()), ref)
    server = root.server
    return Config(
        state=root.state,
        pools={read.pool.name: read.pool for read in pools},
        pool_of_model={model: read.pool.name for read in pools for model in read.pool.models},
        default_pool=root.default_pool,
        keys=keys,
        claim=_claim_source(root.identity),
        server=ServerSettings(
            max_body_bytes=server.max_body,
            path_prefix=server.path_prefix,
            rejects_unknown_endpoints=server.unknown_endpoints == "reject",
            lease_ttl_ms=server.lease_ttl,
            drain_ms=server.drain,
            explain_last=server.explain_last,
            store_deadline_ms=server.store_deadline,
        ),
        warnings=tuple(findings.warnings),
    )


def _claim_source(identity: IdentityFields) -> ClaimSource | None:
    if identity.claim is None:
        return None
    return ClaimSource(identity.claim_namespace, tuple(identity.claim.split(".")))
