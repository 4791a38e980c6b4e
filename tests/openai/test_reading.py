"""Endpoints that generate no text, read into facts: embeddings, scores, token counts, speech, pictures."""

import json
from typing import Any

import pytest

from envoy_tokenpools.openai.codes import ErrorCode
from envoy_tokenpools.openai.prompt import MAX_PIECES, MAX_PROMPTS
from envoy_tokenpools.openai.request import Endpoint, RequestFacts
from tests.support.bodies import SMALLEST, parse, refusal

OF_INPUTS = [Endpoint.EMBEDDINGS, Endpoint.CLASSIFY, Endpoint.POOLING]
OF_PAIRS = [Endpoint.SCORE, Endpoint.RERANK]


def tokens_read(facts: RequestFacts) -> int:
    """What a caller counts, where each word is a token."""
    own = sum(len(text.split()) for text in facts.texts)
    shared = sum(len(text.split()) for text in facts.shared_texts)
    return own + shared * facts.prompts + facts.token_ids


def test_embeddings_generate_nothing() -> None:
    """Inputs are read, limits and streams mean nothing, and nothing decodes."""
    facts = parse(
        Endpoint.EMBEDDINGS, model="e", input=["hello", "hi"], max_tokens=5, n=7, stream=True
    )
    assert (facts.texts, facts.prompts, facts.sequences) == (("hello", "hi"), 2, 1)
    assert (facts.max_output_tokens, facts.stream, facts.decodes) == (0, False, False)
    assert parse(Endpoint.EMBEDDINGS, input=[[1, 2], [3]]).token_ids == 3


@pytest.mark.parametrize("endpoint", OF_INPUTS)
@pytest.mark.parametrize("limit", [0, -5, "any", None, {}])
def test_what_limits_generation_is_nobody_s_concern_here(endpoint: Endpoint, limit: Any) -> None:
    """Other readers of the same body ignore it as well."""
    assert parse(endpoint, input="hi", max_tokens=limit, n=limit).texts == ("hi",)


@pytest.mark.parametrize("endpoint", OF_INPUTS)
@pytest.mark.parametrize(
    ("fields", "texts", "ids", "overhead", "images", "prompts"),
    [
        ({"input": "a"}, ("a",), 0, 0, 0, 1),
        ({"input": [1, 2, 3]}, (), 3, 0, 0, 1),
        ({"messages": [{"role": "user", "content": "a"}]}, ("a",), 0, 4, 0, 1),
        ({"messages": [[{"role": "user", "content": "a"}]] * 2}, ("a", "a"), 0, 8, 0, 2),
        ({"input": [{"role": "user", "content": "a"}]}, ("a",), 0, 4, 0, 1),
        ({"input": [[{"role": "user", "content": "a"}]] * 2}, ("a", "a"), 0, 8, 0, 2),
        ({"input": [{"text": "a", "image": "AAAA"}, {"text": "b"}]}, ("a", "b"), 0, 0, 1, 2),
        ({"texts": ["a", "b"]}, ("a", "b"), 0, 0, 0, 2),
        ({"images": ["data:image/png;base64,AAAA"] * 3}, (), 0, 0, 3, 3),
        (
            {"inputs": [{"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            *(("a",), 0, 0, 1, 1),
        ),
        ({"text": ["a", "b"]}, ("a", "b"), 0, 0, 0, 2),
        ({"input_ids": [[1], [2, 3]]}, (), 3, 0, 0, 2),
        ({"input": "a", "messages": [{"content": "b"}]}, ("a", "b"), 0, 4, 0, 1),
    ],
)
def test_inputs_come_in_many_shapes(
    endpoint: Endpoint,
    fields: dict[str, Any],
    texts: tuple[str, ...],
    ids: int,
    overhead: int,
    images: int,
    prompts: int,
) -> None:
    """OpenAI's, vLLM's conversations, Cohere's and SGLang's; two at once are both read."""
    facts = parse(endpoint, **fields)
    assert (facts.texts, facts.token_ids, facts.overhead_tokens) == (texts, ids, overhead)
    assert (facts.images, facts.prompts, facts.flat) == (images, prompts, False)


@pytest.mark.parametrize("endpoint", OF_INPUTS)
@pytest.mark.parametrize("given", [5, {}, [], [True], [[{}, 1]], [["a"]], [None]])
def test_inputs_of_other_shapes_are_refused(endpoint: Endpoint, given: Any) -> None:
    """Everywhere alike."""
    error = refusal(endpoint, json.dumps({"input": given}).encode())
    assert error.code in (ErrorCode.INVALID_TYPE, ErrorCode.EMPTY_ARRAY)
    assert error.param == "input"


@pytest.mark.parametrize("data", ["AAAA" * 100, {"url": "x"}, [1], 5, False])
def test_data_for_a_plugin_is_flat(data: Any) -> None:
    """It may be anything; nothing of it is taken for text. Texts beside it are read all the same."""
    facts = parse(Endpoint.POOLING, data=data, input="hi")
    assert (facts.flat, facts.texts, facts.decodes) == (True, ("hi",), False)
    assert parse(Endpoint.POOLING, data=data, input=5).texts == ()


@pytest.mark.parametrize("endpoint", OF_PAIRS)
@pytest.mark.parametrize(
    ("fields", "tokens", "prompts"),
    [
        ({"query": "a b", "documents": ["c", "d e"]}, 2 * 2 + 3, 2),
        ({"query": "a b", "documents": "c"}, 3, 1),
        ({"query": "a", "documents": [{"text": "b c"}, "d"]}, 2 + 3, 2),
        ({"query": "a", "texts": ["b", "c"]}, 2 + 2, 2),
        ({"query": [1, 2, 3], "items": [[4], [5, 6]]}, 3 * 2 + 3, 2),
        ({"query": "a b", "items": "c"}, 3, 1),
        ({"query": "a", "items": [1, 2]}, 3, 1),
        ({"queries": "a", "documents": ["b", "c"]}, 4, 2),
        ({"queries": ["a"], "documents": ["b", "c"]}, 4, 2),
        ({"queries": ["a", "b"], "documents": ["c", "d"]}, 4, 2),
        ({"queries": ["a", "b"], "items": ["c", "d"]}, 4, 2),
        ({"text_1": "a b", "text_2": "c"}, 3, 1),
        ({"text_1": "a b", "text_2": ["c"] * 5}, 2 * 5 + 5, 5),
        ({"text_1": ["a b"] * 5, "text_2": ["c"] * 5}, 2 * 5 + 5, 5),
        ({"data_1": "a", "data_2": ["b", "c"]}, 4, 2),
        ({"query": "a", "documents": ["b", "c"], "instruction": "d e"}, (1 + 2) * 2 + 2, 2),
        ({"query": "a", "documents": ["b", "c"], "instruct": "d e"}, (1 + 2) * 2 + 2, 2),
        (
            {"query": "a", "documents": ["b"] * 3, "chat_template_kwargs": {"instruction": "d"}},
            (1 + 1) * 3 + 3,
            3,
        ),
        ({"query": "a a", "queries": ["b", "c"], "documents": ["d", "e"]}, 2 * 2 + 2 + 2, 2),
        ({"query": "", "documents": [""]}, 0, 1),
    ],
)
def test_both_texts_of_every_pair_are_read(
    endpoint: Endpoint, fields: dict[str, Any], tokens: int, prompts: int
) -> None:
    """One query is read with each document, several are paired one by one."""
    facts = parse(endpoint, **fields)
    assert (tokens_read(facts), facts.prompts) == (tokens, prompts)
    assert (facts.sequences, facts.max_output_tokens, facts.decodes) == (1, 0, False)


@pytest.mark.parametrize("endpoint", OF_PAIRS)
def test_pictures_of_a_query_are_seen_with_each_document(endpoint: Endpoint) -> None:
    """In vLLM's spelling, an object with content, and in SGLang's, a list of parts."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "a"}, picture]
    for query in ({"content": parts}, parts):
        facts = parse(endpoint, query=query, documents=["b", {"content": [picture]}, parts])
        assert (facts.shared_texts, facts.texts) == (("a",), ("b", "a"))
        assert (facts.images, facts.prompts) == (3 + 2, 3)


def test_a_long_query_for_many_documents_is_held_once() -> None:
    """It is counted with each of them without being tokenized as often."""
    query = "x" * 100_000
    facts = parse(Endpoint.RERANK, query=query, documents=["a"] * 1_000)
    assert (facts.shared_texts, facts.prompts) == ((query,), 1_000)
    assert len(facts.texts) == 1_000


@pytest.mark.parametrize("endpoint", OF_PAIRS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": "a"}, "documents"),
        ({"documents": ["a"]}, "query"),
        ({"text_1": "a", "text_2": None}, "documents"),
        ({"text_2": "a"}, "query"),
    ],
)
def test_a_pair_has_two_sides(endpoint: Endpoint, fields: dict[str, Any], param: str) -> None:
    """One without the other is refused."""
    error = refusal(endpoint, json.dumps(fields).encode())
    assert (error.code, error.param) == (ErrorCode.MISSING_PARAMETER, param)


@pytest.mark.parametrize("endpoint", OF_PAIRS)
def test_odd_pairs_never_raise(endpoint: Endpoint) -> None:
    """What is there is counted, and the backend judges it."""
    facts = parse(endpoint, query=5, documents=[None, 7, {}, {"zzz": "x"}, [], True, "a"])
    assert (facts.texts, facts.shared_texts, facts.prompts) == (("a",), (), 7)
    assert parse(endpoint, query="a", documents=[]).prompts == 1


def test_the_number_of_documents_is_bounded() -> None:
    """As that of all pieces of a request."""
    body = json.dumps({"query": "a", "documents": ["b"] * (MAX_PIECES + 1)}).encode()
    assert refusal(Endpoint.RERANK, body).code == ErrorCode.ARRAY_TOO_LONG


@pytest.mark.parametrize(
    ("fields", "texts", "overhead"),
    [
        ({"prompt": "a b"}, ("a b",), 0),
        ({"prompt": ["a", "b"]}, ("a", "b"), 0),
        ({"messages": [{"role": "user", "content": "a"}]}, ("a",), 7),
        (
            {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]},
            *(("a", '[{"type":"function"}]'), 7),
        ),
        ({"prompt": "b", "messages": [{"role": "user", "content": "a"}]}, ("b", "a"), 7),
    ],
)
def test_what_is_to_be_tokenized_is_read(
    fields: dict[str, Any], texts: tuple[str, ...], overhead: int
) -> None:
    """A prompt, a chat with its tools, or both."""
    facts = parse(Endpoint.TOKENIZE, **fields)
    assert (facts.texts, facts.overhead_tokens, facts.decodes) == (texts, overhead, False)


@pytest.mark.parametrize(
    ("tokens", "ids"), [([1, 2, 3], 3), ([[1, 2], [3]], 3), ([], 0), ([2**40], 1)]
)
def test_ids_to_be_turned_into_text_are_counted(tokens: Any, ids: int) -> None:
    """None at all is legal."""
    assert parse(Endpoint.DETOKENIZE, tokens=tokens).token_ids == ids


@pytest.mark.parametrize("tokens", ["abc", 5, {}, [1.5], [None], [1, "a"], True])
def test_other_tokens_are_refused(tokens: Any) -> None:
    """They are integers."""
    error = refusal(Endpoint.DETOKENIZE, json.dumps({"tokens": tokens}).encode())
    assert (error.code, error.param) == (ErrorCode.INVALID_TYPE, "tokens")


@pytest.mark.parametrize(
    ("fields", "stream"),
    [({}, False), ({"stream_format": "sse"}, True), ({"stream_format": "audio"}, False)],
)
def test_speech_is_flat_beside_its_text(fields: dict[str, Any], *, stream: bool) -> None:
    """The text and how to speak it are read; the sound is no text."""
    facts = parse(
        Endpoint.SPEECH, model="tts", input="hi", voice="alloy", instructions="slowly", **fields
    )
    assert (facts.texts, facts.flat, facts.decodes) == (("hi", "slowly"), True, False)
    assert (facts.stream, facts.sequences, facts.max_output_tokens) == (stream, 1, 0)


@pytest.mark.parametrize(
    ("endpoint", "param"), [(Endpoint.SPEECH, "input"), (Endpoint.IMAGES, "prompt")]
)
@pytest.mark.parametrize("given", [5, ["hi"], {}, True])
def test_what_is_spoken_or_drawn_is_a_text(endpoint: Endpoint, param: str, given: Any) -> None:
    """And one only."""
    error = refusal(endpoint, json.dumps({param: given}).encode())
    assert (error.code, error.param) == (ErrorCode.INVALID_TYPE, param)


@pytest.mark.parametrize(("n", "sequences"), [(None, 1), (1, 1), (10, 10)])
def test_each_picture_is_flat(n: int | None, sequences: int) -> None:
    """Ten of them cost ten times as much as one."""
    facts = parse(Endpoint.IMAGES, prompt="a cat", n=n, size="1024x1024", quality="hd")
    assert (facts.texts, facts.flat, facts.sequences) == (("a cat",), True, sequences)
    assert (facts.decodes, facts.max_output_tokens) == (False, 0)


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", 10**9])
def test_an_odd_number_of_pictures_is_refused(n: Any) -> None:
    """As of sequences."""
    error = refusal(Endpoint.IMAGES, json.dumps({"prompt": "a", "n": n}).encode())
    assert error.param == "n"


@pytest.mark.parametrize("endpoint", OF_INPUTS)
def test_conversations_to_embed_are_bounded(endpoint: Endpoint) -> None:
    """As batches of a chat are."""
    fields = SMALLEST[endpoint] | {"messages": [[{"role": "user"}]] * (MAX_PROMPTS + 1)}
    assert refusal(endpoint, json.dumps(fields).encode()).code == ErrorCode.ARRAY_TOO_LONG
