"""
Which function reads the body of which endpoint.
"""

from collections.abc import Callable, Mapping

from envoy_tokenpools.openai import generating, reading
from envoy_tokenpools.openai.endpoint import Endpoint
from envoy_tokenpools.openai.fields import Fields, missing
from envoy_tokenpools.openai.prompt import Prompt

_READERS: Mapping[Endpoint, Callable[[Fields, Prompt], None]] = {
    Endpoint.CHAT: generating.chat,
    Endpoint.COMPLETIONS: generating.completions,
    Endpoint.RESPONSES: generating.responses,
    Endpoint.MESSAGES: generating.messages,
    Endpoint.GENERATE: generating.generate,
    Endpoint.EMBEDDINGS: reading.inputs,
    Endpoint.POOLING: reading.pooling,
    Endpoint.CLASSIFY: reading.inputs,
    Endpoint.SCORE: reading.pairs,
    Endpoint.RERANK: reading.pairs,
    Endpoint.TOKENIZE: reading.tokenize,
    Endpoint.DETOKENIZE: reading.detokenize,
    Endpoint.COUNT_TOKENS: generating.messages,
    Endpoint.SPEECH: reading.speech,
    Endpoint.IMAGES: reading.images,
}

_INVOCATIONS = (
    (Endpoint.CHAT, ("messages",)),
    (Endpoint.COMPLETIONS, ("prompt", "prompt_embeds")),
    (Endpoint.GENERATE, ("inputs",)),
    (Endpoint.SCORE, ("query", "queries", "data_1", "text_1")),
    (Endpoint.POOLING, ("input", "data")),
)
"""The shapes that `/invocations` takes, each with the fields that it is known by."""


def read_body(endpoint: Endpoint, fields: Fields, prompt: Prompt) -> Endpoint:
    """
    Read `fields` into `prompt`; returns the endpoint whose shape they have.

    Only INVOCATIONS has none of its own. Which shape a backend sees in a body that has several depends
    on its model, so all of them are read, and the first that generates (if any does) is returned.

    Raises:
        RequestError: 400, for a body that is not a request of this endpoint.
        RecursionError: when it is nested too deeply.
    """
    if endpoint is not Endpoint.INVOCATIONS:
        _READERS[endpoint](fields, prompt)
        return endpoint
    shapes = [
        shape
        for shape, names in _INVOCATIONS
        if any(fields.get(name) is not None for name in names)
    ]
    if not shapes:
        raise missing("messages")
    for shape in shapes:
        _READERS[shape](fields, prompt)
    return shapes[0]
