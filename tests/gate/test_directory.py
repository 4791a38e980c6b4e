"""Who asks, and for which pool."""

from dataclasses import replace

import pytest

from envoy_tokenpools.config import EntitlementRef
from envoy_tokenpools.core.pool import Pool, ServiceClass
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.gate.directory import Directory
from tests.support.gate import configured
from tests.support.pools import amount, entitlement, pool


def named(name: str, *models: str, entitled: tuple[str, ...] = ("a",)) -> Pool:
    """A pool for these models."""
    who = [entitlement(one, ServiceClass.SPOT) for one in entitled]
    return replace(pool(amount(), *who), name=name, models=models)


SMALL = named("small", "small", "s", entitled=("a", "b"))
LARGE = named("large", "large", entitled=("a",))


@pytest.fixture
def directory() -> Directory:
    """Two pools; `a` may use both, `b` only the small one."""
    return Directory(configured(SMALL, LARGE))


def test_a_key_brings_its_rights(directory: Directory) -> None:
    """One entitlement in each pool that has one of it."""
    both = (EntitlementRef("small", "a"), EntitlementRef("large", "a"))
    assert directory.identify("key-a") == both
    assert directory.identify("key-b") == (EntitlementRef("small", "b"),)


@pytest.mark.parametrize("credential", [None, "", "key-c", "KEY-A", "key-a ", "a", "key-a\udcff"])
def test_anybody_else_is_unknown(directory: Directory, credential: str | None) -> None:
    """401, which does not repeat what was sent."""
    with pytest.raises(RequestError) as raised:
        directory.identify(credential)
    assert (raised.value.status, raised.value.code) == (401, "invalid_api_key")
    assert credential is None or "key-" not in str(raised.value)


@pytest.mark.parametrize(
    ("model", "key", "found"),
    [
        ("small", "key-a", ("small", "a")),
        ("s", "key-a", ("small", "a")),
        ("large", "key-a", ("large", "a")),
        ("s", "key-b", ("small", "b")),
    ],
)
def test_a_model_leads_to_its_pool(
    directory: Directory, model: str, key: str, found: tuple[str, str]
) -> None:
    """By any of its names, to the caller's own entitlement there."""
    one, owner = directory.resolve(directory.identify(key), model)
    assert (one.name, owner.name) == found
    assert one.entitlements[owner.name] is owner


@pytest.mark.parametrize("model", ["large", "junk", "SMALL", "", "x" * 10_000, "a\nb"])
def test_a_model_that_is_not_the_callers_does_not_exist(directory: Directory, model: str) -> None:
    """One answer for a pool that is not there and one that is somebody else's: names cannot be probed."""
    with pytest.raises(RequestError) as raised:
        directory.resolve(directory.identify("key-b"), model)
    error = raised.value
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert len(str(error)) < 200


def test_both_answers_are_the_same_but_for_the_name(directory: Directory) -> None:
    """Word by word."""
    texts = []
    for model in ("large", "never"):
        with pytest.raises(RequestError) as raised:
            directory.resolve(directory.identify("key-b"), model)
        texts.append(str(raised.value).replace(model, "NAME"))
    assert texts[0] == texts[1]


def test_a_request_must_name_a_model(directory: Directory) -> None:
    """Where there is no default pool."""
    with pytest.raises(RequestError) as raised:
        directory.resolve(directory.identify("key-a"), None)
    assert (raised.value.status, raised.value.param) == (400, "model")


@pytest.mark.parametrize("model", [None, "junk", ""])
def test_the_default_pool_serves_what_no_pool_names(model: str | None) -> None:
    """Its name is not asked for; what a pool names goes there all the same."""
    directory = Directory(configured(SMALL, LARGE, default_pool="small"))
    rights = directory.identify("key-a")
    assert directory.resolve(rights, model)[0].name == "small"
    assert directory.resolve(rights, "large")[0].name == "large"


@pytest.mark.parametrize("model", [None, "junk"])
def test_the_default_pool_is_for_those_entitled_to_it(model: str | None) -> None:
    """A default gives nobody a right."""
    directory = Directory(configured(SMALL, LARGE, default_pool="large"))
    with pytest.raises(RequestError) as raised:
        directory.resolve(directory.identify("key-b"), model)
    assert raised.value.status == 404
