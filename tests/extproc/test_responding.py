"""What a client gets of the response, and what is read from it."""

import gzip
import itertools
import json

import pytest
from hypothesis import given, settings, strategies

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.extproc import replies
from envoy_tokenpools.extproc.responding import Response as Answered
from envoy_tokenpools.gate.directory import Directory
from envoy_tokenpools.observer import Ending
from envoy_tokenpools.openai.usage import Usage
from tests.support.extproc import (
    Conversation,
    Message,
    Response,
    chat,
    head_attributes,
    observed,
    passed_on,
    post_rh,
    rb,
    sb,
    sh,
    st,
)
from tests.support.gate import configured
from tests.support.pools import amount, entitlement, pool
from tests.support.streams import S_EVENTS, S, chunk, stream_of

SSE = "text/event-stream"
DIRECTORY = Directory(configured(pool(amount(), entitlement("a", ServiceClass.SPOT))))
WITHOUT_USAGE = stream_of(*S_EVENTS[:3], S_EVENTS[4])


def asking() -> Conversation:
    """A stream that said nothing about usage, so that we asked for it."""
    talk = Conversation.begin(DIRECTORY)
    talk.say(post_rh(), rb(chat(stream=True)))
    return talk


def delivered(talk: Conversation, *pieces: bytes) -> bytes:
    """What the client gets of these pieces, the last of which ends the body."""
    got = b""
    for number, piece in enumerate(pieces, 1):
        (reply,) = talk.say(sb(piece, eos=number == len(pieces)))
        got += passed_on(piece, reply)
    return got


def headers_changed(response: Response) -> tuple[set[str], list[str]]:
    """Names of headers set and removed by a reply to response headers."""
    assert response.response_headers is not None
    assert response.response_headers.response is not None
    mutation = response.response_headers.response.header_mutation
    assert mutation is not None
    names = {option.header.key for option in mutation.set_headers if option.header is not None}
    return names, list(mutation.remove_headers)


# The usage chunk that only we asked for


@settings(deadline=None)
@given(strategies.lists(strategies.integers(0, len(S)), max_size=6).map(sorted))
def test_the_usage_chunk_is_read_and_withheld(cuts: list[int]) -> None:
    """However the stream is cut: the client gets what it would have got without our asking."""
    talk = asking()
    talk.say(sh(200, SSE))
    edges = [0, *cuts, len(S)]
    assert delivered(talk, *(S[a:b] for a, b in itertools.pairwise(edges)), b"") == WITHOUT_USAGE
    assert talk.outcome.metered is not None
    assert talk.outcome.metered.usage == Usage(26, 9)
    assert talk.outcome.ending is Ending.COMPLETED


def test_a_declared_length_is_removed_where_bytes_may_be() -> None:
    """Only there."""
    (reply,) = asking().say(sh(200, SSE, ("content-length", str(len(S)))))
    assert headers_changed(reply)[1] == ["content-length"]
    (reply,) = asking().say(sh(200, "application/json", ("content-length", "5")))
    assert headers_changed(reply)[1] == []


def test_no_header_that_belongs_to_the_connection_is_ever_set() -> None:
    """Nor the status, the host or a length."""
    forbidden = {"transfer-encoding", "connection", "content-length", "host"}
    more = (("transfer-encoding", "chunked"), ("content-length", "5"), ("connection", "close"))
    (reply,) = asking().say(sh(200, SSE, *more))
    names, _ = headers_changed(reply)
    assert not names & forbidden
    assert not [name for name in names if name.startswith(":")]


def test_a_stream_that_reports_on_every_chunk_keeps_its_chunks() -> None:
    """Only a chunk without any choice goes."""
    reporting = stream_of(
        chunk({"content": "a"}, usage={"prompt_tokens": 5, "completion_tokens": 1})
    )
    talk = asking()
    talk.say(sh(200, SSE))
    assert delivered(talk, reporting, b"data: [DONE]\n\n") == reporting + b"data: [DONE]\n\n"


@pytest.mark.parametrize("tail", [b": ping\n\n", b"data: {", b"data: [DONE]", b"\n", b"x" * 70_000])
def test_whatever_a_stream_ends_with_is_delivered(tail: bytes) -> None:
    """Half an event that was held back goes out with the end."""
    talk = asking()
    talk.say(sh(200, SSE))
    assert delivered(talk, WITHOUT_USAGE + tail, b"") == WITHOUT_USAGE + tail


def test_comments_that_keep_a_connection_alive_are_not_held_back() -> None:
    """Also while an event is being waited for."""
    talk = asking()
    talk.say(sh(200, SSE))
    for ping in (b": ping\n\n", b":\n\n"):
        (reply,) = talk.say(sb(ping))
        assert passed_on(ping, reply) == ping


def test_a_piece_that_is_withheld_whole_is_cleared() -> None:
    """An absent body would leave the backend's."""
    talk = asking()
    talk.say(sh(200, SSE), sb(stream_of(*S_EVENTS[:3])))
    (reply,) = talk.say(sb(stream_of(S_EVENTS[3])))
    assert bytes(reply) == replies.response_body_with(b"")
    assert reply.response_body is not None
    assert reply.response_body.response is not None
    assert reply.response_body.response.body_mutation is not None
    assert reply.response_body.response.body_mutation.clear_body


def test_without_headers_the_stream_is_known_by_its_attributes() -> None:
    """In the compact configuration too."""
    talk = Conversation.begin(DIRECTORY)
    talk.say(rb(chat(stream=True), given=head_attributes()))
    given_type: dict[str, str | float] = {"response.headers['content-type']": SSE}
    (first,) = talk.say(sb(S[:300], given=given_type))
    got = passed_on(S[:300], first) + delivered(talk, S[300:], b"")
    assert got == WITHOUT_USAGE


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (
            sh(200, "application/json"),
            json.dumps({"choices": [], "usage": {"prompt_tokens": 1}}).encode(),
        ),
        (sh(200, SSE, ("content-encoding", "gzip")), gzip.compress(S)),
        (sh(500, "application/json"), b'{"error":{}}'),
        (sh(200, None), S),
    ],
    ids=["json", "compressed", "error", "no type"],
)
def test_what_is_no_plain_stream_passes_untouched(head: Message, body: bytes) -> None:
    """Even though we asked."""
    talk = asking()
    talk.say(head)
    assert delivered(talk, body[:20], body[20:]) == body


def test_who_asked_gets_the_chunk() -> None:
    """It is theirs."""
    talk = Conversation.begin(DIRECTORY)
    talk.say(post_rh(), rb(chat(stream=True, stream_options={"include_usage": True})), sh(200, SSE))
    assert delivered(talk, S) == S


def test_an_observer_withholds_nothing() -> None:
    """It changed nothing in the request either."""
    talk = Conversation.begin(DIRECTORY)
    messages = [post_rh(), rb(chat(stream=True)), sh(200, SSE), sb(S, eos=True), st()]
    assert talk.say(*(observed(message) for message in messages)) == []
    assert talk.outcome.metered is not None
    assert talk.outcome.metered.usage == Usage(26, 9)


# The response by itself


def test_a_response_that_never_began_was_not_seen() -> None:
    """No status, nothing metered; how it ended is for others to say."""
    answered = Answered(withholds_usage=True)
    assert (answered.status, answered.has_output, answered.changes_body) == (None, False, False)
    assert answered.feed(b"x", ends=True) == b"x"
    assert answered.finish() is None
    assert answered.ending(Ending.CLIENT_GONE, None) is Ending.CLIENT_GONE


def test_a_bomb_in_a_response_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets it as it is; what is not read is told."""
    monkeypatch.setattr("envoy_tokenpools.extproc.responding.MAX_DECODED_BYTES", 1_000)
    answered = Answered(withholds_usage=False)
    answered.begin(200, SSE, "gzip")
    packed = gzip.compress(WITHOUT_USAGE[:900] + b": \n\n" * 100_000)
    assert answered.feed(packed, ends=False) == packed
    assert answered.feed(packed, ends=True) == packed
    seen = answered.finish()
    assert seen is not None
    assert seen.unread >= 1
    assert seen.texts == ("Hello 你好 world",)
