"""Endpoints that differ: bodies that are never read, paths that are not served, answers in another shape."""

import json
from dataclasses import replace

import pytest

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.extproc import replies
from envoy_tokenpools.extproc.requesting import ADMIT_BODY, ADMIT_HEADERS, STRIPPED_HEADERS
from envoy_tokenpools.gate.directory import Directory
from envoy_tokenpools.observer import Decided, Ending
from envoy_tokenpools.observer import Outcome as Decision
from envoy_tokenpools.openai.answers import Answer
from envoy_tokenpools.openai.endpoint import Endpoint
from envoy_tokenpools.openai.usage import Usage
from tests.support.extproc import (
    HI,
    BodyMode,
    Conversation,
    Message,
    Response,
    head_attributes,
    immediate_of,
    kind_of,
    post_rh,
    rb,
    rh,
    sb,
    sh,
)
from tests.support.gate import configured
from tests.support.pools import amount, entitlement, pool

UPLOAD = "/v1/audio/transcriptions"
SPEECH = b"\x00\xff" * 100_000
SHED = Answer(429, (), b"{}")
TEXT = json.dumps(
    {"text": "Hello world", "usage": {"input_tokens": 14, "output_tokens": 2}}
).encode()


# Uploads: decided on their head alone


def test_an_upload_is_decided_on_its_head(directory: Directory) -> None:
    """Its body is not sent to us, however large; the answer is, and settles it."""
    talk = Conversation.begin(directory, max_body_bytes=1_000)
    (reply,) = talk.say(post_rh(UPLOAD, ("content-length", "25000000")))
    assert bytes(reply) == ADMIT_HEADERS
    (order,) = talk.orders
    assert (order.facts.endpoint, order.facts.flat) == (Endpoint.TRANSCRIPTIONS, True)
    assert (order.facts.model, order.fingerprint) == (None, 0)
    talk.say(sh(), sb(TEXT, eos=True))
    assert talk.outcome.ending is Ending.COMPLETED
    assert talk.outcome.metered is not None
    assert talk.outcome.metered.usage == Usage(14, 2)


def test_an_upload_asks_for_no_body_and_for_the_answer() -> None:
    """And loses the headers by which it would rank itself."""
    reply = Response.parse(ADMIT_HEADERS)
    assert reply.mode_override is not None
    assert reply.mode_override.request_body_mode == BodyMode.NONE
    assert reply.mode_override.response_body_mode == BodyMode.STREAMED
    assert reply.request_headers is not None
    assert reply.request_headers.response is not None
    assert reply.request_headers.response.header_mutation is not None
    assert reply.request_headers.response.header_mutation.remove_headers == list(STRIPPED_HEADERS)


def test_an_upload_whose_body_comes_nevertheless_goes_on(directory: Directory) -> None:
    """Envoy was not allowed to keep it: each piece passes, whatever its size."""
    talk = Conversation.begin(directory, max_body_bytes=1_000)
    _, *others = talk.say(post_rh(UPLOAD), rb(SPEECH, eos=False), rb(SPEECH))
    assert {bytes(other) for other in others} == {replies.CONTINUE_REQUEST_BODY}
    assert talk.admissions == 1


def test_an_upload_is_refused_at_its_head(directory: Directory) -> None:
    """Before any of it is sent."""
    talk = Conversation.begin(directory, judge=lambda _: SHED)
    (reply,) = talk.say(post_rh(UPLOAD))
    assert immediate_of(reply)[0] == 429


def test_an_upload_is_decided_on_its_first_piece_without_headers(directory: Directory) -> None:
    """In the compact configuration: the same decision, and nothing of the body is kept or measured."""
    talk = Conversation.begin(directory, max_body_bytes=1_000)
    first = rb(SPEECH, eos=False, given=head_attributes(UPLOAD))
    replied = talk.say(first, rb(SPEECH))
    assert [bytes(reply) for reply in replied] == [ADMIT_BODY, replies.CONTINUE_REQUEST_BODY]
    (order,) = talk.orders
    assert order.facts.endpoint is Endpoint.TRANSCRIPTIONS
    talk.end()
    assert len(talk.settled) == 1


@pytest.mark.parametrize("encoding", ["x-unknown", "gzip"])
def test_the_encoding_of_an_upload_is_nobodys_business(directory: Directory, encoding: str) -> None:
    """Its body is not read."""
    portable = Conversation.begin(directory)
    portable.say(post_rh(UPLOAD, ("content-encoding", encoding)))
    compact = Conversation.begin(directory)
    compact.say(rb(SPEECH, given=head_attributes(UPLOAD, content_encoding=encoding)))
    assert (portable.admissions, compact.admissions) == (1, 1)


def test_an_upload_without_a_body_is_refused(directory: Directory) -> None:
    """As any other request without one."""
    (reply,) = Conversation.begin(directory).say(post_rh(UPLOAD, eos=True))
    assert immediate_of(reply)[0] == 400


def test_an_upload_of_a_caller_with_several_pools_needs_a_default() -> None:
    """Its model is not read: without one it is 404, with one it goes there."""
    who = entitlement("a", ServiceClass.SPOT)
    one, other = pool(amount(), who), replace(pool(amount(), who), name="other", models=("n",))
    lost = Conversation.begin(Directory(configured(one, other)))
    (reply,) = lost.say(post_rh(UPLOAD))
    assert immediate_of(reply)[0] == 404
    led = Conversation.begin(Directory(configured(one, other, default_pool="other")))
    led.say(post_rh(UPLOAD))
    assert led.orders[0].pool.name == "other"


# Paths that nobody meters


@pytest.mark.parametrize(
    "message",
    [
        rh([(":method", "POST"), (":path", "/v1/files")]),
        post_rh("/v1/files"),
        rh([(":method", "PUT"), (":path", "/v1/files")]),
        rh([(":method", "PATCH"), (":path", "/v1/files")]),
        rb(b"{}", given=head_attributes("/v1/files")),
    ],
    ids=["without a key", "headers", "PUT", "PATCH", "compact"],
)
def test_unknown_paths_can_be_refused(directory: Directory, message: Message) -> None:
    """Where the operator wants only what is metered: 404, told as such."""
    talk = Conversation.begin(directory, rejects_unknown_endpoints=True)
    (reply,) = talk.say(message)
    status, _, body = immediate_of(reply)
    assert (status, body["error"]["code"]) == (404, "unknown_url")
    assert talk.told == [Decided(Decision.REJECTED, reason="unknown_url")]


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
def test_what_sends_nothing_to_work_on_passes_all_the_same(
    directory: Directory, method: str
) -> None:
    """Lists of models, health checks, preflights."""
    talk = Conversation.begin(directory, rejects_unknown_endpoints=True)
    (reply,) = talk.say(rh([(":method", method), (":path", "/v1/models")], eos=True))
    assert bytes(reply) == replies.PASS_UNMETERED


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_work_is_metered_whatever_the_method_is_called(directory: Directory, method: str) -> None:
    """SGLang generates for a PUT too: identified, decided and settled like a POST."""
    headers = [(":method", method), (":path", "/v1/chat/completions")]
    (reply,) = Conversation.begin(directory).say(rh(headers))
    assert immediate_of(reply)[0] == 401
    talk = Conversation.begin(directory)
    talk.say(rh([*headers, ("authorization", "Bearer key-a")]), rb(HI))
    assert talk.admissions == 1
    talk.say(sh(405, "application/json"), sb(b'{"detail":"Method Not Allowed"}', eos=True))
    assert (talk.outcome.ending, talk.outcome.status) == (Ending.BACKEND_ERROR, 405)


def test_metered_paths_lie_below_a_prefix(directory: Directory) -> None:
    """What is beside it is somebody else's."""
    for path, admissions in (("/team-a/v1/chat/completions", 1), ("/v1/chat/completions", 0)):
        talk = Conversation.begin(directory, path_prefix="/team-a/")
        talk.say(post_rh(path), rb(HI))
        assert talk.admissions == admissions
        compact = Conversation.begin(directory, path_prefix="/team-a/")
        compact.say(rb(HI, given=head_attributes(path)))
        assert compact.admissions == admissions


# Dialects


@pytest.mark.parametrize(
    ("messages", "status", "kind"),
    [
        ([post_rh("/v1/messages", key="unknown")], 401, "authentication_error"),
        ([post_rh("/v1/messages"), rb(b"{")], 400, "invalid_request_error"),
        ([post_rh("/v1/messages", ("content-length", "99999999"))], 413, "request_too_large"),
        (
            [
                post_rh("/v1/messages"),
                rb(b'{"model":"x","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}'),
            ],
            404,
            "not_found_error",
        ),
    ],
)
def test_anthropics_clients_are_answered_in_their_shape(
    directory: Directory, messages: list[Message], status: int, kind: str
) -> None:
    """Whatever refuses them."""
    *_, reply = Conversation.begin(directory).say(*messages)
    assert kind_of(reply) == "immediate_response"
    found, _, body = immediate_of(reply)
    assert (found, body["type"], body["error"]["type"]) == (status, "error", kind)
