"""
Trusted identities in the configuration: claims, principals and anonymous traffic.
"""

import pytest

from envoy_tokenpools.config import (
    ClaimSource,
    EntitlementRef,
    Trusted,
    load_config,
    trusted_digest,
)
from envoy_tokenpools.errors import ConfigError

DOCUMENT = """
{identity}
pools:
  - name: pool
    models: [m]
    capacity: {{tokens_per_second: 10, kv_cache: 1GiB, concurrency: 1}}
    kv_bytes_per_token: 1KiB
    entitlements:
      - {{name: tenant, class: spot, keys: [{key}]}}
"""


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("{claim: team-a}", Trusted.CLAIM, "team-a"),
        (
            '{principal: "spiffe://cluster/ns/a/sa/b"}',
            Trusted.PRINCIPAL,
            "spiffe://cluster/ns/a/sa/b",
        ),
        ("{anonymous: true}", Trusted.ANONYMOUS, ""),
    ],
)
def test_a_trusted_identity_names_its_entitlement(key: str, kind: Trusted, value: str) -> None:
    """Each form is found by its digest, which no key can have."""
    identity = "identity: {claim: jwt_payload.tenant}"
    config = load_config(DOCUMENT.format(identity=identity, key=key), env={})
    assert config.keys == {trusted_digest(kind, value): (EntitlementRef("pool", "tenant"),)}
    assert config.claim == ClaimSource("envoy.filters.http.jwt_authn", ("jwt_payload", "tenant"))


@pytest.mark.parametrize(
    ("identity", "key", "fault"),
    [
        ("", "{claim: team-a}", "pools[0].entitlements[0].keys[0].claim: needs identity.claim"),
        ("", "{anonymous: false}", "pools[0].entitlements[0].keys[0].anonymous"),
        (
            "",
            '{principal: ""}',
            "pools[0].entitlements[0].keys[0].principal: the principal is empty",
        ),
        (
            "identity: {claim: a..b}",
            "{plain: k}",
            "identity.claim: must be names separated by dots",
        ),
        ("identity: {clam: a}", "{plain: k}", "identity.clam"),
    ],
)
def test_faults_of_identities(identity: str, key: str, fault: str) -> None:
    """Each mistake is told with its path."""
    with pytest.raises(ConfigError) as caught:
        load_config(DOCUMENT.format(identity=identity, key=key), env={})
    assert any(str(found).startswith(fault) for found in caught.value.faults), caught.value
