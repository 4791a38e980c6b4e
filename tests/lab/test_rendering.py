"""Answers have the shapes that vLLM 0.32 was recorded to send."""

from typing import Any

import msgspec
import pytest

from envoy_tokenpools.lab.dialect import Api, Offer, Question, understand
from envoy_tokenpools.lab.rendering import DONE, Rendering

OFFER = Offer(models=("tiny",))

# Recorded from vLLM 0.32.0 (ids and times shortened, fields that are always null left out).
RECORDED_ROLE = (
    '{"id":"chatcmpl-9","object":"chat.completion.chunk","created":1,"model":"tiny","choices":'
    '[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
    '"finish_reason":null}]}'
)
RECORDED_LAST = (
    '{"id":"chatcmpl-9","object":"chat.completion.chunk","created":1,"model":"tiny","choices":'
    '[{"index":0,"delta":{"content":"Com"},"logprobs":null,"finish_reason":"length",'
    '"stop_reason":null}]}'
)
RECORDED_EOS = (
    '{"id":"chatcmpl-9","object":"chat.completion.chunk","created":1,"model":"tiny","choices":'
    '[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}'
)
RECORDED_USAGE = (
    '{"id":"chatcmpl-9","object":"chat.completion.chunk","created":1,"model":"tiny",'
    '"choices":[],"usage":{"prompt_tokens":7,"total_tokens":12,"completion_tokens":5},'
    '"system_fingerprint":"vllm"}'
)
RECORDED_TEXT = (
    '{"id":"cmpl-9","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,'
    '"text":"panic","logprobs":null,"finish_reason":null,"stop_reason":null}]}'
)


def rendered(api: Api, *, usage: bool = True, **body: object) -> tuple[Question, Rendering]:
    """The rendering of a body that is served."""
    question = understand(api, msgspec.json.encode(body), OFFER)
    assert isinstance(question, Question), question
    return question, Rendering(question, 9, 1, usage=usage)


def chat(*, usage: bool = True, **fields: object) -> tuple[Question, Rendering]:
    """The rendering of a short chat stream."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "stream": True, "max_tokens": 2} | fields
    return rendered(Api.CHAT, usage=usage, **body)


def events(raw: bytes) -> list[Any]:
    """The JSON of each event."""
    assert raw.endswith(b"\n\n") or not raw
    lines = [line for line in raw.split(b"\n") if line.startswith(b"data: {")]
    return [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines]


def shape(value: Any) -> Any:
    """Names and types of a JSON value, without its values."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value]
    return type(value).__name__


def test_chat_chunks_have_the_recorded_shapes() -> None:
    """Role chunk, last chunk, end token and usage chunk, field by field and in their order."""
    question, answer = chat(stream_options={"include_usage": True})
    (role,) = events(answer.opening())
    (last,) = events(answer.piece(question.replies[0], 2))
    (usage,) = events(answer.closing())
    ended, stopped = chat(max_tokens=None)
    (eos,) = events(stopped.piece(ended.replies[0], ended.replies[0].output_tokens))
    for ours, recorded in (
        (role, RECORDED_ROLE),
        (last, RECORDED_LAST),
        (usage, RECORDED_USAGE),
        (eos, RECORDED_EOS),
    ):
        assert shape(ours) == shape(msgspec.json.decode(recorded))
        assert list(ours) == list(msgspec.json.decode(recorded))
    assert role["choices"] == msgspec.json.decode(RECORDED_ROLE)["choices"]
    assert answer.closing().endswith(DONE)


def test_completions_have_no_role_chunk() -> None:
    """Their first event is text."""
    question, answer = rendered(Api.COMPLETIONS, prompt="hi", stream=True, max_tokens=2)
    assert answer.opening() == b""
    (first,) = events(answer.piece(question.replies[0], 1))
    assert shape(first) == shape(msgspec.json.decode(RECORDED_TEXT))
    assert answer.closing() == DONE


def test_every_choice_opens_with_its_role() -> None:
    """With n=2 both role chunks come first."""
    _, answer = chat(n=2)
    assert [chunk["choices"][0]["index"] for chunk in events(answer.opening())] == [0, 1]


def test_continuous_usage_is_per_choice_and_summed_at_the_end() -> None:
    """As recorded: 4 and 4 on the chunks, 8 in the last one."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    question, answer = chat(n=2, max_tokens=4, stream_options=options)
    (opened, _) = events(answer.opening())
    assert opened["usage"] == {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0}
    for reply in question.replies:
        (chunk,) = events(answer.piece(reply, 4))
        assert chunk["usage"] == {"prompt_tokens": 4, "total_tokens": 8, "completion_tokens": 4}
    (final,) = events(answer.closing())
    assert final["usage"] == {"prompt_tokens": 4, "total_tokens": 12, "completion_tokens": 8}


def test_usage_is_absent_unless_asked_for() -> None:
    """Strict clients break on a chunk without choices."""
    question, answer = chat()
    chunks = events(answer.opening() + answer.piece(question.replies[0], 1) + answer.closing())
    assert len(chunks) == 2
    assert not any("usage" in chunk for chunk in chunks)


def test_the_pieces_of_a_stream_are_the_text_of_the_whole() -> None:
    """Streamed or not, the same words."""
    question, answer = chat(max_tokens=7)
    (reply,) = question.replies
    pieces = [
        events(answer.piece(reply, number))[0]["choices"][0]["delta"]["content"]
        for number in range(1, 8)
    ]
    _, whole = chat(max_tokens=7, stream=False)
    body = msgspec.json.decode(whole.whole())
    assert "".join(pieces) == body["choices"][0]["message"]["content"]
    assert body["object"] == "chat.completion"
    assert body["usage"]["completion_tokens"] == 7


def test_embeddings_report_their_prompt_only() -> None:
    """One vector per input."""
    _, answer = rendered(Api.EMBEDDINGS, input=["a b", "c"])
    body = msgspec.json.decode(answer.whole())
    assert [entry["index"] for entry in body["data"]] == [0, 1]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 0)


def test_responses_nest_their_usage() -> None:
    """Under `response.usage`, as input and output tokens, in numbered events."""
    question, answer = rendered(Api.RESPONSES, input="a b", stream=True, max_output_tokens=2)
    (reply,) = question.replies
    raw = answer.opening() + answer.piece(reply, 1) + answer.piece(reply, 2) + answer.closing()
    told = events(raw)
    assert [event["type"] for event in told] == [
        "response.created",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in told] == [0, 1, 2, 3]
    assert told[0]["response"]["usage"] is None
    usage = told[3]["response"]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (5, 2, 7)
    assert raw.startswith(b"event: response.created\ndata: ")


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.EMBEDDINGS])
def test_usage_can_be_left_out_everywhere(api: Api) -> None:
    """Some backends never report it."""
    fields = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
    _, answer = rendered(api, usage=False, **fields)
    assert msgspec.json.decode(answer.whole())["usage"] is None


def test_a_stream_can_leave_usage_out_though_asked() -> None:
    """Neither on the chunks nor at the end."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    question, answer = chat(usage=False, stream_options=options)
    assert "usage" not in events(answer.piece(question.replies[0], 1))[0]
    assert answer.closing() == DONE
