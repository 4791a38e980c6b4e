"""
Bodies of each endpoint, and what becomes of them.
"""

import json
from typing import Any

from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.openai.request import Endpoint, RequestFacts, parse_request

SMALLEST: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    Endpoint.COMPLETIONS: {"model": "m", "prompt": "hi"},
    Endpoint.EMBEDDINGS: {"model": "m", "input": "hi"},
    Endpoint.RESPONSES: {"model": "m", "input": "hi"},
    Endpoint.MESSAGES: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    Endpoint.GENERATE: {"model": "m", "token_ids": [1], "sampling_params": {}},
    Endpoint.INVOCATIONS: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    Endpoint.POOLING: {"model": "m", "input": "hi"},
    Endpoint.CLASSIFY: {"model": "m", "input": "hi"},
    Endpoint.SCORE: {"model": "m", "text_1": "hi", "text_2": "ho"},
    Endpoint.RERANK: {"model": "m", "query": "hi", "documents": ["ho"]},
    Endpoint.TOKENIZE: {"model": "m", "prompt": "hi"},
    Endpoint.DETOKENIZE: {"model": "m", "tokens": [1]},
    Endpoint.COUNT_TOKENS: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    Endpoint.SPEECH: {"model": "m", "input": "hi", "voice": "alloy"},
    Endpoint.IMAGES: {"model": "m", "prompt": "hi"},
}
"""The smallest proper request of each endpoint that reads bodies."""

READING = tuple(SMALLEST)
DECODING = tuple(endpoint for endpoint in SMALLEST if endpoint.decodes)


def parse(endpoint: Endpoint, **fields: Any) -> RequestFacts:
    """The facts of a body with exactly these fields."""
    return parse_request(endpoint, json.dumps(fields).encode())


def outcome(endpoint: Endpoint, body: bytes) -> RequestFacts | RequestError:
    """What `body` comes to; any other exception is a fault and passes through."""
    try:
        return parse_request(endpoint, body)
    except RequestError as error:
        return error


def refusal(endpoint: Endpoint, body: bytes) -> RequestError:
    """The error that this body gets; it is a 400 in any case."""
    error = outcome(endpoint, body)
    assert isinstance(error, RequestError)
    assert error.status == 400
    return error
