"""Heads: what a request says before its body, from headers and from attributes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envoy_tokenpools.clock import SystemClock
from envoy_tokenpools.config import credential_digest
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.extproc.incoming import (
    IDENTITY,
    MAX_REQUEST_ID_CHARS,
    WANTED,
    Head,
    head_from_attributes,
    head_from_headers,
)
from envoy_tokenpools.extproc.wire import Attributes, HttpHeaders, parse_request
from envoy_tokenpools.openai.endpoint import Endpoint
from tests.support.extproc import CHAT, Message, attributes, head_attributes, rh

POST = ((":method", "POST"), (":path", CHAT))


def head(*pairs: tuple[str, str | bytes]) -> Head:
    """The head of a chat request with these headers besides."""
    return head_of(*POST, *pairs)


def head_of(*pairs: tuple[str, str | bytes]) -> Head:
    """The head of a request with exactly these headers."""
    message = parse_request(bytes(rh(pairs))).request_headers
    assert message is not None
    return head_from_headers(message)


def texts(**values: str) -> Attributes:
    """Attributes with the compact configuration's names; `values` are headers."""
    given = head_attributes(key=None, **values)
    return Attributes({name: str(value).encode() for name, value in given.items()})


# Which endpoint


@pytest.mark.parametrize(
    ("method", "path", "endpoint"),
    [
        ("POST", "/v1/chat/completions", Endpoint.CHAT),
        ("POST", "/v1/chat/completions?api-version=1", Endpoint.CHAT),
        ("POST", "/v1//chat/completions/", Endpoint.CHAT),
        ("POST", "/v1/%63ompletions", Endpoint.COMPLETIONS),
        ("POST", "/v1/embeddings", Endpoint.EMBEDDINGS),
        ("POST", "/v1/responses", Endpoint.RESPONSES),
        ("POST", "/v1/audio/transcriptions", Endpoint.TRANSCRIPTIONS),
        ("POST", "/v1/messages", Endpoint.MESSAGES),
        ("POST", "/v1/files", None),
        ("POST", "", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/chat/completions", None),
        ("HEAD", "/", None),
        ("OPTIONS", "/v1/chat/completions", None),
        ("post", "/v1/chat/completions", None),
        ("DELETE", "/v1/chat/completions", None),
        ("PUT", "/v1/chat/completions", Endpoint.CHAT),
        ("PATCH", "/v1/responses", Endpoint.RESPONSES),
        ("PUT", "/v1/files", None),
    ],
)
def test_only_work_for_a_known_path_is_metered(
    method: str, path: str, endpoint: Endpoint | None
) -> None:
    """Some backends take PUT where OpenAI takes POST; everything else is not ours to judge."""
    assert head_of((":method", method), (":path", path)).endpoint is endpoint


@pytest.mark.parametrize(
    ("method", "sends_work"),
    [("POST", True), ("PUT", True), ("PATCH", True), ("GET", False), ("DELETE", False)],
)
def test_a_method_tells_whether_there_is_work_to_do(method: str, *, sends_work: bool) -> None:
    """Also on a path that nobody knows."""
    assert head_of((":method", method), (":path", "/v1/files")).sends_work is sends_work


def test_a_message_without_headers_is_metered_by_nobody() -> None:
    """Envoy's `forward_rules` kept even the path from us."""
    assert head_from_headers(HttpHeaders()) == Head(
        endpoint=None,
        sends_work=False,
        credential=None,
        principals=(),
        content_length=None,
        content_encoding="",
        is_retry=False,
    )


# Who asks


@pytest.mark.parametrize(
    ("headers", "credential"),
    [
        ([], None),
        ([("authorization", "Bearer sk-1")], "sk-1"),
        ([("authorization", "bearer sk-1")], "sk-1"),
        ([("authorization", "  BEARER   sk-1  ")], "sk-1"),
        ([("authorization", "Bearer a b")], "a b"),
        ([("authorization", "")], None),
        ([("api-key", "sk-2")], "sk-2"),
        ([("api-key", " sk-2 ")], "sk-2"),
        ([("x-api-key", "sk-3")], "sk-3"),
        ([("x-api-key", "sk-3"), ("api-key", "sk-2"), ("authorization", "Bearer sk-1")], "sk-1"),
        ([("x-api-key", "sk-3"), ("api-key", "sk-2")], "sk-2"),
        ([("authorization", "Basic c2stMQ=="), ("x-api-key", "sk-3")], "sk-3"),
        ([("authorization", "Bearer "), ("api-key", " "), ("x-api-key", "sk-3")], "sk-3"),
        ([("authorization", "Token sk-1"), ("api-key", "sk-2")], "sk-2"),
        ([("authorization", "  ")], None),
        ([("x-tenant-id", "vip"), ("x-forwarded-for", "10.0.0.1")], None),
    ],
)
def test_the_first_credential_in_their_order_counts(
    headers: list[tuple[str, str]], credential: str | None
) -> None:
    """Bearer token, then `api-key`, then `x-api-key`; nothing else identifies anybody."""
    assert head(*headers).credential == credential


@pytest.mark.parametrize(
    "value", ["Bearer", "Bearer ", "Basic c2stMQ==", "Token sk-1", "Bearersk-1", "Digest a=b"]
)
def test_an_authorization_of_another_form_is_a_key_that_nobody_has(value: str) -> None:
    """Whoever sends one is not anonymous; but it is nobody's key either, with whatever it ends."""
    for found in (head(("authorization", value)), head_from_attributes(texts(authorization=value))):
        assert found is not None
        assert found.credential is not None
        assert credential_digest(found.credential) != credential_digest("sk-1")


@pytest.mark.parametrize("key", ["schlüssel", "ключ", "鍵", "à"])
def test_a_key_beyond_ascii_is_the_key_of_the_configuration(key: str) -> None:
    """Its digest is that of the bytes that were sent, and blanks of other alphabets stay part of it."""
    for header, value in (("authorization", f"Bearer {key}"), ("api-key", key)):
        credential = head((header, value)).credential
        assert credential is not None
        assert credential_digest(credential) == credential_digest(key)


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=40))
def test_any_bytes_are_a_credential(raw: bytes) -> None:
    """A digest can be made of whatever was sent, and different bytes have different ones."""
    credential = head(("api-key", b"k" + raw + b"k")).credential
    other = head(("api-key", b"k" + raw + b"!k")).credential
    assert credential is not None
    assert other is not None
    assert credential_digest(credential) != credential_digest(other)


@pytest.mark.parametrize("name", sorted(name.decode() for name in IDENTITY))
def test_a_header_that_identifies_must_come_once(name: str) -> None:
    """Two values are a 400, never the first or the last; also when both are the same."""
    for second in ("Bearer vip", "Bearer low"):
        with pytest.raises(RequestError) as raised:
            head((name, "Bearer low"), ("accept", "*/*"), (name, second))
        assert (raised.value.status, raised.value.code) == (400, "duplicate_header")
        assert "vip" not in str(raised.value)


def test_duplicates_of_a_request_that_is_not_ours_are_not_ours_to_judge() -> None:
    """A GET with two keys passes as it came."""
    twice = (("api-key", "a"), ("api-key", "b"))
    assert head_of((":method", "GET"), (":path", CHAT), *twice).endpoint is None


CERTIFICATE = "x-forwarded-client-cert"


@pytest.mark.parametrize(
    ("value", "principals"),
    [
        ("URI=spiffe://cluster/ns/a/sa/b", ("spiffe://cluster/ns/a/sa/b",)),
        (
            "Hash=ab12;URI=spiffe://a;DNS=a.example;DNS=b.example",
            ("spiffe://a", "a.example", "b.example"),
        ),
        ('By=spiffe://me;Subject="CN=a,O=\\"x\\";y";URI=u', ('CN=a,O="x";y', "u")),
        ("By=spiffe://me;Hash=ab12", ()),
        ("URI=https://x/?a=b", ("https://x/?a=b",)),
        ("", ()),
        # Of two certificates, somebody before Envoy wrote one.
        ("URI=spiffe://vip,URI=spiffe://low", ()),
        ("URI=spiffe://low,", ()),
        ('URI="spiffe://vip"x;URI=low', ()),
        ("nonsense", ()),
        ("=;URI=u", ()),
        ("URI=u;;URI=v", ()),
        ('Subject="CN=a', ()),
        ("URI=u; URI=v", ()),
    ],
)
def test_the_names_of_a_certificate(value: str, principals: tuple[str, ...]) -> None:
    """Those of the one that Envoy verified; of a header that is not simply one, none."""
    assert head((CERTIFICATE, value)).principals == principals


@pytest.mark.timeout(20)
@pytest.mark.parametrize("value", ["a" * 60_000, 'a="' * 20_000, "a=\\" * 20_000, '"' * 60_000])
def test_a_header_full_of_nonsense_costs_no_time(value: str) -> None:
    """Each place is looked at once."""
    started_us = SystemClock().now_us()
    assert head((CERTIFICATE, value)).principals == ()
    assert SystemClock().now_us() - started_us < 1_000_000


# Numbers and encodings


@pytest.mark.parametrize(
    ("value", "length"),
    [
        ("0", 0),
        ("71", 71),
        ("0071", 71),
        ("9" * 18, 10**18 - 1),
        ("", None),
        ("-1", None),
        ("+1", None),
        ("1.5", None),
        ("1e3", None),
        ("0x10", None),
        ("1, 1", None),
        ("٣", None),
        ("12_3", None),
    ],
)
def test_a_content_length_is_plain_digits_or_none(value: str, length: int | None) -> None:
    """Anything else says nothing; the body itself is counted in any case."""
    assert head(("content-length", value)).content_length == length


@pytest.mark.parametrize("digits", [4_300, 4_301, 60_000])
def test_endless_digits_are_read(digits: int) -> None:
    """More digits than Python converts are no reason to fail, in no header that a client can set."""
    endless = "9" * digits
    read = head(("content-length", endless), ("x-stainless-retry-count", endless))
    assert read.content_length is None or read.content_length >= 10**18 - 1
    assert read.is_retry


@pytest.mark.parametrize(
    ("value", "is_retry"),
    [
        ("0", False),
        ("00", False),
        ("1", True),
        ("02", True),
        ("", False),
        ("-1", False),
        ("x", False),
    ],
)
def test_the_retry_count_of_openai_clients_tells_a_retry(value: str, *, is_retry: bool) -> None:
    """Above 0 it tried before; nonsense says nothing."""
    assert head(("x-stainless-retry-count", value)).is_retry is is_retry


def test_no_retry_count_is_a_first_try() -> None:
    """Most clients say nothing."""
    assert head().is_retry is False


@pytest.mark.parametrize(
    ("value", "encoding"),
    [("gzip", "gzip"), (" GZip ", "gzip"), ("gzip, gzip", "gzip, gzip"), ("", ""), (b"\xff", "ÿ")],
)
def test_the_encoding_is_told_in_lower_case(value: str | bytes, encoding: str) -> None:
    """Whether it can be read is decided elsewhere."""
    assert head(("content-encoding", value)).content_encoding == encoding


# Which request


@pytest.mark.parametrize(
    ("sent", "request_id"),
    [
        ("2b3f6c1e-3f0e-9f43-8f55-0d7b5f6f3a11", "2b3f6c1e-3f0e-9f43-8f55-0d7b5f6f3a11"),
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
        ("x" * MAX_REQUEST_ID_CHARS, "x" * MAX_REQUEST_ID_CHARS),
        ("x" * (MAX_REQUEST_ID_CHARS + 1), ""),
        ("", ""),
        (b"caf\xc3\xa9", ""),
        (b"a\x1b[31m", ""),
        (b"a\x7f", ""),
    ],
)
def test_the_request_id_is_kept_if_it_is_short_and_can_be_shown(
    sent: str | bytes, request_id: str
) -> None:
    """A client may bring its own: cut, or with odd characters, nobody would find it again."""
    assert head(("x-request-id", sent)).request_id == request_id


def test_without_an_id_there_is_none() -> None:
    """Envoy can be told to make none."""
    assert head().request_id == ""


# Attributes


def test_attributes_tell_the_same_as_headers() -> None:
    """The compact configuration loses nothing that is wanted."""
    sent = {
        "api-key": "sk-2",
        "authorization": "Bearer sk-1",
        "content-encoding": "gzip",
        "content-length": "71",
        "x-api-key": "sk-3",
        "x-forwarded-client-cert": "URI=spiffe://a",
        "x-request-id": "8f3c",
        "x-stainless-retry-count": "2",
    }
    from_attributes = head_from_attributes(
        texts(**{name.replace("-", "_"): value for name, value in sent.items()})
    )
    assert from_attributes == head(*sent.items())
    assert {name.encode() for name in sent} | {b":method", b":path"} == WANTED


def test_the_attribute_of_the_id_tells_it_where_its_header_is_not_sent() -> None:
    """Also beside the header they agree."""
    sent = {"request.path": CHAT.encode(), "request.id": b"8f3c"}
    for more in ({}, {"request.headers['x-request-id']": b"8f3c"}):
        found = head_from_attributes(Attributes({**sent, **more}))
        assert found is not None
        assert found.request_id == "8f3c"


def test_without_the_path_there_is_no_head() -> None:
    """Other attributes alone do not say where a request goes."""
    assert head_from_attributes(Attributes({"request.id": b"8f3c"})) is None
    assert head_from_attributes(Attributes()) is None


@pytest.mark.parametrize(
    ("method", "endpoint"),
    [(None, Endpoint.CHAT), ("POST", Endpoint.CHAT), ("PUT", Endpoint.CHAT), ("GET", None)],
)
def test_a_method_that_is_not_among_the_attributes_is_post(
    method: str | None, endpoint: Endpoint | None
) -> None:
    """Only a body brings attributes here, and bodies come with POST."""
    named = {} if method is None else {"request.method": method.encode()}
    found = head_from_attributes(Attributes({"request.path": CHAT.encode(), **named}))
    assert found is not None
    assert found.endpoint is endpoint


@pytest.mark.parametrize(
    "joined",
    [
        "Bearer low,Bearer vip",
        "Bearer low, bearer\tvip",
        "Basic bG93,Bearer vip",
        "Bearer low,Basic x",
    ],
)
def test_credentials_that_envoy_joined_came_twice(joined: str) -> None:
    """Two `authorization` headers reach us, and the attributes, as one with a comma: a 400 like any other two."""
    with pytest.raises(RequestError) as raised:
        head(("authorization", joined))
    assert (raised.value.status, raised.value.code) == (400, "duplicate_header")
    with pytest.raises(RequestError):
        head_from_attributes(texts(authorization=joined))


@pytest.mark.parametrize("key", ["a,b", "a, b", "low,Bearer", ",,,"])
def test_a_key_may_hold_a_comma(key: str) -> None:
    """It takes a scheme and a credential behind the comma to be two."""
    assert head(("authorization", f"Bearer {key}")).credential == key


def test_attributes_are_read_from_the_message() -> None:
    """The struct that Envoy sends is the one that is understood."""
    full = Message(attributes=attributes(head_attributes(key="sk-1")))
    (entry,) = parse_request(bytes(full)).attributes
    assert b"request.path" in entry
