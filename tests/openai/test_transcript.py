"""What a response says: generated text, usage, end and errors, whatever the types of its fields."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.openai import transcript
from envoy_tokenpools.openai.usage import (
    Metered,
    Usage,
)
from tests.support.streams import S_EVENTS, S_METERED, chunk, of_body, of_stream, total

# The joined text


@pytest.mark.parametrize(
    ("deltas", "texts"),
    [
        (["Hello world, how are you today?"], ("Hello world, how are you today?",)),
        (["1", "2", "3", "4", "5", "6"], ("123456",)),
        (["Hel", "lo", " wor", "ld"], ("Hello world",)),
        (["", "", ""], ()),
        (["a\r\n", "\n", "b\r"], ("a\r\n\nb\r",)),
        (["\ufeff", "a", "\x00"], ("\ufeffa\x00",)),
    ],
)
def test_pieces_are_joined(deltas: list[str], texts: tuple[str, ...]) -> None:
    """Pieces of one channel become one text, for a piece is not a token."""
    events = [chunk({"role": "assistant"}), *(chunk({"content": delta}) for delta in deltas)]
    assert of_stream(*events, "[DONE]").texts == texts


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_null_usage_falls_back_to_all_generated_text(name: str) -> None:
    """Reasoning and tool calls count as text, and no null anywhere hurts."""
    call = {"index": 0, "id": "c", "function": {"name": "get_weather", "arguments": ""}}
    first = {"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": ""}
    metered = of_stream(
        {"choices": [first], "usage": None},
        chunk({name: "Let me think "}, usage=None),
        chunk({name: "step by step."}),
        chunk({"content": "The answer is 4."}),
        chunk({"tool_calls": [call]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"name": None, "arguments": '"Paris"}'}}]}),
        {"choices": None, "usage": {}},
        {"choices": [None]},
        {"choices": [{"delta": None, "index": None, "text": None}], "error": None},
        chunk({"tool_calls": None, "function_call": None, "refusal": None}),
        chunk({"tool_calls": [None, {"function": None}]}),
        "[DONE]",
    )
    assert metered == Metered(
        usage=None,
        texts=(
            "Let me think step by step.",
            "The answer is 4.",
            "get_weather",
            '{"city":"Paris"}',
        ),
        finished=True,
        error=False,
        overflow_chars=0,
        unread=0,
    )


def test_two_names_of_reasoning_count_once() -> None:
    """A delta with both spellings of its reasoning is one piece, and the spelling may change."""
    both = {"reasoning_content": "a", "reasoning": "a"}
    assert of_stream(chunk(both), chunk({"reasoning": "b", "reasoning_content": None})).texts == (
        "ab",
    )


def test_choices_and_tool_calls_are_kept_apart() -> None:
    """Interleaved choices and parallel tool calls are joined each by itself."""

    def tool(index: int, arguments: str) -> dict[str, object]:
        return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}

    metered = of_stream(
        chunk({"content": "a"}, 0),
        chunk({"content": "x"}, 1),
        chunk({"content": "b"}, 0),
        chunk({"content": "y"}, 1),
        chunk(tool(0, "1"), 0),
        chunk(tool(1, "3"), 0),
        chunk(tool(0, "2"), 0),
        chunk(tool(0, "9"), 1),
    )
    assert metered.texts == ("ab", "xy", "12", "3", "9")


def test_content_as_a_list_of_parts() -> None:
    """Parts give their text; unknown ones and nulls give none."""
    parts = [{"type": "text", "text": "a"}, "b", None, 7, {"type": "zzz"}, {"thinking": "c"}]
    assert of_stream(chunk({"content": parts})).texts == ("abc",)
    assert of_body({"choices": [{"message": {"content": parts}}]}).texts == ("abc",)


def test_plain_body_gives_every_channel() -> None:
    """A whole chat answer gives content, reasoning, refusal and tool calls of every choice."""
    call = {"function": {"name": "f", "arguments": '{"a":1}'}}
    parsed = {"function": {"name": "g", "arguments": {"b": "é"}}}
    metered = of_body(
        {
            "choices": [
                {"index": 0, "message": {"content": "c0", "reasoning": "r0", "tool_calls": [call]}},
                {"index": 1, "message": {"content": None, "refusal": "no", "tool_calls": [parsed]}},
                {"index": 2, "message": {"function_call": {"name": "h", "arguments": "{}"}}},
            ]
        }
    )
    assert metered.texts == ("c0", "r0", "f", '{"a":1}', "no", "g", '{"b": "é"}', "h", "{}")
    assert of_body({"choices": [{"index": 0, "text": "t"}, {"text": "u"}]}).texts == ("t", "u")


# Which usage is believed


def test_largest_cumulative_value_never_the_sum() -> None:
    """Usage on every chunk is cumulative."""
    events = [
        chunk({"content": "x"}, usage={"prompt_tokens": 7, "completion_tokens": n})
        for n in (1, 2, 5, 4)
    ]
    assert of_stream(*events, total(7, 5), total(7, 5)).usage == Usage(7, 5)
    assert of_stream(*events).usage == Usage(7, 5)
    assert of_stream(total(7, 9), total(5, 4)).usage == Usage(7, 9)


def test_per_choice_usage_is_summed_over_choices() -> None:
    """With n=2 each chunk reports its own choice: the largest of each, summed, is the answer."""
    events = [
        chunk({"content": "x"}, index, usage={"prompt_tokens": 7, "completion_tokens": n})
        for n, index in itertools.product((1, 3, 4), (0, 1))
    ]
    assert of_stream(*events).usage == Usage(7, 8)
    assert of_stream(*events, total(7, 8)).usage == Usage(7, 8)
    assert of_stream(*events[:-1]).usage == Usage(7, 7)
    falling = [
        chunk({"content": "x"}, index, usage={"prompt_tokens": 7, "completion_tokens": n})
        for index, n in ((0, 5), (0, 4), (1, 3))
    ]
    assert of_stream(*falling).usage == Usage(7, 8)
    again = chunk({"content": "x"}, usage={"prompt_tokens": 7, "completion_tokens": 5})
    assert of_stream(*falling, again).usage == Usage(7, 8)


def test_usage_of_a_chunk_with_several_choices_is_the_total() -> None:
    """It cannot be attributed to one of them."""
    choices = [{"index": index, "delta": {"content": "x"}} for index in (0, 1)]
    reported = {"prompt_tokens": 7, "completion_tokens": 4}
    together = {"choices": choices, "usage": reported}
    alone = chunk({"content": "x"}, usage={"prompt_tokens": 7, "completion_tokens": 3})
    assert of_stream(together).usage == Usage(7, 4)
    assert of_stream(together, alone).usage == Usage(7, 4)


@pytest.mark.parametrize(
    "number",
    [None, "9", -1, 9.0, 1e300, True, False, 2**53 + 1, 10**400, [9], {"n": 9}, float("nan")],
)
def test_incredible_numbers_are_ignored(number: object) -> None:
    """A count that is no count leaves the earlier report standing, and alone reports nothing."""
    assert of_stream(total(26, 9), total(number, number)).usage == Usage(26, 9)
    assert of_stream(total(number, number), total(26, 9)).usage == Usage(26, 9)
    assert of_stream(total(number, number)).usage is None
    other = {"input_tokens": number, "output_tokens": number}
    assert of_stream({"usage": other}, total(26, 9), {"usage": other}).usage == Usage(26, 9)
    assert of_stream({"usage": other}).usage is None
    assert of_stream(chunk({"content": "x"}), total(number, number)).usage is None
    assert of_stream(chunk({"content": "x"}), total(number, 9)).usage == Usage(None, 9)
    body = {"choices": [], "usage": {"prompt_tokens": 26, "completion_tokens": number}}
    assert of_body({**body, "choices": [{"text": "x"}]}).usage == Usage(26, None)


@pytest.mark.parametrize("reported", [None, {}, [], "9", 9, True, [{"prompt_tokens": 1}]])
def test_usage_of_a_wrong_type_is_ignored(reported: object) -> None:
    """Nothing but an object of counts is a report."""
    assert of_stream(*S_EVENTS[:4], {"choices": [], "usage": reported}) == S_METERED
    assert of_body({"choices": [{"text": "x"}], "usage": reported}).usage is None


def test_largest_credible_count_is_believed() -> None:
    """2**53 is the last number that JSON, Lua and a float keep exactly."""
    assert of_stream(total(2**53, 2**53)).usage == Usage(2**53, 2**53)
    most = {"completion_tokens": 2**53}
    both = [chunk({"content": "x"}, index, usage=most) for index in (0, 1)]
    assert of_stream(*both).usage == Usage(None, 2**53)


def test_zero_beside_text_is_a_placeholder() -> None:
    """A backend that fills usage with zeros reported nothing; text is never free."""
    assert of_stream(chunk({"content": "x"}), total(0, 0)).usage is None
    assert of_stream(chunk({"content": "x"}), total(7, 0)).usage == Usage(7, None)
    assert of_stream(chunk({}), total(7, 0)).usage == Usage(7, 0)


def test_text_after_the_last_report_makes_it_stale() -> None:
    """A count given before more text was generated is not the count of the response."""
    reported = {"prompt_tokens": 7, "completion_tokens": 1}
    events = [chunk({"content": "a"}, usage=reported), chunk({"content": " b c d"})]
    assert of_stream(*events).usage == Usage(7, None)
    assert of_stream(*events, total(7, 4)).usage == Usage(7, 4)


@pytest.mark.parametrize(
    "reported",
    [
        {"prompt_tokens": 5, "completion_tokens": 9, "input_tokens": 0, "output_tokens": 0},
        {"prompt_tokens": 0, "completion_tokens": 0, "input_tokens": 5, "output_tokens": 9},
    ],
)
def test_both_spellings_of_usage(reported: dict[str, int]) -> None:
    """Gateways that write both dialects' names leave the wrong ones at zero."""
    assert of_body({"choices": [{"text": "x"}], "usage": reported}).usage == Usage(5, 9)


def test_a_prompt_alone_says_nothing_of_a_stream_still_running() -> None:
    """No completion is inferred before the end, nor where something could not be read."""
    prompt = {"choices": [], "usage": {"prompt_tokens": 7}}
    assert of_stream(prompt).usage == Usage(7, None)
    assert of_stream(prompt, "[DONE]").usage == Usage(7, 0)
    assert of_stream(prompt, "{broken", "[DONE]").usage == Usage(7, None)


# The end, and errors


def test_failed_response_is_an_error() -> None:
    """A response that failed without saying why failed all the same."""
    assert of_stream({"type": "response.failed"}).error


def _finish(index: int, reason: object) -> dict[str, object]:
    return {"choices": [{"index": index, "delta": {}, "finish_reason": reason}]}


@pytest.mark.parametrize(
    ("events", "finished"),
    [
        ([], False),
        ([chunk({"content": "a"})], False),
        ([total(1, 2)], False),
        ([chunk({"content": "a"}), _finish(0, "")], False),
        ([chunk({"content": "a"}), _finish(0, "stop")], True),
        ([chunk({}, 0), chunk({}, 1), _finish(0, "stop")], False),
        ([chunk({}, 0), chunk({}, 1), _finish(0, "stop"), _finish(1, "length")], True),
        (["[DONE]"], True),
        (["[DONE] "], True),
        ([{"type": "message_delta", "delta": {"stop_reason": "end_turn"}}], False),
        ([{"type": "message_stop"}], True),
        ([{"type": "response.output_text.done"}], False),
        ([{"type": "response.completed"}], True),
        ([{"type": "response.incomplete"}], True),
        ([{"type": "response.failed"}], True),
    ],
)
def test_finished(events: list[object], finished: bool) -> None:  # noqa: FBT001
    """Only an end that was seen makes a stream finished."""
    assert of_stream(*events).finished is finished


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ({"error": {"message": "EngineCore encountered an issue.", "code": 500}}, True),
        ({"error": "Unauthorized"}, True),
        ({"object": "error", "message": "too long", "code": 400}, True),
        ({"type": "error", "error": {"type": "overloaded_error"}}, True),
        ({"type": "error", "code": "server_error", "message": "x"}, True),
        ({"type": "response.failed", "response": {"error": {"code": "server_error"}}}, True),
        ({"error": None}, False),
        ({"error": {}}, False),
        ({"type": "response.completed", "response": {"error": None}}, False),
        (chunk({"content": "error"}), False),
    ],
)
def test_error(event: dict[str, object], error: bool) -> None:  # noqa: FBT001
    """Every dialect's error is seen, and a null one is none; text before it still counts."""
    assert of_body(event).error is error
    metered = of_stream(chunk({"content": "a"}), event, "[DONE]")
    assert metered.error is error
    assert metered.texts[0].startswith("a")


_JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "x", "assistant", "error", "response.completed", "message_start"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *transcript.Message.__struct_fields__,
                    *("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens"),
                    *("tool_calls", "function", "name", "arguments", "function_call", "input"),
                    *("reasoning", "reasoning_content", "refusal", "thinking", "partial_json"),
                    *("finish_reason", "summary"),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
_TYPES = st.sampled_from(
    [
        "message_start",
        "message_delta",
        "content_block_start",
        "content_block_delta",
        "response.completed",
        "response.output_item.added",
        "response.output_text.delta",
    ]
)


@given(
    st.dictionaries(st.sampled_from(transcript.Message.__struct_fields__), _JUNK, max_size=5),
    _TYPES | st.none(),
)
def test_fields_of_any_type_never_raise(fields: dict[str, Any], kind: str | None) -> None:
    """Known fields with values of any type are read or passed over."""
    event = fields if kind is None else {**fields, "type": kind}
    for metered in (of_stream(event), of_body(event)):
        if metered.unread:  # its dialect is not known
            assert (metered.unread, metered.finished) == (1, True)
            assert (metered.usage, metered.error) == (None, False)
        assert all(metered.texts)
        for count in (
            (metered.usage.prompt_tokens, metered.usage.completion_tokens)
            if (metered.usage)
            else ()
        ):
            assert count is None or count >= 0
