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
}
"""The smallest proper request of each endpoint."""


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
