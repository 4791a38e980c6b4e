"""Who asks, and for which pool."""

from dataclasses import replace

import pytest

from envoy_tokenpools.config import ClaimSource, EntitlementRef, Trusted, trusted_digest
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


def test_a_model_that_is_not_read_leads_to_the_only_pool() -> None:
    """The caller's own; whoever has several needs the default one among them."""
    directory = Directory(configured(SMALL, LARGE))
    assert directory.resolve_alone(directory.identify("key-b"))[0].name == "small"
    with pytest.raises(RequestError) as raised:
        directory.resolve_alone(directory.identify("key-a"))
    assert (raised.value.status, raised.value.code) == (404, "model_not_found")
    for name in ("small", "large"):
        directory = Directory(configured(SMALL, LARGE, default_pool=name))
        one, owner = directory.resolve_alone(directory.identify("key-a"))
        assert (one.name, owner.name) == (name, "a")
    elsewhere = Directory(configured(SMALL, LARGE, named("third", "t"), default_pool="third"))
    assert elsewhere.resolve_alone(elsewhere.identify("key-b"))[0].name == "small"


def test_the_first_identity_that_is_known_decides() -> None:
    """A claim, then the names of a certificate in their order, then the key, then nobody in particular."""
    config = configured(SMALL)
    refs = {
        trusted_digest(Trusted.CLAIM, "tenant"): "a",
        trusted_digest(Trusted.PRINCIPAL, "spiffe://b"): "b",
        trusted_digest(Trusted.ANONYMOUS, ""): "b",
    }
    keys = {digest: (EntitlementRef("small", name),) for digest, name in refs.items()}
    directory = Directory(replace(config, keys={**config.keys, **keys}))

    def who(
        credential: str | None = None, claim: str | None = None, principals: tuple[str, ...] = ()
    ) -> str:
        (right,) = directory.identify(credential, claim=claim, principals=principals)
        return right.entitlement

    assert who("key-b", "tenant", ("spiffe://b",)) == "a"
    assert who("key-a", "unknown", ("spiffe://x", "spiffe://b")) == "b"
    assert who("key-a", "unknown", ("spiffe://x",)) == "a"
    assert who(claim="", principals=("",)) == "b"
    with pytest.raises(RequestError):
        who("unknown", "unknown", ("unknown",))


def test_where_claims_are_found_is_the_configurations() -> None:
    """Or nowhere."""
    source = ClaimSource("namespace", ("tenant",))
    assert Directory(replace(configured(SMALL), claim=source)).claim is source
    assert Directory(configured(SMALL)).claim is None
