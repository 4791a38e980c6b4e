"""
The configuration: YAML and environment -> a frozen `Config` of core objects, or all its faults.

Purpose of the files: `document` parses YAML, `shape` says what fields exist, `quantity` reads
amounts, `credentials` and `pools` check what spans several fields, `load` puts them together.
"""

from envoy_tokenpools.config.describe import describe
from envoy_tokenpools.config.load import load_config, read_config
from envoy_tokenpools.config.settings import (
    ClaimSource,
    Config,
    EntitlementRef,
    ServerSettings,
    Trusted,
    credential_digest,
    trusted_digest,
)

__all__ = [
    "ClaimSource",
    "Config",
    "EntitlementRef",
    "ServerSettings",
    "Trusted",
    "credential_digest",
    "describe",
    "load_config",
    "read_config",
    "trusted_digest",
]
