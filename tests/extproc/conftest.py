"""One pool that serves model `m`, and who is entitled to it."""

import pytest

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.gate.directory import Directory
from tests.support.gate import configured
from tests.support.pools import amount, entitlement, pool


@pytest.fixture
def directory() -> Directory:
    """Entitlement `a` with `key-a`."""
    return Directory(configured(pool(amount(), entitlement("a", ServiceClass.ELASTIC, amount(1)))))
