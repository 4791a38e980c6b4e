"""Requests that go no further: what they are told, and that they held nothing."""

import gzip
import json
import zlib
from collections.abc import Iterable

import pytest

from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.extproc import replies
from envoy_tokenpools.extproc.requesting import ADMIT_BODY
from envoy_tokenpools.gate.directory import Directory
from envoy_tokenpools.gate.order import fingerprint_of
from envoy_tokenpools.observer import Decided
from envoy_tokenpools.observer import Outcome as Decision
from envoy_tokenpools.openai.answers import Answer
from tests.support.extproc import (
    CHAT,
    HI,
    BodyMode,
    Conversation,
    Message,
    chat,
    head_attributes,
    immediate_of,
    kind_of,
    post_rh,
    rb,
    rt,
    sb,
    sh,
    st,
    with_protocol,
)

SHED = Answer(429, (("retry-after", "1"),), b'{"error":{"code":"rate_limit_exceeded"}}')


def refusal(talk: Conversation, messages: Iterable[Message]) -> tuple[int, str]:
    """Status and code of the answer to the last message; those before it went on."""
    *others, last = talk.say(*messages)
    assert "immediate_response" not in [kind_of(other) for other in others]
    status, headers, body = immediate_of(last)
    assert headers["content-type"] == "application/json"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return status, body["error"]["code"]


@pytest.mark.parametrize("key", [None, "", "unknown", "key-a ,key-a"])
def test_an_unknown_caller_is_refused_at_the_head(directory: Directory, key: str | None) -> None:
    """401 before the body is read, with the scheme that is expected."""
    talk = Conversation.begin(directory)
    (reply,) = talk.say(post_rh(key=key))
    status, headers, body = immediate_of(reply)
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert headers["www-authenticate"] == "Bearer"
    assert talk.told == [Decided(Decision.REJECTED, reason="invalid_api_key")]


def test_an_unknown_caller_is_refused_in_the_compact_configuration(directory: Directory) -> None:
    """At the body, the first message there."""
    talk = Conversation.begin(directory)
    assert refusal(talk, [rb(HI, given=head_attributes(key="unknown"))]) == (401, "invalid_api_key")


def test_no_answer_repeats_a_key(directory: Directory) -> None:
    """Neither a wrong one, nor one sent twice."""
    secret = "sk-very-secret"
    wrong = Conversation.begin(directory).say(post_rh(key=secret))
    twice = Conversation.begin(directory).say(
        post_rh(CHAT, ("authorization", f"Bearer {secret}"), key=secret)
    )
    for (reply,) in (wrong, twice):
        assert secret.encode() not in bytes(reply)
        assert immediate_of(reply)[0] in (400, 401)


def test_two_identities_are_refused(directory: Directory) -> None:
    """Not the first and not the last."""
    talk = Conversation.begin(directory)
    head = post_rh(CHAT, ("authorization", "Bearer vip"))
    assert refusal(talk, [head]) == (400, "duplicate_header")


def test_a_request_without_a_body_is_refused_at_the_head(directory: Directory) -> None:
    """A chat without anything to say."""
    assert refusal(Conversation.begin(directory), [post_rh(eos=True)]) == (400, "invalid_json")


def test_a_body_that_trailers_end_empty_is_refused(directory: Directory) -> None:
    """Headers and trailers alone are no request either."""
    assert refusal(Conversation.begin(directory), [post_rh(), rt()]) == (400, "invalid_json")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"model":"\xff\xfe"}',
        b'{"model":"\xc0\xaf"}',
        HI.decode().encode("utf-16"),
        b'{"a":1}{"b":2}',
        b"[]",
        b'"x"',
        b"",
        b'{"messages":"hi"}',
        b'{"model":"m","messages":[{"role":"user","content":"\x00"}]}',
        HI[:-1],
        b"\x00",
        chat(max_tokens=-239),
        chat(n=0),
    ],
)
def test_a_broken_body_is_a_client_error(directory: Directory, body: bytes) -> None:
    """400 in OpenAI's shape, whatever the bytes; nothing is asked of the gate."""
    talk = Conversation.begin(directory)
    status, _ = refusal(talk, [post_rh(), rb(body)])
    assert status == 400
    talk.end()
    assert (talk.orders, talk.settled) == ([], [])


@pytest.mark.parametrize(
    "encoding", ["compress", "aws-chunked", "gzip, gzip, gzip", "x" * 5_000, "gzip;q=1"]
)
def test_an_unknown_encoding_is_refused_at_the_head(directory: Directory, encoding: str) -> None:
    """415 before any of it is read."""
    talk = Conversation.begin(directory)
    head = post_rh(CHAT, ("content-encoding", encoding))
    assert refusal(talk, [head]) == (415, "unsupported_content_encoding")
    talk.say(rb(gzip.compress(HI)))
    assert talk.orders == []


@pytest.mark.parametrize(
    ("encoding", "body", "status", "code"),
    [
        ("gzip", gzip.compress(HI)[:-9], 400, "invalid_content_encoding"),
        ("gzip", HI, 400, "invalid_content_encoding"),
        ("gzip", gzip.compress(HI) + b"more", 400, "invalid_content_encoding"),
        ("gzip", gzip.compress(b"[]"), 400, "invalid_json"),
        ("gzip", gzip.compress(b"\0" * 50_000_000), 413, "request_too_large"),
        ("gzip, gzip", gzip.compress(gzip.compress(b"\0" * 50_000_000)), 413, "request_too_large"),
    ],
    ids=["truncated", "plain", "with more behind it", "no object", "bomb", "bomb in a bomb"],
)
def test_a_body_that_does_not_decode_is_refused(
    directory: Directory, encoding: str, body: bytes, status: int, code: str
) -> None:
    """Truncated, damaged, or far larger than it looks: memory is bounded by the limit of a body."""
    talk = Conversation.begin(directory)
    head = post_rh(CHAT, ("content-encoding", encoding))
    assert refusal(talk, [head, rb(body)]) == (status, code)
    assert talk.orders == []


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(HI)),
        ("X-GZIP", gzip.compress(HI)),
        ("gzip, gzip", gzip.compress(gzip.compress(HI))),
        ("deflate", zlib.compress(HI)),
    ],
)
def test_an_encoded_body_is_read_and_goes_on_as_it_was(
    directory: Directory, encoding: str, body: bytes
) -> None:
    """Counted by what it says, known by what it says, forwarded byte for byte with its header."""
    talk = Conversation.begin(directory)
    *_, reply = talk.say(post_rh(CHAT, ("content-encoding", encoding)), rb(body))
    (order,) = talk.orders
    assert order.fingerprint == fingerprint_of(HI)
    assert bytes(reply) == ADMIT_BODY


def test_a_body_encoded_as_it_is_is_read(directory: Directory) -> None:
    """`identity` is no encoding."""
    talk = Conversation.begin(directory)
    talk.say(post_rh(CHAT, ("content-encoding", " Identity ")), rb(HI))
    assert talk.admissions == 1


# Sizes


@pytest.mark.parametrize(
    ("size", "fits"), [(32_768, True), (32_769, True), (40_000, True), (40_001, False)]
)
def test_a_body_fits_up_to_the_limit(directory: Directory, size: int, *, fits: bool) -> None:
    """One byte more is 413; no hidden limit below it."""
    talk = Conversation.begin(directory, max_body_bytes=40_000)
    body = chat("a" * (size - len(chat(""))))
    assert len(body) == size
    if fits:
        talk.say(post_rh(), rb(body))
        assert talk.admissions == 1
    else:
        assert refusal(talk, [post_rh(), rb(body)]) == (413, "request_too_large")


def test_a_declared_length_above_the_limit_is_refused_at_the_head(directory: Directory) -> None:
    """Before any of it is sent."""
    talk = Conversation.begin(directory, max_body_bytes=40_000)
    head = post_rh(CHAT, ("content-length", "40001"))
    assert refusal(talk, [head]) == (413, "request_too_large")


def test_pieces_that_come_to_more_than_the_limit_are_refused(directory: Directory) -> None:
    """In the piece that passes it, whatever the length said before; what follows is not kept."""
    talk = Conversation.begin(directory, max_body_bytes=1_000)
    pieces = [rb(b"a" * 400, eos=False) for _ in range(3)]
    head = post_rh(CHAT, ("content-length", "10"))
    assert refusal(talk, [head, *pieces]) == (413, "request_too_large")
    talk.say(rb(b"a" * 400, eos=False), rb(eos=True))
    assert [event.reason for event in talk.decisions] == ["request_too_large"]


# Models


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"model":"other","messages":[]}', 404, "model_not_found"),
        (b'{"model":"","messages":[]}', 404, "model_not_found"),
        (b'{"messages":[]}', 400, "missing_required_parameter"),
        (b'{"model":null,"messages":[]}', 400, "missing_required_parameter"),
        (b'{"model":123,"messages":[]}', 400, "invalid_type"),
    ],
)
def test_a_model_that_nobody_serves(
    directory: Directory, body: bytes, status: int, code: str
) -> None:
    """Told as OpenAI tells it."""
    talk = Conversation.begin(directory)
    if b"[]" in body:
        body = body.replace(b"[]", b'[{"role":"user","content":"hi"}]')
    assert refusal(talk, [post_rh(), rb(body)]) == (status, code)


def test_decisions_hold_nothing_that_a_client_wrote(directory: Directory) -> None:
    """Reasons are a closed set, however many names are tried: they become metric labels."""
    reasons = set()
    for number in range(300):
        talk = Conversation.begin(directory)
        junk = f'junk-{number}"\\\n{{}}'
        talk.say(post_rh(CHAT + f"?i={number}", ("x-tenant-id", junk)))
        talk.say(rb(chat().replace(b'"m"', json.dumps(junk).encode())))
        talk.say(sh(), sb(b"x", eos=True))
        reasons |= {(event.reason, event.pool, event.entitlement) for event in talk.decisions}
    assert len(reasons) <= 3
    assert not [reason for reason, *_ in reasons if "junk" in reason]


# What the gate says


def test_a_shed_request_is_answered_and_told_by_the_gate(directory: Directory) -> None:
    """The exchange passes the answer on, and tells nothing itself: the gate did."""
    talk = Conversation.begin(directory, judge=lambda _: SHED)
    *_, reply = talk.say(post_rh(), rb(HI))
    answer = reply.immediate_response
    assert answer is not None
    assert (answer.body, answer.details) == (SHED.body, "tokenpools")
    assert talk.told == []


def test_a_request_that_can_never_fit_is_told_by_the_gate(directory: Directory) -> None:
    """Its error is an answer like any other; to tell it here too would count it twice."""
    error = RequestError(400, "context_length_exceeded", "Too long.", "messages")
    talk = Conversation.begin(directory, judge=lambda _: error)
    assert refusal(talk, [post_rh(), rb(HI)]) == (400, "context_length_exceeded")
    assert talk.told == []


def test_refused_at_its_trailers(directory: Directory) -> None:
    """A decision that fell on trailers is answered there."""
    talk = Conversation.begin(directory, judge=lambda _: SHED)
    *_, reply = talk.say(post_rh(), rb(HI, eos=False), rt())
    assert kind_of(reply) == "immediate_response"


def test_our_own_refusal_on_its_way_back_is_not_a_response(directory: Directory) -> None:
    """Envoy shows us the 429 that we gave: it is not changed, charged or counted again."""
    talk = Conversation.begin(directory, judge=lambda _: SHED)
    talk.say(post_rh(), rb(HI))
    replied = talk.say(sh(429, "application/json", *SHED.headers), sb(SHED.body, eos=True), st())
    assert [bytes(reply) for reply in replied] == [
        replies.CONTINUE_RESPONSE_HEADERS,
        replies.CONTINUE_RESPONSE_BODY,
        replies.CONTINUE_RESPONSE_TRAILERS,
    ]
    talk.end()
    assert (len(talk.orders), talk.settled, talk.told) == (1, [], [])


def test_a_refused_request_can_not_be_asked_for_again(directory: Directory) -> None:
    """More of it on the same stream goes on without a second decision."""
    talk = Conversation.begin(directory, judge=lambda _: SHED)
    talk.say(post_rh(), rb(HI), post_rh(), rb(HI), rt())
    assert len(talk.orders) == 1


# A filter that shows us nothing


def test_a_body_without_a_head_is_told_what_to_configure(directory: Directory) -> None:
    """Headers skipped and no attributes: 503 that says so, rather than a free pass."""
    talk = Conversation.begin(directory)
    (reply,) = talk.say(rb(HI))
    status, headers, body = immediate_of(reply)
    assert (status, headers["x-tokenpools-reason"]) == (503, "filter_misconfigured")
    assert "request_attributes" in body["error"]["message"]
    assert talk.told == [Decided(Decision.REJECTED, reason="filter_misconfigured")]
    assert talk.orders == []


def test_a_head_in_buffered_partial_mode_is_not_taken_for_whole(directory: Directory) -> None:
    """What Envoy cut off at its buffer's limit is no body to be judged by."""
    talk = Conversation.begin(directory)
    talk.say(with_protocol(post_rh(), BodyMode.BUFFERED_PARTIAL, BodyMode.STREAMED))
    talk.say(rb(HI[:20], eos=False))
    assert talk.orders == []
