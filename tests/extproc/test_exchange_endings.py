"""How an admitted request ends: by what was seen, and once."""

import gzip
import json

import pytest

from envoy_tokenpools.extproc import replies
from envoy_tokenpools.gate.directory import Directory
from envoy_tokenpools.observer import Ending
from envoy_tokenpools.openai.usage import MAX_BODY_BYTES, Usage
from tests.support.extproc import Conversation, Message, chat, post_rh, rb, sb, sh, st
from tests.support.streams import S_EVENTS, S, chunk, stream_of

SSE = "text/event-stream"
ANSWER = b'{"choices":[{"index":0,"message":{"content":"Hello"},"finish_reason":"stop"}]}'
ERROR = b'{"error":{"message":"boom","type":"server_error","code":500}}'
SOUND = b"\xff\xfb\x90\x00" * 50
UNFINISHED = stream_of(*S_EVENTS[:2])
SILENT = stream_of(*S_EVENTS[:3])


def admitted(directory: Directory, *, stream: bool = True) -> Conversation:
    """A request that was let through."""
    talk = Conversation.begin(directory)
    talk.say(post_rh(), rb(chat(stream=stream)))
    assert talk.admissions == 1
    return talk


@pytest.mark.parametrize(
    ("messages", "ending", "status"),
    [
        ([sh(200, SSE), sb(S), sb(eos=True)], Ending.COMPLETED, 200),
        ([sh(), sb(ANSWER, eos=True)], Ending.COMPLETED, 200),
        ([sh(), sb(ANSWER), st()], Ending.COMPLETED, 200),
        ([sh(200, SSE), sb(S)], Ending.COMPLETED, 200),
        ([sh(200, SSE), sb(SILENT)], Ending.COMPLETED, 200),
        ([], Ending.CLIENT_GONE, None),
        ([sh(200, SSE)], Ending.CLIENT_GONE, 200),
        ([sh(200, SSE), sb(UNFINISHED)], Ending.CLIENT_GONE, 200),
        ([sh(200, SSE), sb(UNFINISHED[:-20])], Ending.CLIENT_GONE, 200),
        ([sh(), sb(ANSWER[:30])], Ending.CLIENT_GONE, 200),
        ([sh(200, SSE), sb(UNFINISHED, eos=True)], Ending.TRUNCATED, 200),
        ([sh(200, SSE), sb(UNFINISHED), st()], Ending.TRUNCATED, 200),
        ([sh(200, SSE, eos=True)], Ending.TRUNCATED, 200),
        ([sh(200), sb(ANSWER[:30], eos=True)], Ending.TRUNCATED, 200),
        ([sh(500), sb(ERROR, eos=True)], Ending.BACKEND_ERROR, 500),
        ([sh(503, "text/plain"), sb(b"no healthy upstream", eos=True)], Ending.BACKEND_ERROR, 503),
        ([sh(504, None, eos=True)], Ending.BACKEND_ERROR, 504),
        ([sh(400), sb(ERROR, eos=True)], Ending.BACKEND_ERROR, 400),
        ([sh(429), sb(ERROR, eos=True)], Ending.BACKEND_ERROR, 429),
        ([sh(500)], Ending.BACKEND_ERROR, 500),
        (
            [sh(200, SSE), sb(UNFINISHED), sb(b"data: " + ERROR + b"\n\n", eos=True)],
            Ending.BACKEND_ERROR,
            200,
        ),
        ([sh(200, SSE), sb(UNFINISHED + b"data: " + ERROR + b"\n\n")], Ending.BACKEND_ERROR, 200),
        ([sh(200), sb(ERROR, eos=True)], Ending.BACKEND_ERROR, 200),
        ([sh("weird"), sb(ANSWER, eos=True)], Ending.COMPLETED, 0),
        ([sh("", None), sb(ANSWER, eos=True)], Ending.COMPLETED, 0),
        ([sh(200, None), sb(ANSWER, eos=True)], Ending.COMPLETED, 200),
        ([sh(200), sb(b'{"result":"Hello"}', eos=True)], Ending.COMPLETED, 200),
        ([sh(200, "audio/mpeg"), sb(SOUND), sb(SOUND, eos=True)], Ending.COMPLETED, 200),
        ([sh(200, "audio/mpeg"), sb(SOUND), st()], Ending.COMPLETED, 200),
        ([sh(200, "audio/mpeg"), sb(SOUND)], Ending.CLIENT_GONE, 200),
        ([sh(200, "text/plain; charset=utf-8"), sb(b"Hello", eos=True)], Ending.COMPLETED, 200),
        ([sh(200, "text/plain"), sb(b"Hello")], Ending.CLIENT_GONE, 200),
        ([sh(200, "Application/JSON"), sb(ANSWER[:30], eos=True)], Ending.TRUNCATED, 200),
        ([sh(200, "application/vnd.x+json"), sb(b"{", eos=True)], Ending.TRUNCATED, 200),
    ],
)
def test_what_was_seen_names_the_ending(
    directory: Directory, messages: list[Message], ending: Ending, status: int | None
) -> None:
    """However the gRPC stream was closed: a good end often looks like a cancellation."""
    talk = admitted(directory)
    talk.say(*messages)
    talk.end()
    assert (talk.outcome.ending, talk.outcome.status) == (ending, status)


@pytest.mark.parametrize(
    ("length", "ending"),
    [(MAX_BODY_BYTES, Ending.TRUNCATED), (MAX_BODY_BYTES + 1, Ending.COMPLETED)],
)
def test_json_that_is_too_large_to_read_is_not_called_cut(
    directory: Directory, length: int, ending: Ending
) -> None:
    """A long list of embeddings ended as it should; of what was read one can tell that it did not."""
    talk = admitted(directory, stream=False)
    body = b'{"data":[' + b"0," * (length // 2)
    talk.say(sh(), sb(body[: length - 1]), sb(body[length - 1 : length], eos=True))
    assert talk.outcome.ending is ending
    assert talk.outcome.metered is not None
    assert talk.outcome.metered.unread == 1


@pytest.mark.parametrize(
    ("messages", "ending"),
    [
        ([], Ending.TRUNCATED),
        ([sh(200, SSE), sb(UNFINISHED)], Ending.TRUNCATED),
        ([sh(200, SSE), sb(SILENT)], Ending.COMPLETED),
        ([sh(500)], Ending.BACKEND_ERROR),
        ([sh(200, SSE), sb(S, eos=True)], Ending.COMPLETED),
    ],
)
def test_a_stream_that_we_end_was_cut_by_us(
    directory: Directory, messages: list[Message], ending: Ending
) -> None:
    """At shutdown, unless it had ended by itself."""
    talk = admitted(directory)
    talk.say(*messages)
    talk.end(shutting_down=True)
    assert talk.outcome.ending is ending


def test_everything_after_the_end_settles_nothing(directory: Directory) -> None:
    """Usage before the end, the end, `[DONE]` again, bytes, trailers, cancellation: one settlement."""
    talk = admitted(directory)
    talk.say(sh(200, SSE), sb(S), sb(eos=True))
    talk.say(sb(b"data: [DONE]\n\n"), sb(b"more"), sb(eos=True), st(), sh(500, eos=True), st())
    talk.end()
    talk.end(shutting_down=True)
    assert talk.outcome.ending is Ending.COMPLETED
    assert talk.outcome.metered is not None
    assert talk.outcome.metered.usage == Usage(26, 9)


def test_done_twice_before_the_end_is_done_once(directory: Directory) -> None:
    """What follows the first is not read."""
    again = stream_of(chunk({"content": "more and more"}), "[DONE]")
    talk = admitted(directory)
    talk.say(sh(200, SSE), sb(S), sb(again), sb(b"\xff"), sb(eos=True))
    assert talk.outcome.metered is not None
    assert talk.outcome.metered.usage == Usage(26, 9)


@pytest.mark.parametrize("steps", range(7))
def test_a_cancellation_at_any_point_settles_what_was_admitted(
    directory: Directory, steps: int
) -> None:
    """With what was delivered by then: nothing before the body, the text that went through after it."""
    start, first = S.index(b"Hello"), S.index(b" world")
    sequence = [
        post_rh(),
        rb(chat(stream=True)),
        sh(200, SSE),
        sb(S[: start + 3]),
        sb(S[start + 3 : first]),
        sb(S[first:]),
    ]
    talk = Conversation.begin(directory)
    talk.say(*sequence[:steps])
    talk.end()
    assert len(talk.settled) == talk.admissions == (steps >= 2)
    if steps in (3, 4):
        assert talk.outcome.metered is not None
        assert talk.outcome.metered.texts == ()
    if steps == 5:
        assert talk.outcome.metered is not None
        assert (talk.outcome.metered.texts, talk.outcome.metered.usage) == (("Hello 你好",), None)
    if steps == 6:
        assert talk.outcome.ending is Ending.COMPLETED


@pytest.mark.parametrize("encoding", ["compress", "aws-chunked", "gzip, gzip, gzip", "x"])
def test_an_answer_in_an_unknown_encoding_ends_unread(directory: Directory, encoding: str) -> None:
    """It is no text, and is told as unreadable; the client gets it as it is."""
    talk = admitted(directory)
    _, body, _ = talk.say(sh(200, SSE, ("content-encoding", encoding)), sb(b"\x1f"), sb(eos=True))
    assert bytes(body) == replies.CONTINUE_RESPONSE_BODY
    assert (talk.outcome.ending, talk.outcome.metered) == (Ending.COMPLETED, None)
    assert talk.first_tokens == []


def test_an_unreadable_answer_that_is_left_is_a_client_gone(directory: Directory) -> None:
    """Unread is not finished."""
    talk = admitted(directory)
    talk.say(sh(200, SSE, ("content-encoding", "compress")), sb(b"\x1f\x9d"))
    talk.end()
    assert (talk.outcome.ending, talk.outcome.metered) == (Ending.CLIENT_GONE, None)


@pytest.mark.parametrize("cut", [0, 1, 10, 100, 200])
def test_a_compressed_answer_is_read_and_passed_on_compressed(
    directory: Directory, cut: int
) -> None:
    """However it is cut: the client gets the very bytes that the backend sent."""
    talk = admitted(directory)
    packed = gzip.compress(S)
    headers, *bodies = talk.say(
        sh(200, SSE, ("content-encoding", " GZIP ")), sb(packed[:cut]), sb(packed[cut:], eos=True)
    )
    assert {bytes(body) for body in bodies} == {replies.CONTINUE_RESPONSE_BODY}
    assert headers.response_headers is not None
    assert headers.response_headers.response is not None
    assert headers.response_headers.response.header_mutation is not None
    assert headers.response_headers.response.header_mutation.remove_headers == []
    assert talk.outcome.ending is Ending.COMPLETED
    assert talk.outcome.metered is not None
    assert talk.outcome.metered.usage == Usage(26, 9)


def test_a_compressed_answer_that_breaks_off_is_read_up_to_there(directory: Directory) -> None:
    """What does not decode is told as unread, beside what did."""
    talk = admitted(directory)
    packed = gzip.compress(UNFINISHED)
    talk.say(sh(200, SSE, ("content-encoding", "gzip")), sb(packed[:-8]), sb(b"\xff" * 8, eos=True))
    assert talk.outcome.metered is not None
    assert talk.outcome.metered.texts == ("Hello 你好",)
    assert talk.outcome.metered.unread == 1


def test_an_encoding_that_changes_nothing_is_read(directory: Directory) -> None:
    """`identity` again."""
    talk = admitted(directory)
    talk.say(sh(200, SSE, ("content-encoding", "identity")), sb(S, eos=True))
    assert talk.outcome.metered is not None


def test_an_answer_in_json_to_a_request_for_a_stream(directory: Directory) -> None:
    """The response's own type decides."""
    talk = admitted(directory)
    body = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}
    talk.say(sh(200, "application/json"), sb(json.dumps(body).encode(), eos=True))
    assert talk.outcome.metered is not None
    assert talk.outcome.metered.usage == Usage(5, 7)


def test_a_stream_to_a_request_for_json(directory: Directory) -> None:
    """And the other way round."""
    talk = admitted(directory, stream=False)
    talk.say(sh(200, SSE), sb(S, eos=True))
    assert talk.outcome.metered is not None
    assert talk.outcome.metered.usage == Usage(26, 9)


def test_the_end_of_an_exchange_that_said_nothing(directory: Directory) -> None:
    """A stream that Envoy opens and closes."""
    talk = Conversation.begin(directory)
    talk.end()
    assert (talk.settled, talk.told) == ([], [])
