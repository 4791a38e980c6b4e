"""
What the endpoints read that generate no text: embeddings, scores, token counts, speech and pictures.

Written like `generating`: one function for each, and every place is read that a backend may read.
"""

from envoy_tokenpools.openai.codes import ErrorCode, malformed
from envoy_tokenpools.openai.fields import Fields, missing, required
from envoy_tokenpools.openai.generating import add_template, chat
from envoy_tokenpools.openai.prompt import Prompt

_INPUTS = ("input", "inputs", "texts", "text", "input_ids")
_QUERIES = ("queries", "data_1", "text_1")
_DOCUMENTS = ("documents", "items", "data_2", "text_2", "texts")


def inputs(fields: Fields, prompt: Prompt) -> None:
    """`/v1/embeddings`, Cohere's `/v2/embed`, and `/classify`: inputs or conversations."""
    given = [name for name in _INPUTS if fields.get(name) is not None]
    images = fields.get("images")
    conversation = fields.get("messages")
    if not given and images is None and conversation is None:
        raise missing("input")
    for name in given:
        prompt.add_inputs(fields[name], name, None)
    if conversation is not None:
        prompt.add_conversations(conversation, "messages")
    if type(images) is list:
        prompt.prompts = max(prompt.prompts, len(images))
    prompt.add_images(images)
    add_template(fields, prompt)


def pooling(fields: Fields, prompt: Prompt) -> None:
    """`/pooling`: as `inputs`, or data for a plugin of the backend, which may be anything."""
    if fields.get("data") is None:
        inputs(fields, prompt)
    else:
        prompt.flat = True
        for name in _INPUTS:
            prompt.add_content(fields.get(name))


def pairs(fields: Fields, prompt: Prompt) -> None:
    """
    `/score` and `/rerank`: pairs of a query and a document.

    A cross encoder reads both together, so that a single query is read with each of the documents.
    Several queries are paired one by one.
    """
    documents = sum(_add_side(fields.get(name), prompt) for name in _DOCUMENTS)
    if not documents:
        raise missing("documents")
    single = Prompt()
    single.add_content(fields.get("instruction"))
    single.add_content(fields.get("instruct"))
    add_template(fields, single)
    queries = 0
    if fields.get("query") is not None:
        queries = 1
        single.add_each([fields["query"]])
    for name in _QUERIES:
        value = fields.get(name)
        several = type(value) is list and len(value) > 1
        queries = max(queries, _add_side(value, prompt if several else single))
    if not queries:
        raise missing("query")
    count = max(queries, documents)
    prompt.prompts = max(prompt.prompts, count)
    prompt.shared_texts += single.texts
    prompt.token_ids += single.token_ids * count
    prompt.images += single.images * count
    prompt.audio_clips += single.audio_clips * count


def tokenize(fields: Fields, prompt: Prompt) -> None:
    """`/tokenize`: a prompt, or what a chat reads."""
    given = fields.get("prompt")
    if given is not None:
        prompt.add_inputs(given, "prompt", None)
    if given is None or fields.get("messages") is not None:
        if fields.get("messages") is None:
            raise missing("prompt")
        chat(fields, prompt)


def detokenize(fields: Fields, prompt: Prompt) -> None:
    """`/detokenize`: token ids, of one text or of several."""
    tokens = required(fields, "tokens")
    if type(tokens) is not list:
        text = "'tokens' must be an array of token ids."
        raise malformed(ErrorCode.INVALID_TYPE, text, "tokens")
    if tokens:
        prompt.add_inputs(tokens, "tokens", None)


def speech(fields: Fields, prompt: Prompt) -> None:
    """`/v1/audio/speech`: the text to be spoken, and how."""
    prompt.add_content(_text(fields, "input"))
    prompt.add_content(fields.get("instructions"))


def images(fields: Fields, prompt: Prompt) -> None:
    """`/v1/images/generations`: the description; how many of them is the request's `n`."""
    prompt.add_content(_text(fields, "prompt"))


def _text(fields: Fields, name: str) -> str:
    value = required(fields, name)
    if type(value) is not str:
        raise malformed(ErrorCode.INVALID_TYPE, f"'{name}' must be a string.", name)
    return value


def _add_side(value: object, side: Prompt) -> int:
    """One side of the pairs: a text, parts, token ids, or an array of such; returns how many it has."""
    if value is None:
        return 0
    if type(value) is list and set(map(type, value)) != {int}:
        side.add_each(value)
        return max(1, len(value))
    side.add_each([value])
    return 1
