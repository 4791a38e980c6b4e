"""What a body gives the backend to read: texts, ids, pictures and clips."""

import json
from typing import Any

import pytest

from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.openai.codes import ErrorCode
from envoy_tokenpools.openai.prompt import MAX_PIECES, MAX_PROMPTS, MAX_USUAL_ID_CHARS, Prompt


def read(*messages: Any) -> Prompt:
    """The prompt of a chat with these messages."""
    prompt = Prompt()
    prompt.add_messages(list(messages), "messages")
    return prompt


def said(content: Any) -> Prompt:
    """The prompt of a chat with one message of this content."""
    return read({"role": "user", "content": content})


def test_parts_of_unknown_kinds_never_raise_and_add_only_text() -> None:
    """A null picture, a video, an invented part, a bare string and null in one message."""
    prompt = said(
        [
            {"type": "text", "text": "hello"},
            {"type": "image_url", "image_url": None},
            {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
            {"type": "zzz"},
            {"type": "zzz", "data": "AAAA", "text": "seen"},
            {"type": ["text"], "text": "also"},
            {"type": None},
            {"image_url": None, "input_audio": None},
            {},
            "hi",
            "",
            None,
            7,
            ["nested"],
        ]
    )
    assert prompt.texts == ["hello", "seen", "also", "hi"]
    assert (prompt.images, prompt.audio_clips) == (2, 0)


@pytest.mark.parametrize(
    ("part", "images", "clips"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}, 1, 0),
        ({"type": "input_image", "image_url": "data:image/png;base64,@"}, 1, 0),
        ({"type": "image", "image": "@"}, 1, 0),
        ({"type": "image", "content": "@", "text": "@"}, 1, 0),
        ({"type": "image_pil", "image_pil": "@"}, 1, 0),
        ({"type": "image_embeds", "image_embeds": "@"}, 1, 0),
        ({"type": "video_url", "video_url": {"url": "@"}}, 1, 0),
        ({"type": "video_embeds", "video_embeds": "@"}, 1, 0),
        ({"video_embeds": "@"}, 1, 0),
        ({"type": "audio_embeds", "audio_embeds": "@"}, 0, 1),
        ({"image_url": {"url": "@"}}, 1, 0),
        ({"type": "input_audio", "input_audio": {"data": "@", "format": "wav"}}, 0, 1),
        ({"type": "audio_url", "audio_url": {"url": "@"}}, 0, 1),
        ({"audio_url": {"url": "@"}}, 0, 1),
        ({"type": "file", "file": {"file_data": "@", "filename": "a.pdf"}}, 0, 1),
        ({"type": "input_file", "file_data": "@", "filename": "a.pdf"}, 0, 1),
    ],
)
@pytest.mark.parametrize("size", [4, 400_000, 800_000])
def test_encoded_media_count_once_and_are_never_text(
    part: dict[str, Any], images: int, clips: int, size: int
) -> None:
    """A picture costs the same however long its encoding is."""
    encoded = json.loads(json.dumps(part).replace("@", "A" * size))
    prompt = said([{"type": "text", "text": "describe this"}, encoded])
    assert prompt.texts == ["describe this"]
    assert (prompt.images, prompt.audio_clips) == (images, clips)


def test_an_answer_sent_back_with_its_nulls_adds_only_its_text() -> None:
    """SDKs send earlier answers back whole, with null for whatever they did not have."""
    prompt = read(
        {
            "role": "assistant",
            "content": "4",
            "refusal": None,
            "audio": None,
            "function_call": None,
            "tool_calls": None,
            "reasoning_content": "2 + 2",
        }
    )
    assert prompt.texts == ["4", "2 + 2"]
    assert (prompt.images, prompt.audio_clips) == (0, 0)


def test_tool_calls_count_their_names_and_arguments() -> None:
    """A call's id is not rendered; arguments given as an object are rendered as JSON."""
    prompt = read(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'},
                },
                {"type": "function", "function": {"name": "now", "arguments": {"tz": "日本"}}},
                {"type": "custom", "custom": {"name": "sql", "input": "select 1"}},
                {"type": "function", "function": None},
                {"type": "function", "function": "name"},
                None,
            ],
            "function_call": {"name": "old", "arguments": "{}"},
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    )
    assert prompt.texts == [
        *("get_weather", '{"city":"Paris"}'),
        *("now", '{"tz":"日本"}'),
        *("sql", "select 1"),
        *("old", "{}"),
        "sunny",
    ]


def test_names_are_read_and_invented_roles_hide_nothing() -> None:
    """A usual role is part of the overhead; a template renders any other as it stands."""
    prompt = read(
        {"role": "user", "name": "ada", "content": "hi"},
        {"role": "a whole prompt", "content": ""},
        {"role": 7},
        {"role": ["user"], "content": 5},
        {},
    )
    assert prompt.texts == ["ada", "hi", "a whole prompt"]
    assert prompt.overhead_tokens == 5 * 4


@pytest.mark.parametrize("name", ["id", "call_id", "tool_call_id", "tool_use_id", "task"])
def test_long_identifiers_hide_nothing(name: str) -> None:
    """Some templates render them: a usual one is part of the overhead, any longer one is text."""
    usual, long = "x" * MAX_USUAL_ID_CHARS, "y" * (MAX_USUAL_ID_CHARS + 1)
    call = {"type": "function", name: long, "function": {"name": "f", "arguments": "{}"}}
    prompt = read(
        {"role": "tool", name: usual}, {"role": "tool", name: long}, {"tool_calls": [call]}
    )
    assert prompt.texts == [long, long, "f", "{}"]
    assert read({name: 7}, {name: None}, {name: ["z" * 99]}).texts == []


@pytest.mark.parametrize(
    ("part", "ids"),
    [
        ({"type": "prompt_embeds", "data": "A" * 10_922}, 1),
        ({"type": "prompt_embeds", "data": "A" * 109_228}, 11),
        ({"prompt_embeds": True, "data": "A"}, 1),
        ({"type": "text", "uuid": "u", "prompt_embeds": 1, "data": "A"}, 1),
        ({"type": "prompt_embeds", "data": ["A" * 10_922] * 3}, 3),
        ({"type": "prompt_embeds", "data": ["A", ["A"], 5, None]}, 1),
        ({"type": "prompt_embeds", "data": ""}, 0),
        ({"type": "prompt_embeds", "data": None}, 0),
        ({"type": "prompt_embeds"}, 0),
        ({"type": "redacted_thinking", "data": "A" * 99_999}, 0),
    ],
)
def test_a_part_of_embeddings_is_as_many_tokens_as_its_size_says(
    part: dict[str, Any], ids: int
) -> None:
    """8 KiB each, rounded up; vLLM takes such a part with its type or without."""
    prompt = said([part])
    assert (prompt.token_ids, prompt.texts, prompt.images) == (ids, [], 0)


def test_items_of_the_responses_api_are_read() -> None:
    """Messages, calls, their outputs and reasoning; ciphertext and screenshots are not text."""
    prompt = Prompt()
    prompt.add_messages(
        [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "1", "name": "b", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "c"},
            {"type": "custom_tool_call", "name": "d", "input": "e"},
            {"type": "function_call_output", "output": [{"type": "input_image", "image_url": "x"}]},
            {"type": "computer_call_output", "output": {"type": "computer_screenshot"}},
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "f"}],
                "content": [{"type": "reasoning_text", "text": "g"}],
                "encrypted_content": "AAAA",
            },
            {"type": "mcp_list_tools", "tools": [{"name": "h", "input_schema": {"x": 1.5}}]},
            {"type": "image_generation_call", "id": "2", "result": "AAAA"},
            {"type": "item_reference", "id": "3"},
        ],
        "input",
    )
    schema = '[{"name":"h","input_schema":{"x":1.5}}]'
    assert prompt.texts == ["a", "b", "{}", "c", "d", "e", "f", "g", schema]
    assert (prompt.images, prompt.audio_clips) == (2, 0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([{"a": [1, True, None, "é"]}], '[{"a":[1,true,null,"é"]}]'),
        ({"maximum": 2**70, "minimum": -(2**70)}, f'{{"maximum":{2**70},"minimum":{-(2**70)}}}'),
        ('{"a": 1}', '{"a": 1}'),
    ],
)
def test_schemas_are_compact_json(value: Any, text: str) -> None:
    """Blanks and escapes of the wire are not part of what a template renders."""
    prompt = Prompt()
    prompt.add_json(value)
    assert prompt.texts == [text]


@pytest.mark.parametrize("value", [None, [], {}, "", 0, False])
def test_empty_schemas_add_nothing(value: object) -> None:
    """An absent or empty list of tools is not a text."""
    prompt = Prompt()
    prompt.add_json(value)
    assert prompt.texts == []


@pytest.mark.parametrize(
    ("inputs", "texts", "ids", "prompts"),
    [
        ("Hello", ["Hello"], 0, 1),
        ("", [], 0, 1),
        (["Hello world", "hi"], ["Hello world", "hi"], 0, 2),
        (["", "hi"], ["hi"], 0, 2),
        ([15496, 995], [], 2, 1),
        ([[1, 2, 3], [4, 5]], [], 5, 2),
        ([[1], []], [], 1, 2),
        ([{"text": "a", "image": "AAAA"}, {"text": "b"}], ["a", "b"], 0, 2),
        ([{"role": "user", "content": "a"}], ["a"], 0, 1),
        ([[{"role": "user", "content": "a"}], [{"text": "b"}]], ["a", "b"], 0, 2),
    ],
)
def test_inputs_come_as_texts_or_ids(inputs: Any, texts: list[str], ids: int, prompts: int) -> None:
    """Ids are counted and never read as text; each element of an array is a prompt of its own."""
    prompt = Prompt()
    prompt.add_inputs(inputs, "prompt", None)
    assert (prompt.texts, prompt.token_ids, prompt.prompts) == (texts, ids, prompts)


@pytest.mark.parametrize(
    "inputs",
    [
        None,
        5,
        True,
        {},
        {"a": 1},
        [1, "a"],
        [True],
        [1.0],
        [None],
        [["a"]],
        [[1], "a"],
        [[1.5]],
        [[[1]]],
        [[{}], [1]],
        [[{}], "a"],
        [{}, "a"],
    ],
)
def test_other_inputs_are_refused(inputs: Any) -> None:
    """Mixtures, truth values and fractions are neither texts nor ids."""
    with pytest.raises(RequestError) as caught:
        Prompt().add_inputs(inputs, "prompt", None)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, ErrorCode.INVALID_TYPE, "prompt")


def test_an_empty_array_of_inputs_is_refused() -> None:
    """There is nothing to run."""
    with pytest.raises(RequestError) as caught:
        Prompt().add_inputs([], "input", None)
    assert (caught.value.code, caught.value.param) == (ErrorCode.EMPTY_ARRAY, "input")


def test_conversations_and_inputs_in_one_body_are_the_larger_number_of_prompts() -> None:
    """Which of them a backend takes is its own choice."""
    prompt = Prompt()
    prompt.add_inputs(["x"] * 3, "prompt", None)
    prompt.add_conversations([[{"content": "a"}]] * 2, "messages")
    assert (prompt.prompts, prompt.texts) == (3, ["x", "x", "x", "a", "a"])
    with pytest.raises(RequestError) as caught:
        prompt.add_conversations([[{}]] * (MAX_PROMPTS + 1), "messages")
    assert (caught.value.code, caught.value.param) == (ErrorCode.ARRAY_TOO_LONG, "messages")


@pytest.mark.parametrize(
    ("media", "count"), [(None, 0), ([], 0), ("x", 1), (["x", None, [["x"], {}]], 3), (False, 1)]
)
def test_media_may_come_in_lists(media: Any, count: int) -> None:
    """Nested as they are for batches; null is none."""
    prompt = Prompt()
    prompt.add_images(media)
    prompt.add_clips(media)
    assert (prompt.images, prompt.audio_clips) == (count, count)


def test_the_number_of_prompts_can_be_bounded_and_that_of_ids_is_not() -> None:
    """The bound is on what runs at the same time, not on the length of one prompt."""
    Prompt().add_inputs(["x"] * 3, "prompt", 3)
    Prompt().add_inputs([1] * 4, "prompt", 3)
    with pytest.raises(RequestError) as caught:
        Prompt().add_inputs(["x"] * 4, "prompt", 3)
    assert caught.value.code == ErrorCode.ARRAY_TOO_LONG


@pytest.mark.parametrize(
    ("messages", "code", "param"),
    [
        ("hi", ErrorCode.INVALID_TYPE, "messages"),
        ({}, ErrorCode.INVALID_TYPE, "messages"),
        (5, ErrorCode.INVALID_TYPE, "messages"),
        ([], ErrorCode.EMPTY_ARRAY, "messages"),
        (["hi"], ErrorCode.INVALID_TYPE, "messages[0]"),
        ([{"role": "user"}, None], ErrorCode.INVALID_TYPE, "messages[1]"),
        ([[]], ErrorCode.INVALID_TYPE, "messages[0]"),
    ],
)
def test_messages_are_a_list_of_objects(messages: Any, code: ErrorCode, param: str) -> None:
    """Anything else is a 400 that names the place."""
    with pytest.raises(RequestError) as caught:
        Prompt().add_messages(messages, "messages")
    error = caught.value
    assert (error.status, error.code, error.param) == (400, code, param)


@pytest.mark.parametrize(
    "messages",
    [
        [{}] * MAX_PIECES,
        [{"content": [{}] * (MAX_PIECES - 1)}],
        [{"content": ["x"] * (MAX_PIECES - 1)}],
        [{"tool_calls": [{}] * (MAX_PIECES - 1)}],
        [{"content": [{"content": [{}] * (MAX_PIECES - 2)}]}],
    ],
)
def test_the_pieces_of_a_request_are_bounded_together(messages: list[dict[str, Any]]) -> None:
    """Walking through a body takes time by piece, wherever in it they are."""
    Prompt().add_messages(messages, "messages")
    with pytest.raises(RequestError) as caught:
        Prompt().add_messages([*messages, {}], "messages")
    assert (caught.value.status, caught.value.code) == (400, ErrorCode.ARRAY_TOO_LONG)


@pytest.mark.parametrize("piece", ["x", [1], {"text": "x"}])
def test_inputs_are_pieces_too(piece: Any) -> None:
    """An embedding request may hold as many inputs, and not one more."""
    Prompt().add_inputs([piece] * MAX_PIECES, "input", None)
    with pytest.raises(RequestError) as caught:
        Prompt().add_inputs([piece] * (MAX_PIECES + 1), "input", None)
    assert caught.value.code == ErrorCode.ARRAY_TOO_LONG
