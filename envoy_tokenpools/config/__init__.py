"""
The configuration: YAML and environment -> a frozen `Config` of core objects, or all its faults.

Purpose of the files: `document` parses YAML, `shape` says what fields exist, `quantity` reads
amounts, `address` reads a server's URL, `credentials` and `pools` check what spans several
fields, `load` puts them together.
"""

from envoy_tokenpools.config.address import Address, Topology, parse_address
from envoy_tokenpools.config.describe import describe
from envoy_tokenpools.config.load import load_config, read_config
from envoy_tokenpools.config.settings import (
    EMBEDDED,
    ClaimSource,
    Config,
    EntitlementRef,
    ServerSettings,
    Trusted,
    credential_digest,
    trusted_digest,
)

__all__ = [
    "EMBEDDED",
    "Address",
    "ClaimSource",
    "Config",
    "EntitlementRef",
    "ServerSettings",
    "Topology",
    "Trusted",
    "credential_digest",
    "describe",
    "load_config",
    "parse_address",
    "read_config",
    "trusted_digest",
]
