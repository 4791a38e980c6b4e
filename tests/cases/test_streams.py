"""What answers of every shape are charged: exact numbers through the real gate, however the bytes are cut."""

import gzip
import json
from collections.abc import Iterable
from typing import Any

import pytest

from envoy_tokenpools.observer import Ending
from envoy_tokenpools.openai.usage import UsageSource
from tests.support.cases import ENCODINGS, FRAME, ROOMY, SSE, Filter, running
from tests.support.extproc import HI, Message, Response, chat, passed_on, sb, sh, st
from tests.support.scrapes import observed, samples, value
from tests.support.streams import S_EVENTS, S, chunk, stream_of

STREAMING = chat(stream=True, stream_options={"include_usage": True})
JSON = "application/json"


async def spoken(desk: Filter, *messages: Message, body: bytes = STREAMING) -> list[Response]:
    """Answer one request with these messages and end its stream; the replies."""
    stream = await desk.admit(body)
    replies = await stream.say(*messages)
    await stream.end()
    await desk.settled()
    return replies


def unchanged(replies: Iterable[Response]) -> bool:
    """Whether no body was changed."""
    return all(
        reply.response_body is None
        or reply.response_body.response is None
        or reply.response_body.response.body_mutation is None
        for reply in replies
    )


@pytest.mark.parametrize("model", ["c", "o"])
@pytest.mark.parametrize(
    ("deltas", "tokens"),
    [
        (["Hello world, how are you today?"], 8),
        (["1", "2", "3", "4", "5", "6"], 2),
        (["Hel", "lo", " wor", "ld"], 2),
        (["", "", ""], 0),
    ],
)
async def test_events_are_not_tokens(model: str, deltas: list[str], tokens: int) -> None:
    """Case 21: without a report the joined text is charged, as counted."""
    events = [chunk({"role": "assistant"}), *(chunk({"content": delta}) for delta in deltas)]
    async with running(ROOMY) as desk:
        stream = await desk.admit(chat(stream=True, model=model))
        await desk.answer(stream, *(stream_of(event) for event in events), b"data: [DONE]\n\n")
        assert desk.charged == (1 + FRAME, tokens)
        assert desk.last_settled.completion_source is UsageSource.COUNTED
        await desk.at_rest()


async def test_usage_is_found_wherever_a_stream_is_cut() -> None:
    """Case 22: cut at every offset, byte by byte and whole: 26 and 9, one settlement, and the client's bytes are S."""
    cuts = [[S[:at], S[at:]] for at in range(len(S) + 1)]
    cuts += [[S], [S[at : at + 1] for at in range(len(S))]]
    assert len(S) == 643
    assert S[558:565] == b'"usage"'
    assert S[629:] == b"data: [DONE]\n\n"
    async with running(ROOMY) as desk:
        for number, pieces in enumerate(cuts, start=1):
            stream = await desk.admit(STREAMING)
            replies = await desk.answer(stream, *pieces)
            assert unchanged(replies)
            assert desk.charged == (26, 9)
            assert len(desk.observer.settlements) == number
        await desk.at_rest()


NOISE = [b": OPENROUTER PROCESSING\n\n", b"id: 7\n: ping\n\n", b"event: ping\ndata:\n\n", b":\n"]


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("asks", [True, False])
async def test_keep_alives_are_neither_data_nor_an_end(noise: bytes, *, asks: bool) -> None:
    """Case 25: between any two events, cut in the middle too, forwarded untouched, and never the first token."""
    events = [b"data: " + event.encode() + b"\n\n" for event in S_EVENTS]
    usage = next(event for event in events if b'"usage"' in event)
    body = noise + noise.join(events) + noise
    half = len(noise) // 2
    async with running(ROOMY) as desk:
        stream = await desk.admit(STREAMING if asks else chat(stream=True))
        pieces = [noise[:half], noise[half:], body[len(noise) :]]
        await stream.say(sh(200, SSE))
        passed = [passed_on(piece, *await stream.say(sb(piece))) for piece in pieces[:2]]
        assert desk.observer.first_tokens == []
        passed.append(passed_on(pieces[2], *await stream.say(sb(pieces[2]))))
        passed.append(passed_on(b"", *await stream.say(sb(eos=True))))
        await stream.end()
        await desk.settled()
        assert b"".join(passed) == (body if asks else body.replace(usage, b""))
        assert desk.charged == (26, 9)
        assert len(desk.observer.first_tokens) == 1
        assert desk.last_settled.ending is Ending.COMPLETED
        await desk.at_rest()


async def test_usage_in_an_unterminated_last_event_counts() -> None:
    """Case 25: the stream ends right behind the usage object, without a line ending."""
    end = S.index(b"}}\n") + 2
    async with running(ROOMY) as desk:
        await spoken(desk, sh(200, SSE), sb(S[:end]), sb(eos=True))
        assert desk.charged == (26, 9)
        await desk.at_rest()


ANSWER: dict[str, Any] = {
    "id": "x",
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world"},
            "finish_reason": "stop",
        }
    ],
}
USED = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}


@pytest.mark.parametrize(
    ("answer", "charged"), [(ANSWER | {"usage": USED}, (5, 7)), (ANSWER, (1 + FRAME, 2))]
)
async def test_a_plain_answer_is_read_whole(
    answer: dict[str, Any], charged: tuple[int, int]
) -> None:
    """Case 26: cut at every offset, its end in an empty message; without usage its content is counted."""
    data = json.dumps(answer).encode()
    async with running(ROOMY) as desk:
        for at in range(len(data) + 1):
            stream = await desk.admit(HI)
            replies = await desk.answer(stream, data[:at], data[at:], content_type=JSON)
            assert unchanged(replies)
            assert desk.charged == charged
        await desk.at_rest()


@pytest.mark.parametrize(
    ("body", "content_type", "data", "charged"),
    [
        (HI, "text/event-stream; charset=utf-8", S, (26, 9)),
        (STREAMING, JSON, json.dumps(ANSWER | {"usage": USED}).encode(), (5, 7)),
    ],
)
async def test_the_answers_own_type_decides(
    body: bytes, content_type: str, data: bytes, charged: tuple[int, int]
) -> None:
    """Case 26: a stream is a stream and JSON is JSON, whatever was asked for."""
    async with running(ROOMY) as desk:
        await spoken(desk, sh(200, content_type), sb(data), sb(eos=True), body=body)
        assert desk.charged == charged
        await desk.at_rest()


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_a_compressed_stream_is_read_and_passed_on_as_it_is(encoding: str) -> None:
    """Case 27: usage is found at every cut, and neither bytes nor header are touched."""
    packed = ENCODINGS[encoding](S)
    async with running(ROOMY) as desk:
        for at in range(len(packed) + 1):
            head, *bodies = await spoken(
                desk,
                sh(200, SSE, ("content-encoding", encoding)),
                sb(packed[:at]),
                sb(packed[at:]),
                sb(eos=True),
            )
            assert unchanged(bodies)
            assert head.response_headers is not None
            assert head.response_headers.response is not None
            assert head.response_headers.response.header_mutation is not None
            assert head.response_headers.response.header_mutation.remove_headers == []
            assert desk.charged == (26, 9)
        await desk.at_rest()


async def test_a_compressed_error_is_charged_nothing_and_an_unreadable_answer_its_reservation() -> (
    None
):
    """Case 27: never 0 for what cannot be decoded; `source="estimated"` tells of it."""
    async with running(ROOMY) as desk:
        error = gzip.compress(b'{"error":{"message":"out of memory"}}')
        encoded = ("content-encoding", "gzip")
        replies = await spoken(desk, sh(500, JSON, encoded), sb(error, eos=True))
        assert unchanged(replies)
        assert (desk.charged, desk.last_settled.ending) == ((0, 0), Ending.BACKEND_ERROR)
        unknown = ("content-encoding", "aws-chunked")
        for head, data in ((unknown, S), (encoded, b"\x1f\x8b" + b"\xff" * 100)):
            await spoken(desk, sh(200, SSE, head), sb(data, eos=True))
            assert desk.charged == (1 + FRAME, 256)
            assert desk.last_settled.completion_source is UsageSource.ESTIMATED
        metrics = samples(observed(*desk.observer.settlements))
        name = "tokenpools_tokens_total"
        labels = {"pool": "o", "entitlement": "a", "kind": "completion", "source": "estimated"}
        assert value(metrics, name, **labels) == 2 * 256
        await desk.at_rest()


@pytest.mark.parametrize("tail", [[], [b"data: [DONE]\n\n"], [b"data: [DONE]\n\n", b"\xffmore"]])
async def test_a_request_is_settled_once(tail: list[bytes]) -> None:
    """Case 30: usage before the end, the end, trailers, EOF and a late CANCEL: 35 tokens, once."""
    async with running(ROOMY) as desk:
        stream = await desk.admit(STREAMING)
        await stream.say(sh(200, SSE), sb(S), *map(sb, tail), sb(eos=True), st())
        await stream.end()
        await stream.cancel()
        await desk.settled()
        (settled,) = desk.observer.settlements
        assert (settled.prompt_tokens, settled.completion_tokens) == (26, 9)
        metrics = samples(observed(*desk.observer.decisions, settled))
        charged = [
            count
            for (name, labels), count in metrics.items()
            if name == "tokenpools_tokens_total" and ("source", "reported") in labels
        ]
        assert sum(charged) == 35
        endings = {"pool": "o", "entitlement": "a", "ending": "completed"}
        assert value(metrics, "tokenpools_completions_total", **endings) == 1
        await desk.at_rest()


def silent(reasoning: str) -> list[dict[str, Any]]:
    """Every place filled with null where a report or a text could be, and all kinds of text."""
    delta = {"role": "assistant", "content": None}
    first = {"choices": [{"index": 0, "delta": delta, "finish_reason": ""}], "usage": None}
    calls = [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather"}},
        {"index": 0, "function": {"arguments": '{"city":'}},
        {"index": 0, "function": {"arguments": '"Paris"}'}},
    ]
    return [
        first,
        chunk({reasoning: "Let me think step by step."}, usage=None),
        chunk({"content": "The answer is 4."}, usage=None),
        *(chunk({"tool_calls": [call]}, usage=None) for call in calls),
        {"choices": None, "usage": None},
        {"choices": [{"index": 0, "delta": None}], "usage": {}},
        {"choices": [None], "usage": None},
    ]


@pytest.mark.parametrize("model", ["c", "o"])
@pytest.mark.parametrize("reasoning", ["reasoning_content", "reasoning"])
async def test_reasoning_and_tool_calls_are_charged_where_usage_is_null(
    model: str, reasoning: str
) -> None:
    """Case 32: 7 of reasoning, 6 of content, 2 of a name and 5 of arguments are 20; the prompt is our estimate."""
    body = chat(stream=True, stream_options={"include_usage": True}, model=model)
    async with running(ROOMY) as desk:
        stream = await desk.admit(body)
        await desk.answer(stream, *map(stream_of, silent(reasoning)), b"data: [DONE]\n\n")
        assert desk.charged == (1 + FRAME, 20)
        await desk.at_rest()


RESPONSES_END: dict[str, Any] = {
    "type": "response.completed",
    "response": {"usage": {"input_tokens": 31, "output_tokens": 3, "total_tokens": 34}},
}
MESSAGE_START: dict[str, Any] = {
    "type": "message_start",
    "message": {"usage": {"input_tokens": 10, "output_tokens": 1}},
}
TEXT_DELTA: dict[str, Any] = {
    "type": "content_block_delta",
    "index": 0,
    "delta": {"type": "text_delta", "text": "Hello"},
}
MESSAGE_DELTA: dict[str, Any] = {"type": "message_delta", "usage": {"output_tokens": 5}}


@pytest.mark.parametrize(
    ("path", "body", "events", "charged"),
    [
        ("/v1/responses", {"input": "hi"}, [RESPONSES_END], (31, 3)),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
            [MESSAGE_START, TEXT_DELTA, MESSAGE_DELTA, {"type": "message_stop"}],
            (10, 5),
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
            [MESSAGE_START, MESSAGE_DELTA],
            (10, 5),
        ),
    ],
)
async def test_other_dialects_report_elsewhere(
    path: str, body: dict[str, Any], events: list[dict[str, Any]], charged: tuple[int, int]
) -> None:
    """Case 34: usage nested in a response, and usage split over the start and the end of a message."""
    data = b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json.dumps(event).encode())
        for event in events
    )
    async with running(ROOMY) as desk:
        for at in (0, len(data) // 2, len(data)):
            stream = await desk.admit(
                json.dumps({"model": "m", "stream": True, **body}).encode(), path
            )
            replies = await desk.answer(stream, data[:at], data[at:])
            assert unchanged(replies)
            assert desk.charged == charged
            assert desk.last_settled.completion_source is UsageSource.REPORTED
        await desk.at_rest()
