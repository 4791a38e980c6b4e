"""What is changed in a request on its way to the backend, and what is not."""

import gc
import gzip
import json
import types
from dataclasses import replace

import pytest

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.extproc.requesting import ADMIT_BODY, STRIPPED_HEADERS
from envoy_tokenpools.gate.directory import Directory
from envoy_tokenpools.gate.order import fingerprint_of
from tests.support.extproc import (
    CHAT,
    HI,
    BodyMode,
    Conversation,
    Response,
    chat,
    head_attributes,
    observed,
    post_rh,
    rb,
    request_change,
    rt,
    with_protocol,
)
from tests.support.gate import configured
from tests.support.pools import amount, entitlement, pool

SILENT = chat(stream=True)
ASKING = json.dumps(json.loads(SILENT) | {"stream_options": {"include_usage": True}})


def reply_to(directory: Directory, body: bytes, path: str = CHAT, encoding: str = "") -> Response:
    """The reply to a buffered body that is admitted."""
    talk = Conversation.begin(directory)
    more = [("content-encoding", encoding)] if encoding else []
    head = with_protocol(post_rh(path, *more), BodyMode.BUFFERED, BodyMode.STREAMED)
    _, reply = talk.say(head, rb(body))
    assert talk.admissions == 1
    return reply


# Usage that is asked for in the client's stead


def test_a_silent_stream_asks_for_usage(directory: Directory) -> None:
    """Its body gets one member more and the length that goes with it; no compressed answer is asked for."""
    body, headers, removed = request_change(reply_to(directory, SILENT))
    assert body is not None
    assert json.loads(body) == json.loads(ASKING)
    assert headers == {"content-length": b"%d" % len(body)}
    assert set(removed) == {*STRIPPED_HEADERS, "content-encoding", "accept-encoding"}


def test_the_change_is_counted_as_what_was_sent(directory: Directory) -> None:
    """The fingerprint is that of the client's body, so that its retry is known again."""
    talk = Conversation.begin(directory)
    talk.say(post_rh(), rb(SILENT))
    assert talk.orders[0].fingerprint == fingerprint_of(SILENT)


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True, "stream_options": {"include_usage": False}},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {}},
        {"stream": True, "stream_options": None},
        {"stream": False},
        {},
    ],
)
def test_who_has_had_a_say_or_does_not_stream_is_left_alone(
    directory: Directory, fields: dict[str, object]
) -> None:
    """Byte for byte: strict clients break on a chunk that they declined, and backends on options without a stream."""
    assert bytes(reply_to(directory, chat(**fields))) == ADMIT_BODY


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"model": "m", "input": "hi", "stream": True}),
        (
            "/v1/messages",
            {
                "model": "m",
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 4,
                "stream": True,
            },
        ),
    ],
)
def test_dialects_that_report_by_themselves_are_left_alone(
    directory: Directory, path: str, body: dict[str, object]
) -> None:
    """They know no such option."""
    assert bytes(reply_to(directory, json.dumps(body).encode(), path)) == ADMIT_BODY


def test_a_pool_may_be_told_not_to_ask() -> None:
    """`inject_usage: false` leaves every body as it is."""
    quiet = replace(pool(amount(), entitlement("a", ServiceClass.SPOT)), inject_usage=False)
    assert bytes(reply_to(Directory(configured(quiet)), SILENT)) == ADMIT_BODY


def test_an_encoded_body_is_not_touched_for_usage(directory: Directory) -> None:
    """It goes on as it came."""
    assert bytes(reply_to(directory, gzip.compress(SILENT), encoding="gzip")) == ADMIT_BODY


# Ranks that clients give themselves


def test_a_client_cannot_rank_itself(directory: Directory) -> None:
    """VLLM's `priority` goes, with the length that goes with it; the same name further inside stays."""
    own = chat("priority", metadata={"priority": 7})
    ranked = own[:-1] + b', "priority": -10}'
    body, headers, _ = request_change(reply_to(directory, ranked))
    assert body == own
    assert headers == {"content-length": b"%d" % len(own)}
    assert bytes(reply_to(directory, own)) == ADMIT_BODY


def test_a_rank_in_disguise_goes_too(directory: Directory) -> None:
    """However its name is escaped."""
    ranked = HI[:-1] + rb', "pr\u0069ority" : -10}'
    body, _, _ = request_change(reply_to(directory, ranked))
    assert body is not None
    assert json.loads(body) == json.loads(HI)


def test_a_rank_in_an_encoded_body_goes_and_the_body_goes_on_decoded(directory: Directory) -> None:
    """It had to be touched."""
    ranked = HI[:-1] + b', "priority": -10}'
    body, headers, removed = request_change(
        reply_to(directory, gzip.compress(ranked), encoding="gzip")
    )
    assert body is not None
    assert json.loads(body) == json.loads(HI)
    assert headers == {"content-length": b"%d" % len(body)}
    assert "content-encoding" in removed


def test_headers_by_which_a_client_would_rank_itself_are_removed_always(
    directory: Directory,
) -> None:
    """From requests that are not changed otherwise too."""
    for body in (HI, SILENT):
        _, _, removed = request_change(reply_to(directory, body))
        assert set(STRIPPED_HEADERS) <= set(removed)


def test_both_changes_at_once(directory: Directory) -> None:
    """A silent stream with a rank."""
    body, _, _ = request_change(reply_to(directory, SILENT[:-1] + b',"priority":1}'))
    assert body is not None
    assert json.loads(body) == json.loads(ASKING)


# Where a change is possible


def test_without_headers_no_length_is_set(directory: Directory) -> None:
    """Envoy sends a body of its own length then."""
    talk = Conversation.begin(directory)
    (reply,) = talk.say(rb(SILENT, given=head_attributes()))
    body, headers, _ = request_change(reply)
    assert body is not None
    assert headers == {}


def test_a_streamed_body_is_never_changed(directory: Directory) -> None:
    """Its headers, and the length in them, have gone on before it."""
    ranked = SILENT[:-1] + b',"priority":1}'
    talk = Conversation.begin(directory)
    head = with_protocol(post_rh(), BodyMode.STREAMED, BodyMode.STREAMED)
    _, reply = talk.say(head, rb(ranked))
    assert talk.admissions == 1
    assert request_change(reply)[0] is None


def test_a_body_in_pieces_is_never_changed(directory: Directory) -> None:
    """The first ones have gone on, and only the last could be replaced."""
    talk = Conversation.begin(directory)
    *_, reply = talk.say(post_rh(), rb(SILENT[:30], eos=False), rb(SILENT[30:]))
    assert talk.admissions == 1
    assert request_change(reply)[0] is None


def test_a_body_that_trailers_ended_is_never_changed(directory: Directory) -> None:
    """A reply to trailers can change nothing before them."""
    talk = Conversation.begin(directory)
    *_, reply = talk.say(post_rh(), rb(SILENT, eos=False), rt())
    assert talk.admissions == 1
    assert reply.request_trailers is not None
    assert reply.request_trailers.header_mutation is None


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"priority": 1}])
def test_nothing_of_a_prompt_is_kept_while_it_is_answered(
    directory: Directory, fields: dict[str, object]
) -> None:
    """Answers take minutes, there are thousands at a time, and a prompt may have megabytes."""
    prompt = "word " * 20_000
    talk = Conversation.begin(directory)
    talk.say(post_rh(), rb(chat(prompt, **fields)))
    talk.orders.clear()
    assert talk.admissions == 1
    assert [held for held in reachable(talk.exchange) if len(held) > 10_000] == []


def reachable(root: object) -> list[bytes | str]:
    """Every text and every string of bytes that an object holds, however deep."""
    found: list[bytes | str] = []
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (type, types.ModuleType, types.FunctionType)):
            continue
        seen.add(id(one))
        if isinstance(one, (bytes, str)):
            found.append(one)
        waiting.extend(gc.get_referents(one))
    return found


def test_an_observer_changes_nothing(directory: Directory) -> None:
    """It says nothing at all."""
    talk = Conversation.begin(directory)
    assert talk.say(observed(post_rh()), observed(rb(SILENT))) == []
    assert talk.admissions == 1
