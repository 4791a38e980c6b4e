"""
One request body of the OpenAI dialect, read into the facts that its cost depends on.

Bodies come from strangers. Whatever they hold, the answer is `RequestFacts` of finite, bounded
numbers or a `RequestError`; no other exception leaves this file. Where readers of JSON could disagree
about a body (repeated fields, numbers that are not numbers, other encodings) it is refused, so that
the backend never sees another request than the one that was counted.
"""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.openai.body import decode_fields
from envoy_tokenpools.openai.codes import ErrorCode, malformed
from envoy_tokenpools.openai.prompt import MAX_PROMPTS, TOKENS_PRIMING_REPLY, Prompt

MAX_OUTPUT_TOKENS = 2**31 - 1
"""Largest stated maximum: a 32-bit integer in every backend, and no context comes near it."""

MAX_SEQUENCES = 128
"""Largest `n` or `best_of`: OpenAI's bound."""

MAX_MODEL_CHARS = 256
"""Longest model name; the longest on public hubs are under 130."""

MAX_PATH_DECODINGS = 3
"""Percent-decodings of a path; each hop to the backend may do one."""


class Endpoint(enum.Enum):
    """The metered endpoints, by path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    RESPONSES = "/v1/responses"


_BY_PATH: Mapping[str, Endpoint] = {endpoint.value: endpoint for endpoint in Endpoint}


def endpoint_of(path: str) -> Endpoint | None:
    """
    The metered endpoint that a `:path` leads to, or None.

    A path counts as metered when any usual backend or proxy could take it for one: percent-encoded,
    with doubled or trailing slashes, dot segments, or blanks at the end of a segment (`$` of a
    regular expression, which Starlette routes by, matches before a final newline).
    """
    exact = path.partition("?")[0]
    return _BY_PATH.get(exact) or _BY_PATH.get(_normal(exact))


def _normal(path: str) -> str:
    for _ in range(MAX_PATH_DECODINGS):
        if "%" not in path:
            break
        path = unquote(path)
    segments: list[str] = []
    for raw in re.split(r"[/\\]", re.split(r"[?#;]", path, maxsplit=1)[0]):
        segment = raw.strip(" \t\n\v\f\r\0")
        if segment == "..":
            del segments[-1:]
        elif segment not in ("", "."):
            segments.append(segment)
    return "/" + "/".join(segments)


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """
    What one request states about its own cost.

    Attributes:
        endpoint: where it was sent.
        model: the name asked for; None where absent.
        texts: what the backend will read, each to be tokenized by itself; never empty strings.
        token_ids: prompt tokens that came as ids.
        overhead_tokens: framing that a chat template adds around messages.
        images: pictures and videos of the prompt.
        audio_clips: audio clips and files of the prompt.
        prompts: prompts or inputs that are handled independently.
        sequences: outputs generated at the same time; 1 where nothing is generated.
        max_output_tokens: per sequence, the largest of the maxima given; None where none is, 0 for
            embeddings.
        stream: whether the answer comes as server-sent events.
        usage_requested: whether the client asked for usage in that stream.
        echo: whether the answer repeats the prompt.
    """

    endpoint: Endpoint
    model: str | None
    texts: tuple[str, ...]
    token_ids: int
    overhead_tokens: int
    images: int
    audio_clips: int
    prompts: int
    sequences: int
    max_output_tokens: int | None
    stream: bool
    usage_requested: bool
    echo: bool

    @property
    def decodes(self) -> bool:
        """Whether tokens are generated at all."""
        return self.endpoint is not Endpoint.EMBEDDINGS


def parse_request(endpoint: Endpoint, body: bytes) -> RequestFacts:
    """
    The facts of `body` as sent to `endpoint`.

    Raises:
        RequestError: 400, with an `ErrorCode`, for a body that is not a request of this endpoint.
    """
    try:
        fields = decode_fields(body)
        prompt = _READ_PROMPT[endpoint](fields)
    except RecursionError:
        raise malformed(ErrorCode.INVALID_JSON, "The body is nested too deeply.") from None
    stream = usage_requested = echo = False
    sequences = 1
    max_output_tokens: int | None = 0
    if endpoint is not Endpoint.EMBEDDINGS:
        echo = _flag(fields, "echo")
        stream = _flag(fields, "stream")
        usage_requested = stream and _asks_for_usage(fields.get("stream_options"))
        sequences = prompt.prompts * max(
            _integer(fields, "n", 1, MAX_SEQUENCES) or 1,
            _integer(fields, "best_of", 1, MAX_SEQUENCES) or 1,
        )
        # Scoring a prompt (echo, generate nothing) is the one use of a maximum of zero.
        scores = echo and endpoint is Endpoint.COMPLETIONS
        max_output_tokens = _max_output_tokens(fields, 0 if scores else 1)
    return RequestFacts(
        endpoint,
        _model(fields),
        tuple(prompt.texts),
        prompt.token_ids,
        prompt.overhead_tokens,
        prompt.images,
        prompt.audio_clips,
        prompt.prompts,
        sequences,
        max_output_tokens,
        stream,
        usage_requested,
        echo,
    )


def _chat(fields: dict[str, Any]) -> Prompt:
    prompt = Prompt()
    prompt.add_messages(_required(fields, "messages"), "messages")
    prompt.overhead_tokens += TOKENS_PRIMING_REPLY
    for name in ("tools", "functions", "documents"):
        if name in fields:
            prompt.add_json(fields[name])
    form = fields.get("response_format")
    if type(form) is dict:
        prompt.add_json(form.get("json_schema"))
    return prompt


def _completions(fields: dict[str, Any]) -> Prompt:
    prompt = Prompt()
    # Without a prompt the backend starts from its own beginning-of-text token: legal, and one sequence.
    if fields.get("prompt") is not None:
        prompt.add_inputs(fields["prompt"], "prompt", MAX_PROMPTS)
    prompt.add_content(fields.get("suffix"))
    form = fields.get("response_format")
    if type(form) is dict:
        prompt.add_json(form.get("json_schema"))
    return prompt


def _embeddings(fields: dict[str, Any]) -> Prompt:
    prompt = Prompt()
    if fields.get("messages") is not None:
        prompt.add_messages(fields["messages"], "messages")
    else:
        prompt.add_inputs(_required(fields, "input"), "input", None)
    return prompt


def _responses(fields: dict[str, Any]) -> Prompt:
    prompt = Prompt()
    given = fields.get("input")
    if type(given) is str:
        prompt.add_content(given)
    elif given is not None:
        prompt.add_messages(given, "input")
        prompt.overhead_tokens += TOKENS_PRIMING_REPLY
    elif not any(fields.get(name) for name in ("prompt", "previous_response_id", "conversation")):
        raise _missing("input")
    prompt.add_content(fields.get("instructions"))
    template = fields.get("prompt")
    if type(template) is dict and type(template.get("variables")) is dict:
        prompt.add_content(list(template["variables"].values()))
    prompt.add_json(fields.get("tools"))
    text = fields.get("text")
    if type(text) is dict and type(text.get("format")) is dict and "schema" in text["format"]:
        prompt.add_json(text["format"])
    return prompt


_READ_PROMPT = {
    Endpoint.CHAT: _chat,
    Endpoint.COMPLETIONS: _completions,
    Endpoint.EMBEDDINGS: _embeddings,
    Endpoint.RESPONSES: _responses,
}


def _model(fields: dict[str, Any]) -> str | None:
    model = fields.get("model")
    if model is None:
        return None
    if type(model) is not str:
        raise malformed(ErrorCode.INVALID_TYPE, "'model' must be a string.", "model")
    if len(model) > MAX_MODEL_CHARS:
        text = f"'model' must not be longer than {MAX_MODEL_CHARS} characters."
        raise malformed(ErrorCode.STRING_TOO_LONG, text, "model")
    return model


def _max_output_tokens(fields: dict[str, Any], least: int) -> int | None:
    # Clients and backends disagree on which of the names counts: the largest may be generated.
    largest: int | None = None
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        stated = _integer(fields, name, least, MAX_OUTPUT_TOKENS)
        if stated is not None and (largest is None or stated > largest):
            largest = stated
    return largest


def _integer(fields: dict[str, Any], name: str, least: int, most: int) -> int | None:
    """A field from `least` to `most`; None where it is absent or null."""
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is float and value.is_integer():
        value = int(value)
    # bool is an int to Python, and 1 to lax backends: neither is meant by a client.
    if type(value) is not int:
        raise malformed(ErrorCode.INVALID_TYPE, f"'{name}' must be an integer.", name)
    if value < least:
        text = f"'{name}' must be at least {least}."
        raise malformed(ErrorCode.INTEGER_TOO_SMALL, text, name)
    if value > most:
        text = f"'{name}' must be at most {most}."
        raise malformed(ErrorCode.INTEGER_TOO_LARGE, text, name)
    return value


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is None:
        return False
    if type(value) is not bool:
        raise malformed(ErrorCode.INVALID_TYPE, f"'{name}' must be true or false.", name)
    return value


def _asks_for_usage(options: object) -> bool:
    return type(options) is dict and options.get("include_usage") is True


def _required(fields: dict[str, Any], name: str) -> object:
    value = fields.get(name)
    if value is None:
        raise _missing(name)
    return value


def _missing(name: str) -> RequestError:
    return malformed(ErrorCode.MISSING_PARAMETER, f"'{name}' is required.", name)
