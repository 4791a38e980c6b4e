"""Every order of messages that a filter configuration produces, from the first to the settlement."""

import gzip
import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.extproc import replies
from envoy_tokenpools.extproc.requesting import ADMIT_BODY
from envoy_tokenpools.gate.directory import Directory
from envoy_tokenpools.gate.order import Outcome, fingerprint_of
from envoy_tokenpools.observer import Decided, Ending, FirstToken
from envoy_tokenpools.observer import Outcome as Decision
from envoy_tokenpools.openai.answers import Answer
from envoy_tokenpools.openai.request import Endpoint
from envoy_tokenpools.openai.usage import Usage
from tests.support.extproc import (
    HI,
    BodyMode,
    Conversation,
    Message,
    Response,
    chat,
    head_attributes,
    kind_of,
    observed,
    post_rh,
    rb,
    rh,
    rt,
    sb,
    sh,
    st,
    with_protocol,
)
from tests.support.gate import configured
from tests.support.pools import amount, entitlement, pool
from tests.support.streams import S_TEXT, S

SSE = "text/event-stream; charset=utf-8"
ANSWER = json.dumps(
    {
        "choices": [{"index": 0, "message": {"content": "Hello world"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12},
    }
).encode()
STREAMING = chat(stream=True, stream_options={"include_usage": True})
"""A stream that asks for usage by itself, so that nothing is changed in it."""

STREAM: dict[str, str | float] = {"response.code": 200.0, "response.headers['content-type']": SSE}


def constants(replied: list[Response]) -> list[bytes]:
    """The replies as bytes, to be compared with the constants."""
    return [bytes(response) for response in replied]


def usage_of(outcome: Outcome) -> Usage | None:
    """What the backend reported."""
    assert outcome.metered is not None
    return outcome.metered.usage


# Portable: request headers SEND, body BUFFERED, response headers SEND, body STREAMED


def test_portable_answer(directory: Directory) -> None:
    """Headers, one body, the answer's headers and its body in two messages."""
    talk = Conversation.begin(directory)
    first = with_protocol(post_rh(), BodyMode.BUFFERED, BodyMode.STREAMED)
    assert constants(talk.say(first)) == [replies.CONTINUE_REQUEST_HEADERS]
    assert talk.orders == []
    assert constants(talk.say(rb(HI))) == [ADMIT_BODY]
    (order,) = talk.orders
    assert (order.pool.name, order.entitlement.name) == ("pool", "a")
    assert (order.facts.endpoint, order.facts.model) == (Endpoint.CHAT, "m")
    assert (order.fingerprint, order.enforce) == (fingerprint_of(HI), True)
    (headers,) = talk.say(sh())
    assert kind_of(headers) == "response_headers"
    assert constants(talk.say(sb(ANSWER[:50]), sb(ANSWER[50:]))) == [
        replies.CONTINUE_RESPONSE_BODY,
        replies.CONTINUE_RESPONSE_BODY,
    ]
    assert talk.settled == []
    talk.say(sb(eos=True))
    assert (talk.outcome.ending, talk.outcome.status) == (Ending.COMPLETED, 200)
    assert usage_of(talk.outcome) == Usage(5, 7)
    assert talk.outcome.admitted.order.facts.endpoint is Endpoint.CHAT
    talk.end()
    assert len(talk.settled) == 1
    assert talk.told == []


def test_the_answer_tells_what_is_left(directory: Directory) -> None:
    """Rate-limit headers are set on it, each over whatever the backend said; nothing else is."""
    talk = Conversation.begin(directory)
    *_, response = talk.say(post_rh(), rb(HI), sh(200, SSE, ("x-ratelimit-limit-tokens", "7")))
    assert response.response_headers is not None
    changed = response.response_headers.response
    assert changed is not None
    assert changed.header_mutation is not None
    assert not changed.header_mutation.remove_headers
    found = {
        o.header.key: o.header.raw_value for o in changed.header_mutation.set_headers if o.header
    }
    assert found["x-ratelimit-limit-tokens"] == b"1000"
    assert found["x-ratelimit-remaining-tokens"] == b"960"
    assert found["x-ratelimit-reset-tokens"] == b"400ms"
    assert found["x-ratelimit-limit-requests"] == b"8"
    assert found["x-ratelimit-remaining-requests"] == b"7"
    assert all(name.startswith(("x-ratelimit-", "ratelimit")) for name in found)


@settings(deadline=None)
@given(strategies.lists(strategies.integers(0, len(S)), max_size=6).map(sorted))
def test_portable_stream_cut_anywhere(cuts: list[int]) -> None:
    """Usage, one settlement and untouched bodies, however the stream is cut."""
    config = configured(pool(amount(), entitlement("a", ServiceClass.SPOT)))
    talk = Conversation.begin(Directory(config))
    talk.say(post_rh(), rb(STREAMING), sh(200, SSE))
    edges = [0, *cuts, len(S)]
    pieces = [S[a:b] for a, b in itertools.pairwise(edges)]
    replied = talk.say(*(sb(piece) for piece in pieces), sb(eos=True))
    assert set(constants(replied)) == {replies.CONTINUE_RESPONSE_BODY}
    assert usage_of(talk.outcome) == Usage(26, 9)
    assert talk.outcome.metered is not None
    assert talk.outcome.metered.texts == (S_TEXT,)
    assert len(talk.first_tokens) == 1


def test_the_first_token_is_told_once_with_its_time(directory: Directory) -> None:
    """From the request's arrival to the first generated text; the role before it is none."""
    talk = Conversation.begin(directory)
    talk.now_us = 1_000_000
    talk.say(post_rh())
    talk.now_us = 1_200_000
    talk.say(rb(chat(stream=True)), sh(200, SSE))
    first = S.index(b"Hello")
    talk.now_us = 1_300_999
    talk.say(sb(S[: first - 40]))
    assert talk.first_tokens == []
    talk.now_us = 1_400_999
    talk.say(sb(S[first - 40 : first + 60]))
    talk.now_us = 1_900_000
    talk.say(sb(S[first + 60 :], eos=True))
    service_class = talk.orders[0].entitlement.service_class
    assert talk.first_tokens == [FirstToken("pool", service_class, elapsed_ms=400)]


def test_a_message_with_the_last_piece_and_the_end_is_metered_first(directory: Directory) -> None:
    """The piece that ends the stream counts like any other."""
    talk = Conversation.begin(directory)
    talk.say(post_rh(), rb(chat(stream=True)), sh(200, SSE), sb(S, eos=True))
    assert usage_of(talk.outcome) == Usage(26, 9)
    assert len(talk.first_tokens) == 1


# Compact and lean: headers skipped, attributes on the first message of a direction


def test_compact_stream(directory: Directory) -> None:
    """One request message with attributes, then the stream with its own."""
    talk = Conversation.begin(directory)
    assert constants(talk.say(rb(STREAMING, given=head_attributes()))) == [ADMIT_BODY]
    assert talk.orders[0].entitlement.name == "a"
    talk.say(sb(S[:300], given=STREAM), sb(S[300:]), sb(eos=True))
    assert (talk.outcome.ending, talk.outcome.status) == (Ending.COMPLETED, 200)
    assert usage_of(talk.outcome) == Usage(26, 9)


def test_compact_answer_that_failed(directory: Directory) -> None:
    """The status comes from `response.code`."""
    talk = Conversation.begin(directory)
    talk.say(rb(HI, given=head_attributes()))
    talk.say(sb(b'{"error":{}}', given={"response.code": 503.0}, eos=True))
    assert (talk.outcome.ending, talk.outcome.status) == (Ending.BACKEND_ERROR, 503)


@pytest.mark.parametrize(("stream", "body"), [(True, S), (False, ANSWER)])
def test_without_response_attributes_the_request_says_what_comes(
    directory: Directory, body: bytes, *, stream: bool
) -> None:
    """A stream was asked for, or it was not."""
    talk = Conversation.begin(directory)
    talk.say(rb(chat(stream=stream), given=head_attributes()), sb(body), sb(eos=True))
    assert usage_of(talk.outcome) is not None
    assert talk.outcome.ending is Ending.COMPLETED


def test_compact_compressed_answer_is_decoded(directory: Directory) -> None:
    """Its encoding is among the attributes."""
    talk = Conversation.begin(directory)
    talk.say(rb(HI, given=head_attributes()))
    encoded: dict[str, str | float] = {"response.headers['content-encoding']": "gzip"}
    talk.say(sb(gzip.compress(ANSWER), given=encoded, eos=True))
    assert usage_of(talk.outcome) == Usage(5, 7)


def test_lean(directory: Directory) -> None:
    """One message in all; the end of the stream ends the lease."""
    talk = Conversation.begin(directory)
    talk.say(rb(HI, given=head_attributes()))
    assert talk.settled == []
    talk.end()
    assert (talk.outcome.status, talk.outcome.metered) == (None, None)


# Trailers, pieces, ends that do not come


def test_request_trailers_end_a_body_without_an_end(directory: Directory) -> None:
    """The request is decided on at its trailers, by a reply of their kind."""
    talk = Conversation.begin(directory)
    talk.say(post_rh(), rb(HI, eos=False))
    assert talk.orders == []
    assert constants(talk.say(rt([("x", "y")]))) == [replies.CONTINUE_REQUEST_TRAILERS]
    assert talk.admissions == 1


def test_request_trailers_after_the_decision_change_nothing(directory: Directory) -> None:
    """A buffered body was whole before them."""
    talk = Conversation.begin(directory)
    talk.say(with_protocol(post_rh(), BodyMode.BUFFERED, BodyMode.STREAMED))
    talk.say(rb(HI, eos=False), rt())
    assert talk.admissions == 1


def test_response_trailers_end_the_response(directory: Directory) -> None:
    """A body without an end, then trailers."""
    talk = Conversation.begin(directory)
    talk.say(post_rh(), rb(HI), sh(), sb(ANSWER), st())
    assert talk.outcome.ending is Ending.COMPLETED


def test_a_buffered_body_is_whole_without_its_end(directory: Directory) -> None:
    """Upgrades and trailers leave the mark out; the one message has everything."""
    talk = Conversation.begin(directory)
    talk.say(with_protocol(post_rh(), BodyMode.BUFFERED, BodyMode.STREAMED), rb(HI, eos=False))
    assert talk.admissions == 1


@pytest.mark.parametrize("mode", [None, BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL])
def test_in_any_other_mode_only_the_end_makes_it_whole(
    directory: Directory, mode: BodyMode | None
) -> None:
    """What looks like a whole request may go on: waiting holds nothing."""
    talk = Conversation.begin(directory)
    first = post_rh()
    talk.say(first if mode is None else with_protocol(first, mode, BodyMode.STREAMED))
    talk.say(rb(HI, eos=False))
    talk.end()
    assert (talk.orders, talk.settled, talk.told) == ([], [], [])


@settings(deadline=None)
@given(strategies.lists(strategies.integers(0, len(HI)), max_size=5).map(sorted))
def test_a_body_in_pieces_is_decided_on_once_and_whole(cuts: list[int]) -> None:
    """No piece is judged; the last one, which may be empty, brings the decision."""
    config = configured(pool(amount(), entitlement("a", ServiceClass.SPOT)))
    talk = Conversation.begin(Directory(config))
    edges = [0, *cuts, len(HI)]
    pieces = [HI[a:b] for a, b in itertools.pairwise(edges)]
    replied = talk.say(post_rh(), *(rb(piece, eos=False) for piece in pieces))
    assert set(constants(replied[1:])) == {replies.CONTINUE_REQUEST_BODY}
    assert talk.orders == []
    talk.say(rb(eos=True))
    (order,) = talk.orders
    assert order.fingerprint == fingerprint_of(HI)


def test_a_second_body_after_the_decision_goes_on(directory: Directory) -> None:
    """It gets its reply and nothing more."""
    talk = Conversation.begin(directory)
    talk.say(post_rh(), rb(HI))
    assert constants(talk.say(rb(HI))) == [replies.CONTINUE_REQUEST_BODY]
    assert talk.admissions == 1


def test_a_second_head_changes_nothing(directory: Directory) -> None:
    """Neither before nor after the decision can a request become somebody else's."""
    talk = Conversation.begin(directory)
    talk.say(post_rh(), post_rh(key="key-b"), rb(HI), rh([(":method", "GET"), (":path", "/")]))
    assert [order.entitlement.name for order in talk.orders] == ["a"]


# Not ours


@pytest.mark.parametrize(
    "messages",
    [
        [
            rh([(":method", "GET"), (":path", "/v1/models")], eos=True),
            sh(200),
            sb(b"[]", eos=True),
        ],
        [
            rh([(":method", "HEAD"), (":path", "/")], eos=True),
            sh(200, None, ("content-length", "512"), eos=True),
        ],
        [
            rh([(":method", "GET"), (":path", "/v1/realtime"), ("upgrade", "websocket")]),
            sh(101, None),
        ],
        [
            rh([(":method", "POST"), (":path", "/v1/files")]),
            rb(b"\x00" * 20_000),
            rt(),
            sh(200),
            sb(b"{}", eos=True),
            st(),
        ],
    ],
)
def test_what_is_not_metered_passes_at_once(directory: Directory, messages: list[Message]) -> None:
    """No wait, no change, no lease; told once as bypassed, and Envoy is asked to send no more."""
    talk = Conversation.begin(directory)
    first, *others = talk.say(*messages)
    assert constants([first]) == [replies.PASS_UNMETERED]
    assert all(
        kind_of(other) == kind_of(sent) for other, sent in zip(others, messages[1:], strict=True)
    )
    assert all(other.mode_override is None for other in others)
    talk.end()
    assert talk.told == [Decided(Decision.BYPASSED, reason="unmetered")]
    assert (talk.orders, talk.settled) == ([], [])


def test_what_is_not_metered_passes_in_the_compact_configuration(directory: Directory) -> None:
    """By its path among the attributes; without a key."""
    talk = Conversation.begin(directory)
    given_path = head_attributes("/v1/files", key=None)
    assert constants(talk.say(rb(b"{}", given=given_path))) == [replies.CONTINUE_REQUEST_BODY]
    assert talk.told == [Decided(Decision.BYPASSED, reason="unmetered")]


# Bodies that are kept from us


def test_a_body_that_a_route_keeps_back_is_asked_for(directory: Directory) -> None:
    """Envoy said that it would send none: it is asked for, and what then comes is whole."""
    talk = Conversation.begin(directory)
    first = with_protocol(post_rh(), BodyMode.NONE, BodyMode.NONE)
    assert constants(talk.say(first)) == [replies.BUFFER_REQUEST_BODY]
    talk.say(rb(HI, eos=False))
    assert talk.admissions == 1


@pytest.mark.parametrize("mode", [None, BodyMode.NONE])
def test_a_body_that_does_not_come_is_charged_by_its_answer(
    directory: Directory, mode: BodyMode | None
) -> None:
    """Where the mode cannot be overridden the request is admitted with its answer: not refused, never hung."""
    talk = Conversation.begin(directory)
    first = post_rh()
    talk.say(first if mode is None else with_protocol(first, mode, BodyMode.NONE))
    replied = talk.say(sh(), sb(ANSWER, eos=True), st())
    assert [kind_of(reply) for reply in replied] == [
        "response_headers",
        "response_body",
        "response_trailers",
    ]
    talk.end()
    (order,) = talk.orders
    assert (order.enforce, order.facts.flat) == (False, True)
    assert (talk.outcome.ending, usage_of(talk.outcome)) == (Ending.COMPLETED, Usage(5, 7))
    assert talk.told == []


def test_a_body_that_does_not_come_has_one_settlement_also_without_a_response_body(
    directory: Directory,
) -> None:
    """The answer's headers end the stream, or the client does."""
    for message in (sh(eos=True), sh()):
        talk = Conversation.begin(directory)
        talk.say(post_rh(), message)
        talk.end()
        assert talk.outcome.status == 200


def test_a_body_that_does_not_come_is_told_where_nothing_can_be_charged(
    directory: Directory,
) -> None:
    """An error was not taken; a key of several pools, or a gate that refuses, lets it pass. All are counted."""
    two = (
        pool(amount(), entitlement("a", ServiceClass.SPOT)),
        replace(pool(amount(), entitlement("a", ServiceClass.SPOT)), name="other", models=("n",)),
    )
    late = RequestError(404, "model_not_found", "Gone.")
    passed = Decided(Decision.BYPASSED, reason="body_not_sent")
    for talk, message, told in (
        (
            Conversation.begin(directory),
            sh(413),
            Decided(Decision.REJECTED, reason="body_not_taken"),
        ),
        (Conversation.begin(Directory(configured(*two))), sh(), passed),
        (Conversation.begin(directory, lambda _: late), sh(), passed),
        (Conversation.begin(directory, lambda _: Answer(503, (), b"{}")), sh(), passed),
    ):
        talk.say(post_rh())
        assert constants(talk.say(message)) == [replies.CONTINUE_RESPONSE_HEADERS]
        talk.say(sb(ANSWER, eos=True), st())
        talk.end()
        assert talk.told == [told]
        assert talk.settled == []


def test_an_observer_of_a_body_that_does_not_come_says_nothing(directory: Directory) -> None:
    """And counts."""
    talk = Conversation.begin(directory)
    talk.say(*map(observed, (post_rh(), sh(), sb(ANSWER, eos=True))))
    talk.end()
    assert usage_of(talk.outcome) == Usage(5, 7)


def test_response_bodies_before_any_request_get_their_replies(directory: Directory) -> None:
    """Out of order, before and after the head: continue, without anything held."""
    talk = Conversation.begin(directory)
    replied = talk.say(sb(b"x"), post_rh(), sb(b"y"), rb(HI), sb(ANSWER, eos=True))
    assert [kind_of(response) for response in replied] == [
        "response_body",
        "request_headers",
        "response_body",
        "request_body",
        "response_body",
    ]
    assert usage_of(talk.outcome) == Usage(5, 7)


# Observability mode


def test_an_observer_says_nothing_and_counts(directory: Directory) -> None:
    """No reply to any message; the order is not enforced, and settled as any other."""
    talk = Conversation.begin(directory)
    messages = [post_rh(), rb(chat(stream=True)), rt(), sh(200, SSE), sb(S, eos=True)]
    assert talk.say(*(observed(message) for message in [*messages, st()])) == []
    assert [order.enforce for order in talk.orders] == [False]
    assert usage_of(talk.outcome) == Usage(26, 9)
    assert len(talk.first_tokens) == 1


def test_an_observer_refuses_nothing(directory: Directory) -> None:
    """An unknown key is told, not answered, and the response is not ours."""
    talk = Conversation.begin(directory)
    head = observed(post_rh(key="unknown"))
    assert talk.say(head, observed(rb(HI)), observed(sh(200)), observed(sb(ANSWER, eos=True))) == []
    assert talk.told == [Decided(Decision.REJECTED, reason="invalid_api_key")]
    assert talk.settled == []
