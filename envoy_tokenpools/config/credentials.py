"""
The keys of an entitlement -> their digests. No message repeats a key, nor a name given for one.

Trusted identities (a claim, a principal, nobody) have digests too, kept apart from those of keys.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from envoy_tokenpools.config.findings import Findings, item_path
from envoy_tokenpools.config.settings import Trusted, credential_digest, trusted_digest
from envoy_tokenpools.config.shape import KeyFields

_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FORMS: Final = (
    "must be exactly one of {sha256: ...}, {env: ...}, {plain: ...}, {claim: ...}, "
    "{principal: ...} and {anonymous: true}"
)


def read_keys(
    raw: Sequence[object], path: str, findings: Findings, env: Mapping[str, str]
) -> Iterator[tuple[str, bytes]]:
    """The path and digest of every key that can be used; the others are noted as faults."""
    for index, item in enumerate(raw):
        where = item_path(path, index)
        digest = _digest(item, where, findings, env)
        if digest is not None:
            yield where, digest


def _digest(raw: object, path: str, findings: Findings, env: Mapping[str, str]) -> bytes | None:
    # A key written as a field's name must not reach the path of a fault: look before shaping.
    known = KeyFields.model_fields.keys()
    if not isinstance(raw, dict) or len(raw) != 1 or not raw.keys() <= known:
        findings.fault(path, _FORMS)
        return None
    fields = findings.shaped(KeyFields, raw, path)
    if fields is None:
        return None
    if fields.env is not None:
        return _digest_of_variable(fields.env, f"{path}.env", findings, env)
    if fields.sha256 is not None or fields.plain is not None:
        return _stated_digest(fields, path, findings)
    return _trusted(fields, path, findings)


def _stated_digest(fields: KeyFields, path: str, findings: Findings) -> bytes | None:
    if fields.sha256 is not None:
        if _SHA256.fullmatch(fields.sha256):
            return bytes.fromhex(fields.sha256)
        findings.fault(f"{path}.sha256", "must be 64 hexadecimal digits, the key's SHA-256")
    elif fields.plain is not None and _is_usable(
        fields.plain, f"{path}.plain", "the key", findings
    ):
        findings.warn(f"{path}.plain", "a key in plain text; use sha256 or env beyond trials")
        return credential_digest(fields.plain)
    return None


def _trusted(fields: KeyFields, path: str, findings: Findings) -> bytes | None:
    if fields.anonymous:
        return trusted_digest(Trusted.ANONYMOUS, "")
    for kind, value in ((Trusted.CLAIM, fields.claim), (Trusted.PRINCIPAL, fields.principal)):
        if value is not None:
            where = f"{path}.{kind.value}"
            is_usable = _is_usable(value, where, f"the {kind.value}", findings)
            return trusted_digest(kind, value) if is_usable else None
    findings.fault(path, _FORMS)
    return None


def _digest_of_variable(
    name: str, path: str, findings: Findings, env: Mapping[str, str]
) -> bytes | None:
    if not _VARIABLE.fullmatch(name):
        findings.fault(path, "must be the name of an environment variable")
    elif name not in env:
        findings.fault(path, "the environment variable it names is not set")
    elif _is_usable(env[name], path, "the environment variable it names", findings):
        return credential_digest(env[name])
    return None


def _is_usable(value: str, path: str, what: str, findings: Findings) -> bool:
    if not value:
        findings.fault(path, f"{what} is empty")
    elif value != value.strip():
        # most often the line break at the end of a mounted secret; no client can send it
        findings.fault(path, f"{what} begins or ends with blanks or a line break")
    else:
        return True
    return False
