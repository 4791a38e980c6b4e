"""The engines' own endpoints and SageMaker's, read into facts."""

import json
from typing import Any

import pytest

from envoy_tokenpools.openai.codes import ErrorCode
from envoy_tokenpools.openai.prompt import MAX_PROMPTS
from envoy_tokenpools.openai.request import Endpoint, parse_request
from tests.support.bodies import SMALLEST, parse, refusal


@pytest.mark.parametrize(
    ("fields", "texts", "ids", "prompts"),
    [
        ({"prompt": "a"}, ("a",), 0, 1),
        ({"prompt": ["a", "b"]}, ("a", "b"), 0, 2),
        ({"token_ids": [1, 2, 3]}, (), 3, 1),
        ({"prompt_token_ids": [1, 2]}, (), 2, 1),
        ({"text": "a"}, ("a",), 0, 1),
        ({"text": ["a", "b", "c"]}, ("a", "b", "c"), 0, 3),
        ({"input_ids": [[1, 2], [3]]}, (), 3, 2),
        ({"inputs": "a"}, ("a",), 0, 1),
        ({"input_embeds": [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]}, (), 3, 1),
        ({"input_embeds": [[[0.1], [0.2]], [[0.3]]]}, (), 3, 2),
        ({"input_embeds": [[]]}, (), 1, 1),
        ({"input_embeds": "x"}, (), 0, 1),
        ({"text": "a", "input_ids": [1, 2]}, ("a",), 2, 1),
        ({"token_ids": [1], "content_parts": [{"type": "text", "text": "b"}]}, ("b",), 1, 1),
    ],
)
def test_prompts_come_by_several_names(
    fields: dict[str, Any], texts: tuple[str, ...], ids: int, prompts: int
) -> None:
    """vLLM's, SGLang's and TGI's; two at once are both read."""
    facts = parse(Endpoint.GENERATE, **fields)
    assert (facts.texts, facts.token_ids) == (texts, ids)
    assert facts.prompts == facts.sequences == prompts
    assert (facts.max_output_tokens, facts.decodes, facts.overhead_tokens) == (None, True, 0)


def test_media_beside_a_prompt_are_counted() -> None:
    """One, a list for a batch, or lists of several for each prompt."""
    facts = parse(
        Endpoint.GENERATE,
        text=["a", "b"],
        image_data=[["AAAA", "AAAA"], [None, {"url": "x"}]],
        video_data="AAAA",
        audio_data=["AAAA", None],
        token_ids=[1],
        content_parts=[{"type": "image_url", "image_url": {"url": "x"}}],
    )
    assert (facts.images, facts.audio_clips, facts.texts) == (3 + 1 + 1, 1, ("a", "b"))


@pytest.mark.parametrize(
    ("fields", "limit", "width"),
    [
        ({"max_tokens": 7, "n": 2}, 7, 2),
        ({"sampling_params": {"max_tokens": 7, "n": 2}}, 7, 2),
        ({"sampling_params": {"max_new_tokens": 7, "n": 2}}, 7, 2),
        ({"parameters": {"max_new_tokens": 7, "best_of": 2}}, 7, 2),
        ({"max_tokens": 3, "sampling_params": {"max_new_tokens": 7, "max_tokens": 5}}, 7, 1),
        ({"max_tokens": 9, "sampling_params": {"max_new_tokens": 7}}, 9, 1),
        ({"sampling_params": [{"max_new_tokens": 3}, {"max_new_tokens": 7, "n": 4}]}, 7, 4),
        ({"sampling_params": {"beam_width": 5}}, None, 5),
        ({"sampling_params": {"max_new_tokens": 0}}, 0, 1),
        ({"sampling_params": None, "parameters": None}, None, 1),
        ({"sampling_params": [None, 5, "x"], "parameters": "x"}, None, 1),
        ({"sampling_params": []}, None, 1),
    ],
)
def test_limits_may_be_nested(fields: dict[str, Any], limit: int | None, width: int) -> None:
    """The largest counts, wherever it stands and whatever it is called; nothing is a legal maximum."""
    facts = parse(Endpoint.GENERATE, text=["a", "b"], **fields)
    assert (facts.max_output_tokens, facts.sequences) == (limit, 2 * width)


@pytest.mark.parametrize("raw", ["-1", "1.5", '"7"', "true", "[]", "2147483648", "1e300"])
@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens", "n", "best_of", "beam_width"])
@pytest.mark.parametrize(
    "body", ['{{"text":"a","{0}":{1}}}', '{{"text":"a","sampling_params":[{{}},{{"{0}":{1}}}]}}']
)
def test_odd_numbers_are_refused_where_they_stand(body: str, name: str, raw: str) -> None:
    """As everywhere."""
    error = refusal(Endpoint.GENERATE, body.format(name, raw).encode())
    assert error.param == name


def test_sampling_parameters_are_bounded() -> None:
    """Each is looked into, so there is a most of them; of rows of embeddings as well."""
    body = json.dumps({"text": "a", "sampling_params": [{}] * (MAX_PROMPTS + 1)}).encode()
    error = refusal(Endpoint.GENERATE, body)
    assert (error.code, error.param) == (ErrorCode.ARRAY_TOO_LONG, "sampling_params")
    body = json.dumps({"input_embeds": [[[0.5]]] * (MAX_PROMPTS + 1)}).encode()
    error = refusal(Endpoint.GENERATE, body)
    assert (error.code, error.param) == (ErrorCode.ARRAY_TOO_LONG, "input_embeds")


def test_a_stream_is_asked_for_at_the_top() -> None:
    """As in vLLM and SGLang."""
    assert parse(Endpoint.GENERATE, text="a", stream=True).stream


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        (SMALLEST[Endpoint.CHAT] | {"max_tokens": 9, "tools": [{"type": "x"}]}, Endpoint.CHAT),
        (SMALLEST[Endpoint.COMPLETIONS] | {"max_tokens": 9, "n": 3}, Endpoint.COMPLETIONS),
        ({"prompt": "a", "echo": True, "max_tokens": 0}, Endpoint.COMPLETIONS),
        ({"prompt_embeds": "AAAA"}, Endpoint.COMPLETIONS),
        ({"inputs": "a", "parameters": {"max_new_tokens": 5}}, Endpoint.GENERATE),
        (SMALLEST[Endpoint.SCORE], Endpoint.SCORE),
        ({"queries": ["a"], "documents": ["b", "c"]}, Endpoint.SCORE),
        (SMALLEST[Endpoint.RERANK], Endpoint.SCORE),
        (SMALLEST[Endpoint.EMBEDDINGS], Endpoint.POOLING),
        ({"input": [[1, 2], [3]], "stream": "any", "max_tokens": -1}, Endpoint.POOLING),
        ({"data": {"url": "x"}}, Endpoint.POOLING),
    ],
)
def test_an_invocation_has_the_shape_of_its_fields(fields: dict[str, Any], shape: Endpoint) -> None:
    """Its facts are those of the endpoint that has this shape."""
    body = json.dumps(fields).encode()
    facts = parse_request(Endpoint.INVOCATIONS, body)
    assert facts == parse_request(shape, body)
    assert facts.endpoint is shape


def test_an_invocation_of_several_shapes_is_read_as_all_of_them() -> None:
    """Which one a backend takes depends on its model, and on what else does not fit."""
    facts = parse(
        Endpoint.INVOCATIONS,
        messages=[{"role": "user", "content": "a"}],
        prompt=["b", "c"],
        input=[1, 2, 3],
        query="d",
        documents="e",
        max_tokens=5,
    )
    assert facts.endpoint is Endpoint.CHAT
    assert set(facts.texts) >= {"a", "b", "c", "e"}
    assert (facts.shared_texts, facts.token_ids) == (("d",), 3)
    assert (facts.prompts, facts.sequences, facts.max_output_tokens) == (2, 2, 5)


def test_an_invocation_without_any_shape_is_refused() -> None:
    """As by vLLM."""
    error = refusal(Endpoint.INVOCATIONS, b'{"model":"m","prompt":null,"instances":[]}')
    assert (error.code, error.param) == (ErrorCode.MISSING_PARAMETER, "messages")
