"""
One request body of the OpenAI family, read into the facts that its cost depends on.

Bodies come from strangers. Whatever they hold, the answer is `RequestFacts` of finite, bounded
numbers or a `RequestError`; no other exception leaves this file. Where readers of JSON could disagree
about a body (repeated fields, numbers that are not numbers, other encodings) it is refused, so that
the backend never sees another request than the one that was counted.
"""

from dataclasses import dataclass

from envoy_tokenpools.openai.body import decode_fields
from envoy_tokenpools.openai.codes import ErrorCode, malformed
from envoy_tokenpools.openai.endpoint import Endpoint, endpoint_of
from envoy_tokenpools.openai.fields import Fields, UsageWish, flag, integer, usage_wish
from envoy_tokenpools.openai.generating import settings_of_generate
from envoy_tokenpools.openai.prompt import Prompt
from envoy_tokenpools.openai.shapes import read_body

__all__ = [
    "MAX_MODEL_CHARS",
    "MAX_OUTPUT_TOKENS",
    "MAX_SEQUENCES",
    "Endpoint",
    "RequestFacts",
    "UsageWish",
    "endpoint_of",
    "facts_without_body",
    "parse_request",
]

MAX_OUTPUT_TOKENS = 2**31 - 1
"""Largest stated maximum: a 32-bit integer in every backend, and no context comes near it."""

MAX_SEQUENCES = 16_384
"""Largest `n` or `best_of`: vLLM's bound. OpenAI's is 128, and no pool holds as many anyway."""

MAX_MODEL_CHARS = 16_384
"""Longest model name; those on public hubs are under 130. Up to here, a name that no pool has is told as such."""

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_LIMITS_OF_GENERATE = (*_LIMITS, "max_new_tokens")
_WIDTHS = ("n", "best_of")
_WIDTHS_OF_GENERATE = (*_WIDTHS, "beam_width")


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """
    What one request states about its own cost.

    Attributes:
        endpoint: where it was sent; of INVOCATIONS, the endpoint whose shape the body has.
        model: the name asked for; None where absent.
        texts: what the backend will read, each to be tokenized by itself; never empty strings.
        shared_texts: what it reads with every one of the `prompts` (the query of a reranking): the tokens
            of these count that many times.
        token_ids: prompt tokens that came as ids.
        overhead_tokens: framing that a chat template adds around messages.
        images: pictures and videos of the prompt.
        audio_clips: audio clips and files of the prompt.
        prompts: prompts, inputs or pairs that are handled independently.
        sequences: outputs generated at the same time; 1 where nothing is generated.
        max_output_tokens: per sequence, the largest of the maxima given; None where none is, 0 where
            no tokens are generated.
        stream: whether the answer comes as server-sent events.
        usage_wish: what was said about usage in that stream.
        echo: whether the answer repeats the prompt.
        flat: whether each of `sequences` costs the pool's flat amount, beside the texts: pictures,
            speech, files, and data for plugins.
    """

    endpoint: Endpoint
    model: str | None
    texts: tuple[str, ...]
    shared_texts: tuple[str, ...]
    token_ids: int
    overhead_tokens: int
    images: int
    audio_clips: int
    prompts: int
    sequences: int
    max_output_tokens: int | None
    stream: bool
    usage_wish: UsageWish
    echo: bool
    flat: bool

    @property
    def decodes(self) -> bool:
        """Whether tokens are generated at all."""
        return self.endpoint.decodes


def parse_request(endpoint: Endpoint, body: bytes) -> RequestFacts:
    """
    The facts of `body` as sent to `endpoint`; a form with a file is never looked into.

    Raises:
        RequestError: 400, with an `ErrorCode`, for a body that is not a request of this endpoint.
    """
    if not endpoint.reads_body:
        return facts_without_body(endpoint)
    prompt = Prompt()
    try:
        fields = decode_fields(body)
        shape = read_body(endpoint, fields, prompt)
    except RecursionError:
        raise malformed(ErrorCode.INVALID_JSON, "The body is nested too deeply.") from None
    sequences = 1
    max_output_tokens: int | None = 0
    stream = echo = False
    if shape.decodes:
        stream = flag(fields, "stream")
        echo = flag(fields, "echo")
        sequences, max_output_tokens = _generation(shape, fields, echo=echo)
        sequences *= prompt.prompts
    elif shape is Endpoint.IMAGES:
        stream = flag(fields, "stream")
        sequences = integer(fields, "n", 1, MAX_SEQUENCES) or 1
    elif shape is Endpoint.SPEECH:
        stream = fields.get("stream_format") == "sse"
    return RequestFacts(
        shape,
        _model(fields),
        tuple(prompt.texts),
        tuple(prompt.shared_texts),
        prompt.token_ids,
        prompt.overhead_tokens,
        prompt.images,
        prompt.audio_clips,
        prompt.prompts,
        sequences,
        max_output_tokens,
        stream,
        usage_wish(fields),
        echo,
        prompt.flat or shape.flat,
    )


def facts_without_body(endpoint: Endpoint) -> RequestFacts:
    """The facts of a request whose body is not read (`Endpoint.reads_body`): one flat amount."""
    return RequestFacts(
        endpoint=endpoint,
        model=None,
        texts=(),
        shared_texts=(),
        token_ids=0,
        overhead_tokens=0,
        images=0,
        audio_clips=0,
        prompts=1,
        sequences=1,
        max_output_tokens=0,
        stream=False,
        usage_wish=UsageWish.SILENT,
        echo=False,
        flat=True,
    )


def _generation(shape: Endpoint, fields: Fields, *, echo: bool) -> tuple[int, int | None]:
    """Sequences of each prompt, and the most that each of them may generate."""
    if shape is Endpoint.GENERATE:
        settings = settings_of_generate(fields)
        width = max(_largest(one, _WIDTHS_OF_GENERATE, 1, MAX_SEQUENCES) or 1 for one in settings)
        limits = [_largest(one, _LIMITS_OF_GENERATE, 0, MAX_OUTPUT_TOKENS) for one in settings]
        return width, max((limit for limit in limits if limit is not None), default=None)
    width = _largest(fields, _WIDTHS, 1, MAX_SEQUENCES) or 1
    if shape is Endpoint.MESSAGES:
        return width, _limit_with_thinking(fields)
    # Scoring a prompt (echo, generate nothing) is the one use of a maximum of zero.
    least = 0 if echo and shape is Endpoint.COMPLETIONS else 1
    return width, _largest(fields, _LIMITS, least, MAX_OUTPUT_TOKENS)


def _limit_with_thinking(fields: Fields) -> int | None:
    """
    Anthropic's `max_tokens`, which may be 0 (fill the cache, generate nothing).

    It includes the thinking, whose budget has to be below it; where it is not, the larger one counts.
    """
    limit = _largest(fields, _LIMITS, 0, MAX_OUTPUT_TOKENS)
    thinking = fields.get("thinking")
    if limit is None or type(thinking) is not dict:
        return limit
    budget = integer(thinking, "budget_tokens", 0, MAX_OUTPUT_TOKENS, "thinking.")
    return max(limit, budget or 0)


def _largest(fields: Fields, names: tuple[str, ...], least: int, most: int) -> int | None:
    """
    The largest of what the names state; None where all are silent.

    Clients and backends disagree on which of them counts: the largest may be generated.
    """
    largest: int | None = None
    for name in names:
        stated = integer(fields, name, least, most)
        if stated is not None and (largest is None or stated > largest):
            largest = stated
    return largest


def _model(fields: Fields) -> str | None:
    model = fields.get("model")
    if model is None:
        return None
    if type(model) is not str:
        raise malformed(ErrorCode.INVALID_TYPE, "'model' must be a string.", "model")
    if len(model) > MAX_MODEL_CHARS:
        text = f"'model' must not be longer than {MAX_MODEL_CHARS} characters."
        raise malformed(ErrorCode.STRING_TOO_LONG, text, "model")
    return model
