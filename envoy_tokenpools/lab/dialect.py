"""
What a vLLM server understands of a request: bodies in, the planned replies or a refusal out. Pure.

The shapes of the refusals follow what vLLM 0.32 sends. Prompts are counted in words, a few more
per message: the laboratory needs stable numbers, not a vocabulary.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

MESSAGE_TOKENS = 3
"""What one message costs beside its words, as a chat template does."""

MAX_CHOICES = 128
"""Largest `n`; a typing error must not take the machine's memory."""

_TEXT = "the pool lends its idle tokens to whoever asks first and takes them back on demand"
_WORDS = tuple(_TEXT.split())
_Field = TypeVar("_Field")


class Api(enum.Enum):
    """The endpoints that generate or embed; the value is the path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    EMBEDDINGS = "/v1/embeddings"


@dataclass(frozen=True, slots=True)
class Offer:
    """
    What the simulated server serves.

    Attributes:
        models: names that it answers to.
        max_model_len: tokens of prompt and output that one sequence may have.
        reply_tokens: length at which a reply ends by itself, its end token included.
    """

    models: tuple[str, ...]
    max_model_len: int = 32_768
    reply_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error answer in vLLM's shape."""

    status: int
    message: str
    kind: str = "BadRequestError"
    param: str | None = None

    def body(self) -> bytes:
        """The JSON of the answer."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return msgspec.json.encode({"error": error})


@dataclass(frozen=True, slots=True)
class Reply:
    """
    One sequence as it will come: its text is known before the engine has run, word by word.

    Attributes:
        index: of the choice.
        prompt_tokens: of the prompt that it continues.
        output_tokens: tokens that it generates; 0 for an embedding.
        finish_reason: `length` or `stop`.
        last_piece: text of the last token where it is not a whole word: empty for an end token,
            the part before the stop string where one was met.
        stop_reason: the stop string that was met.
    """

    index: int
    prompt_tokens: int
    output_tokens: int
    finish_reason: str = "length"
    last_piece: str | None = None
    stop_reason: str | None = None

    def piece(self, number: int) -> str:
        """Text of the `number`-th token, counted from 1."""
        if number == self.output_tokens and self.last_piece is not None:
            return self.last_piece
        return _word(self.index, number)

    def text(self) -> str:
        """The whole text."""
        return "".join(self.piece(number) for number in range(1, self.output_tokens + 1))


@dataclass(frozen=True, slots=True)
class Question:
    """
    A request that will be served.

    Attributes:
        api: the endpoint.
        model: the model as the client named it.
        prompt_tokens: of all prompts together.
        replies: one per sequence.
        stream: whether the answer is a stream of events.
        include_usage: whether the stream ends with the usage.
        continuous_usage: whether every chunk has the usage so far.
    """

    api: Api
    model: str
    prompt_tokens: int
    replies: tuple[Reply, ...]
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


class _Part(msgspec.Struct):
    text: str = ""


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Body(msgspec.Struct):
    """The fields of every API that the simulator heeds; all others are ignored, as vLLM does."""

    model: str | None = None
    messages: list[_Message] | None = None
    prompt: str | list[object] | None = None
    input: str | list[object] | None = None
    instructions: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


def understand(api: Api, raw: bytes, offer: Offer) -> Question | Refusal:
    """
    Read a request body.

    Args:
        api: the endpoint it was sent to.
        raw: the body.
        offer: what is served.

    Returns:
        What will be answered, or the error that vLLM would send.
    """
    try:
        body = msgspec.json.decode(raw, type=_Body)
        prompts = _prompts(api, body)
    except (msgspec.DecodeError, msgspec.ValidationError) as fault:
        return Refusal(400, f"1 validation error:\n  {fault}", "Bad Request", "body")
    if body.stream_options is not None and not body.stream:
        message = "Stream options can only be defined when `stream=True`."
        return Refusal(400, f"{message} (parameter=stream_options)", param="stream_options")
    model = offer.models[0] if body.model is None else body.model
    if model not in offer.models:
        message = f"The model `{model}` does not exist. Valid aliases: {', '.join(offer.models)}."
        return Refusal(404, message, "NotFoundError", "model")
    if refusal := _too_long(api, prompts, _asked_tokens(body), offer):
        return refusal
    if (body.n or 1) > MAX_CHOICES:
        return Refusal(400, f"n must be at most {MAX_CHOICES}, got {body.n}.", param="n")
    options = body.stream_options or _StreamOptions()
    return Question(
        api=api,
        model=model,
        prompt_tokens=sum(prompts),
        replies=_replies(api, body, prompts, offer),
        stream=bool(body.stream) and api is not Api.EMBEDDINGS,
        include_usage=options.include_usage,
        continuous_usage=options.include_usage and options.continuous_usage_stats,
    )


def _prompts(api: Api, body: _Body) -> tuple[int, ...]:
    """Length of each prompt in tokens; a missing or impossible one raises ValidationError."""
    if api is Api.CHAT:
        return (_chat_tokens(_required("messages", body.messages)),)
    if api is Api.COMPLETIONS:
        return _text_prompts("prompt", body.prompt)
    if api is Api.EMBEDDINGS:
        return _text_prompts("input", body.input)
    instructions = len((body.instructions or "").split())
    given = _required("input", body.input)
    if isinstance(given, str):
        return (instructions + MESSAGE_TOKENS + len(given.split()),)
    return (instructions + _chat_tokens(msgspec.convert(given, list[_Message])),)


def _chat_tokens(messages: Sequence[_Message]) -> int:
    return sum(MESSAGE_TOKENS + _content_words(message.content) for message in messages)


def _content_words(content: str | list[_Part] | None) -> int:
    if content is None:
        return 0
    if isinstance(content, str):
        return len(content.split())
    return sum(len(part.text.split()) for part in content)


def _text_prompts(field: str, value: str | list[object] | None) -> tuple[int, ...]:
    """One text, one list of token ids, or a list of either."""
    given = _required(field, value)
    if isinstance(given, str):
        return (_word_count(given),)
    several = msgspec.convert(given, list[int | str | list[int]])
    if all(isinstance(entry, int) for entry in several):
        return (len(several),)
    counts: list[int] = []
    for entry in several:
        if isinstance(entry, int):
            message = f"{field} mixes token ids and texts"
            raise msgspec.ValidationError(message)
        counts.append(_word_count(entry) if isinstance(entry, str) else len(entry))
    return tuple(counts)


def _word_count(text: str) -> int:
    return max(1, len(text.split()))


def _required(field: str, value: _Field | None) -> _Field:
    if value is None:
        message = f"Field required: {field}"
        raise msgspec.ValidationError(message)
    return value


def _asked_tokens(body: _Body) -> int | None:
    for asked in (body.max_completion_tokens, body.max_output_tokens, body.max_tokens):
        if asked is not None:
            return asked
    return None


def _too_long(
    api: Api, prompts: Sequence[int], asked_tokens: int | None, offer: Offer
) -> Refusal | None:
    """Lengths that vLLM refuses; /v1/completions clips the output instead."""
    if asked_tokens is not None and asked_tokens < 1:
        message = f"max_tokens must be at least 1, got {asked_tokens}."
        message += f" (parameter=max_tokens, value={asked_tokens})"
        return Refusal(400, message, param="max_tokens")
    longest = max(prompts, default=0)
    if longest >= offer.max_model_len:
        message = (
            f"This model's maximum context length is {offer.max_model_len} tokens. However, your "
            f"prompt contains {longest} input tokens. Please reduce the length of the input "
            f"prompt. (parameter=input_tokens, value={longest})"
        )
        return Refusal(400, message, param="input_tokens")
    clips = api is Api.COMPLETIONS
    if asked_tokens is not None and longest + asked_tokens > offer.max_model_len and not clips:
        message = (
            f"max_tokens={asked_tokens} cannot be greater than max_model_len="
            f"{offer.max_model_len} less the prompt's {longest} tokens. Please request fewer "
            f"output tokens. (parameter=max_tokens, value={asked_tokens})"
        )
        return Refusal(400, message, param="max_tokens")
    return None


def _replies(api: Api, body: _Body, prompts: Sequence[int], offer: Offer) -> tuple[Reply, ...]:
    if api is Api.EMBEDDINGS:
        return tuple(Reply(index, prompt, 0) for index, prompt in enumerate(prompts))
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    copies = 1 if api is Api.RESPONSES else max(1, body.n or 1)
    asked_tokens = _asked_tokens(body)
    replies: list[Reply] = []
    for prompt in prompts:
        room = offer.max_model_len - prompt
        allowed = room if asked_tokens is None else min(asked_tokens, room)
        for _ in range(copies):
            reply = _reply(len(replies), prompt, allowed, body, offer)
            replies.append(_stopped(reply, stops) if stops else reply)
    return tuple(replies)


def _reply(index: int, prompt_tokens: int, allowed: int, body: _Body, offer: Offer) -> Reply:
    if body.ignore_eos or allowed < offer.reply_tokens:
        return Reply(index, prompt_tokens, allowed)
    return Reply(index, prompt_tokens, offer.reply_tokens, "stop", last_piece="")


def _stopped(reply: Reply, stops: Sequence[str]) -> Reply:
    """
    The reply cut before the first stop string; the token that completes it still counts.

    vLLM holds back text that may become a stop string. Here the words before it are out already.
    """
    text = ""
    for number in range(1, reply.output_tokens + 1):
        before = text
        text += reply.piece(number)
        found = [(text.find(stop), stop) for stop in stops if stop and stop in text]
        if found:
            at, stop = min(found)
            last_piece = text[len(before) : at] if at > len(before) else ""
            return Reply(
                reply.index, reply.prompt_tokens, number, "stop", last_piece, stop_reason=stop
            )
    return reply


def _word(index: int, number: int) -> str:
    """The `number`-th word of choice `index`; choices differ by where they start."""
    word = _WORDS[(index * 7 + number - 1) % len(_WORDS)]
    return word if number == 1 else f" {word}"
