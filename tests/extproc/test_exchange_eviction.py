"""A lease that is taken back: what its client hears, what is charged, and that nothing follows."""

import pytest

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.extproc.wire import parse_request
from envoy_tokenpools.gate.directory import Directory
from envoy_tokenpools.observer import Decided, Ending, Outcome
from tests.support.extproc import (
    Conversation,
    Message,
    chat,
    immediate_of,
    observed,
    post_rh,
    rb,
    sb,
    sh,
    st,
)
from tests.support.streams import S_EVENTS, S, stream_of

SSE = "text/event-stream"
HALF = stream_of(*S_EVENTS[:2])
LATE: list[Message] = [sh(200, SSE), sb(S), sb(eos=True), st()]


def admitted(directory: Directory) -> Conversation:
    """A request that was let through."""
    talk = Conversation.begin(directory)
    talk.say(post_rh(), rb(chat(stream=True)))
    return talk


def say_nothing_more(talk: Conversation) -> None:
    """Whatever comes after an eviction is not answered, and the end settles nothing."""
    for message in LATE:
        assert talk.exchange.receive(parse_request(bytes(message)), 0) == ()
    assert talk.evict() == []
    talk.end()
    assert len(talk.settled) == 1


def test_before_the_answer_the_client_gets_a_429(directory: Directory) -> None:
    """With the reason and when to come back; nothing was delivered."""
    talk = admitted(directory)
    (reply,) = talk.evict()
    status, headers, body = immediate_of(reply)
    assert status == 429
    assert headers["x-tokenpools-reason"] == "evicted"
    assert 1_000 <= int(headers["retry-after-ms"]) <= 1_250
    assert body["error"]["code"] == "rate_limit_exceeded"
    assert not talk.was_aborted
    assert (talk.outcome.ending, talk.outcome.status) == (Ending.EVICTED, None)
    say_nothing_more(talk)


@pytest.mark.parametrize("seen", [[], [sb(HALF)]])
def test_once_the_answer_has_begun_it_is_broken_off(
    directory: Directory, seen: list[Message]
) -> None:
    """What was delivered is settled."""
    talk = admitted(directory)
    talk.say(sh(200, SSE), *seen)
    assert talk.evict() == []
    assert talk.was_aborted
    assert (talk.outcome.ending, talk.outcome.status) == (Ending.EVICTED, 200)
    assert talk.outcome.metered is not None
    assert bool(talk.outcome.metered.texts) == bool(seen)
    say_nothing_more(talk)


def test_an_eviction_is_told_once(directory: Directory) -> None:
    """As a decision of its own, beside that of its admission."""
    talk = admitted(directory)
    talk.evict()
    talk.evict()
    assert talk.decisions == [
        Decided(
            Outcome.EVICTED,
            reason="evicted",
            pool="pool",
            entitlement="a",
            service_class=ServiceClass.ELASTIC,
        )
    ]


def test_a_request_that_has_ended_is_not_evicted(directory: Directory) -> None:
    """It gives its lease back by itself."""
    talk = admitted(directory)
    talk.say(sh(200, SSE), sb(S, eos=True))
    assert talk.evict() == []
    assert not talk.was_aborted
    assert talk.outcome.ending is Ending.COMPLETED
    talk.end()
    assert len(talk.settled) == 1


@pytest.mark.parametrize("said", [[], [post_rh()]])
def test_a_request_that_holds_nothing_is_not_evicted(
    directory: Directory, said: list[Message]
) -> None:
    """Before it was admitted there is nothing to give back."""
    talk = Conversation.begin(directory)
    talk.say(*said)
    assert talk.evict() == []
    talk.say(*([] if said else [post_rh()]), rb(chat()))
    assert talk.admissions == 1


def test_observed_only_nothing_is_said(directory: Directory) -> None:
    """Envoy takes no answer there: the request goes on, and holds its lease to its end."""
    talk = Conversation.begin(directory)
    talk.say(observed(post_rh()), observed(rb(chat())))
    assert talk.evict() == []
    assert (talk.was_aborted, talk.settled) == (False, [])
    talk.end()
    assert talk.outcome.ending is Ending.CLIENT_GONE
