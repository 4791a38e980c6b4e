"""Who is believed to call: claims and certificates that Envoy vouches for, keys, and nobody in particular."""

from dataclasses import replace

import pytest
from envoy_data_plane.google.protobuf import ListValue, Struct, Value

from envoy_tokenpools.config import ClaimSource, Config, EntitlementRef, Trusted, trusted_digest
from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.extproc.wire import metadata_text, parse_request
from envoy_tokenpools.gate.directory import Directory
from tests.support.extproc import (
    HI,
    Conversation,
    Message,
    head_attributes,
    immediate_of,
    kind_of,
    post_rh,
    rb,
    verified,
)
from tests.support.gate import configured
from tests.support.pools import amount, entitlement, pool

JWT = "envoy.filters.http.jwt_authn"
CERTIFICATE = "x-forwarded-client-cert"


def trusting(*, anonymous: bool = False) -> Directory:
    """`low` by claim or certificate or key, `vip` by claim or key, `any` for whoever sends no key."""
    names = ("low", "vip", "any")
    config: Config = configured(
        pool(amount(), *(entitlement(name, ServiceClass.SPOT) for name in names))
    )
    trusted = {
        trusted_digest(Trusted.CLAIM, "t-low"): "low",
        trusted_digest(Trusted.CLAIM, "17"): "low",
        trusted_digest(Trusted.CLAIM, "t-vip"): "vip",
        trusted_digest(Trusted.PRINCIPAL, "spiffe://low"): "low",
    }
    if anonymous:
        trusted[trusted_digest(Trusted.ANONYMOUS, "")] = "any"
    keys = {digest: (EntitlementRef("pool", name),) for digest, name in trusted.items()}
    claim = ClaimSource(JWT, ("payload", "tenant"))
    return Directory(replace(config, keys={**config.keys, **keys}, claim=claim))


def claiming(message: Message, tenant: Value) -> Message:
    """The message with a verified token."""
    payload = Value(struct_value=Struct(fields={"iss": Value(string_value="x"), "tenant": tenant}))
    return verified(message, JWT, payload=payload)


def owner(directory: Directory, head: Message) -> str | int:
    """Whose request it is, or the status that refuses it."""
    talk = Conversation.begin(directory)
    (reply,) = talk.say(head)
    if kind_of(reply) == "immediate_response":
        return immediate_of(reply)[0]
    talk.say(rb(HI))
    return talk.orders[0].entitlement.name


LOW = Value(string_value="t-low")


def test_a_claim_names_the_caller() -> None:
    """Of a token that an earlier filter verified; without any key."""
    assert owner(trusting(), claiming(post_rh(key=None), LOW)) == "low"


def test_a_claim_may_be_a_number() -> None:
    """Counted by its digits; no other kind is a name."""
    assert owner(trusting(), claiming(post_rh(key=None), Value(number_value=17.0))) == "low"
    for odd in (
        Value(number_value=17.5),
        Value(number_value=float("inf")),
        Value(number_value=float("nan")),
        Value(bool_value=True),
        Value(list_value=ListValue(values=[LOW])),
        Value(struct_value=Struct(fields={"tenant": LOW})),
        Value(string_value=""),
        Value(),
    ):
        assert owner(trusting(), claiming(post_rh(key=None), odd)) == 401


@pytest.mark.parametrize(
    ("namespace", "claims"),
    [
        ("other.filter", {"payload": Value(struct_value=Struct(fields={"tenant": LOW}))}),
        (JWT, {"tenant": LOW}),
        (JWT, {"payload": LOW}),
        (JWT, {}),
    ],
)
def test_a_claim_is_looked_for_in_one_place(namespace: str, claims: dict[str, Value]) -> None:
    """Somewhere else it is somebody else's."""
    assert owner(trusting(), verified(post_rh(key=None), namespace, **claims)) == 401


def test_headers_cannot_claim() -> None:
    """Whatever a client calls itself, its verified claim decides; alone, nothing is believed."""
    forged = [
        ("x-tenant-id", "vip"),
        ("x-tenant-id", "t-vip"),
        ("x-priority-class", "critical"),
        ("x-tokenpools-entitlement", "vip"),
    ]
    assert (
        owner(trusting(), claiming(post_rh("/v1/chat/completions", *forged, key=None), LOW))
        == "low"
    )
    assert owner(trusting(), post_rh("/v1/chat/completions", *forged, key=None)) == 401


def test_a_verified_claim_is_stronger_than_a_key() -> None:
    """A stolen key does not change who was verified; a claim that is nobody's leaves it to the key."""
    assert owner(trusting(), claiming(post_rh(key="key-vip"), LOW)) == "low"
    unknown = Value(string_value="t-unknown")
    assert owner(trusting(), claiming(post_rh(key="key-vip"), unknown)) == "vip"
    assert owner(trusting(), claiming(post_rh(key="unknown"), unknown)) == 401


def test_no_key_stands_for_a_claim() -> None:
    """However it is spelled: the digests of both never meet."""
    for key in ("t-vip", "claim t-vip", "\\0claim\\0t-vip", "spiffe://low"):
        assert owner(trusting(), post_rh(key=key)) == 401


def test_a_certificate_names_the_caller() -> None:
    """The one that Envoy verified; of several, none."""
    path = "/v1/chat/completions"
    one = post_rh(path, (CERTIFICATE, "Hash=ab;URI=spiffe://low"), key=None)
    assert owner(trusting(), one) == "low"
    other = post_rh(path, (CERTIFICATE, "URI=spiffe://other"), key=None)
    assert owner(trusting(), other) == 401
    forged = post_rh(path, (CERTIFICATE, "URI=spiffe://low,URI=spiffe://other"), key=None)
    assert owner(trusting(), forged) == 401
    twice = post_rh(path, *[(CERTIFICATE, "URI=spiffe://low")] * 2, key=None)
    assert owner(trusting(), twice) == 400


def test_nobody_in_particular_is_who_sends_no_key() -> None:
    """Where that is configured; a wrong key is still wrong."""
    assert owner(trusting(anonymous=True), post_rh(key=None)) == "any"
    assert owner(trusting(anonymous=True), post_rh(key="wrong")) == 401
    assert owner(trusting(anonymous=True), post_rh(key="key-low")) == "low"
    assert owner(trusting(anonymous=True), claiming(post_rh(key=None), LOW)) == "low"
    assert owner(trusting(), post_rh(key=None)) == 401


@pytest.mark.parametrize("value", ["Basic a2V5LWxvdw==", "Token key-low", "Bearer", "Bearer "])
def test_an_authorization_of_another_form_is_not_nobody_in_particular(value: str) -> None:
    """A key that was meant but is none is wrong, also where anonymous ones are served; another header may have it."""
    path, authorization = "/v1/chat/completions", ("authorization", value)
    for directory in (trusting(), trusting(anonymous=True)):
        assert owner(directory, post_rh(path, authorization, key=None)) == 401
        for name in ("api-key", "x-api-key"):
            keyed = post_rh(path, authorization, (name, "key-low"), key=None)
            assert owner(directory, keyed) == "low"


def test_a_claim_names_the_caller_in_the_compact_configuration() -> None:
    """The metadata comes with the first message, whichever it is."""
    talk = Conversation.begin(trusting())
    talk.say(claiming(rb(HI, given=head_attributes(key=None)), LOW))
    assert talk.orders[0].entitlement.name == "low"


def test_metadata_without_a_configured_claim_is_not_read() -> None:
    """It may be anything."""
    config = configured(pool(amount(), entitlement("low", ServiceClass.SPOT)))
    assert owner(Directory(config), claiming(post_rh(key=None), LOW)) == 401
    assert owner(Directory(config), claiming(post_rh(key="key-low"), LOW)) == "low"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("payload", "tenant"), "t-low"),
        (("payload", "iss"), "x"),
        (("payload", "none"), None),
        (("none", "tenant"), None),
        (("payload",), None),
        (("payload", "tenant", "deeper"), None),
        ((), None),
    ],
)
def test_a_text_is_found_by_its_path(path: tuple[str, ...], text: str | None) -> None:
    """Or it is not there."""
    message = parse_request(bytes(claiming(post_rh(), LOW)))
    assert metadata_text(message.metadata_context, JWT, path) == text
    assert metadata_text(message.metadata_context, "none", path) is None
