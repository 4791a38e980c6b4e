"""
What one response generated and which usage it reported, read from its decoded JSON.

Dialects: chat and legacy completions (`choices`), embeddings (usage only), transcriptions (`text`),
Responses (`response.*` events, `output`) and Anthropic messages (`message_*` and `content_block_*` events, `content`).
Everything is optional, and whatever has the wrong type is passed over: no backend's oddity may cost
a response its settlement. Memory is bounded whatever arrives.
"""

import io
import json
from typing import Any

import msgspec

MAX_TEXT_CHARS = 1024 * 1024
"""
Generated text held for counting, per response. At four characters per token it is 262,144 tokens,
twice the longest output that models of today allow; beyond it the caller estimates from the overflow.
"""

MAX_CHANNELS = 4096
"""
Texts held apart, and choices told apart, per response. OpenAI takes 2,048 prompts in one request; what
comes beyond shares one text, which changes the count by about a token per piece.
"""

MAX_TOKENS = 2**53
"""Largest count believed: above it a number is no longer exact in JSON, Lua or a float."""

_SHARED = -1

# Their deltas are no text: base64 of audio.
_BINARY_DELTAS = frozenset({"response.audio.delta", "response.output_audio.delta"})

_FINAL_EVENTS = frozenset(
    {"message_stop", "response.completed", "response.incomplete", "response.failed"}
)


class Message(msgspec.Struct):
    """The top-level fields, of one stream event or of a whole body, that are worth decoding."""

    choices: Any = None
    usage: Any = None
    error: Any = None
    object: Any = None
    type: Any = None
    response: Any = None
    message: Any = None
    output: Any = None
    content: Any = None
    item: Any = None
    content_block: Any = None
    text: Any = None
    delta: Any = None
    index: Any = None
    output_index: Any = None
    content_index: Any = None
    summary_index: Any = None
    meta_info: Any = None
    generated_text: Any = None


_decode = msgspec.json.Decoder(Message).decode


def decode_message(payload: bytes) -> Message:
    """
    Decode one JSON object, leniently where backends are known to be careless.

    The standard library reads what msgspec refuses: halves of a surrogate pair (an emoji cut between
    two deltas) and NaN. Broken UTF-8 is replaced, as in an event stream. JSON that is no object is an
    empty message.

    Raises:
        ValueError: it is no JSON, or nested too deeply.
    """
    try:
        return _decode(payload)
    except (ValueError, RecursionError):
        pass
    try:
        fields = json.loads(payload.decode("utf-8", "replace"))
    except RecursionError as error:
        message = "nested too deeply"
        raise ValueError(message) from error
    if not isinstance(fields, dict):
        return Message()
    return Message(**{name: fields[name] for name in Message.__struct_fields__ if name in fields})


class _Choice:
    """One of the answers that a response generates side by side."""

    __slots__ = ("completion_tokens", "finished")

    def __init__(self) -> None:
        self.finished = False
        self.completion_tokens = 0  # largest reported for this choice alone


class Transcript:
    """
    Collects the generated texts and the reported usage of one response.

    Attributes:
        first_output: whether any text, reasoning or tool call was generated yet.
        error: whether the backend reported an error.
        overflow_chars: generated characters beyond `MAX_TEXT_CHARS`, which are not held.
        token_ids: generated tokens that came as ids, beside their text or in its place.
        is_known: whether anything was of a dialect that is read: else its silence says nothing.
    """

    __slots__ = (
        "_channels",
        "_choices",
        "_choices_tokens",
        "_completion_tokens",
        "_ended",
        "_held_chars",
        "_prompt_tokens",
        "_unreported",
        "error",
        "first_output",
        "is_known",
        "overflow_chars",
        "token_ids",
    )

    def __init__(self) -> None:
        self.first_output = False
        self.error = False
        self.overflow_chars = 0
        self.token_ids = 0
        self.is_known = False
        self._channels: dict[tuple[int | str, ...], io.StringIO] = {}
        self._choices: dict[int, _Choice] = {}
        self._held_chars = 0
        self._ended = False
        self._prompt_tokens: int | None = None
        self._choices_tokens = 0  # sum over choices of what was reported for each alone
        self._completion_tokens: int | None = None  # largest reported for all choices together
        self._unreported = False  # text came after the last report

    # What is asked of it

    @property
    def finished(self) -> bool:
        """Whether the stream was seen to end: a final event, or every choice's finish_reason."""
        return self._ended or (
            bool(self._choices) and all(choice.finished for choice in self._choices.values())
        )

    @property
    def prompt_tokens(self) -> int | None:
        """
        The prompt's tokens as reported.

        The largest value seen: per-choice reports repeat it, so a sum would count it again. A zero beside
        generated text is a placeholder, not a report.
        """
        return None if self.first_output and not self._prompt_tokens else self._prompt_tokens

    @property
    def completion_tokens(self) -> int | None:
        """
        The generated tokens as reported.

        The larger of the total and the sum over choices, each the largest of its cumulative values. None
        where text was generated after the last report (Anthropic says 1 at the start and the rest at the
        end, which a disconnect cuts off), or where a zero stands beside text.
        """
        if self.first_output and (self._unreported or not self._completion_tokens):
            return None
        return self._completion_tokens

    def texts(self) -> tuple[str, ...]:
        """Every channel's joined text, in order of appearance; always valid Unicode."""
        return tuple(_mended(channel.getvalue()) for channel in self._channels.values())

    # What it is told

    def read_event(self, event: Message) -> None:
        """Take in one event of a stream."""
        choice = None
        if isinstance(event.choices, list):
            choice = self._read_choices(event.choices, "delta")
        elif isinstance(event.type, str):
            self.is_known = True
            self._read_typed_event(event.type, event)
        self._read_outcome(event, choice)

    def read_body(self, body: Message) -> None:
        """Take in a whole body that is not a stream."""
        if isinstance(body.choices, list):
            self._read_choices(body.choices, "message")
        if isinstance(body.output, list):
            self.is_known = True
            for place, item in enumerate(body.output):
                if isinstance(item, dict):
                    self._read_item(place, item)
        if isinstance(body.content, list):
            self.is_known = True
            for place, block in enumerate(body.content):
                if isinstance(block, dict):
                    self._read_block(place, block)
        for text in (body.text, body.generated_text):
            self.is_known = self.is_known or isinstance(text, str)
            self._write(("text",), text)
        self._read_outcome(body, None)
        self._ended = True

    def end(self) -> None:
        """The stream said that it is over."""
        self._ended = True

    # Usage and errors

    def _read_outcome(self, message: Message, choice: _Choice | None) -> None:
        for usage in (message.usage, message.meta_info):  # SGLang's own dialect has it in meta_info
            if usage is not None:
                self._read_usage(usage, choice)
        for nested in (message.response, message.message):
            if isinstance(nested, dict):
                self._read_usage(nested.get("usage"), None)
                if nested.get("error"):
                    self.error = True
        if message.error or message.type == "error" or message.object == "error":
            self.error = True

    def _read_usage(self, usage: object, choice: _Choice | None) -> None:
        if not isinstance(usage, dict):
            return
        prompt = _tokens(usage, "prompt_tokens", "input_tokens")
        if prompt is not None:
            self._prompt_tokens = max(prompt, self._prompt_tokens or 0)
        completion = _tokens(usage, "completion_tokens", "output_tokens")
        if completion is None:
            return
        self._unreported = False
        if choice is not None:
            self._choices_tokens += max(0, completion - choice.completion_tokens)
            choice.completion_tokens = max(completion, choice.completion_tokens)
            completion = min(self._choices_tokens, MAX_TOKENS)
        self._completion_tokens = max(completion, self._completion_tokens or 0)

    # Chat and legacy completions

    def _read_choices(self, choices: list[Any], part: str) -> _Choice | None:
        """Read them all; returns the choice if there is exactly one, for usage is then its own."""
        choice = None
        self.is_known = True
        for place, fields in enumerate(choices):
            if isinstance(fields, dict):
                choice = self._read_choice(_place(fields.get("index"), place), fields, part)
        return choice if len(choices) == 1 else None

    def _read_choice(self, index: int, fields: dict[str, Any], part: str) -> _Choice:
        choice = self._choices.get(index) or self._open_choice(index)
        message = fields.get(part)
        if isinstance(message, dict):
            self._read_message(index, message)
        text = fields.get("text")
        if text:
            self._write((index, "content"), text)
        token_ids = fields.get("token_ids")
        if isinstance(token_ids, list) and token_ids:
            self.token_ids += len(token_ids)
            self.first_output = self._unreported = True
        if fields.get("finish_reason"):
            choice.finished = True
        return choice

    def _open_choice(self, index: int) -> _Choice:
        if len(self._choices) >= MAX_CHANNELS:
            index = _SHARED
        return self._choices.setdefault(index, _Choice())

    def _read_message(self, index: int, message: dict[str, Any]) -> None:
        content = message.get("content")
        if content:
            self._write((index, "content"), content)
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning:
            self._write((index, "reasoning"), reasoning)
        refusal = message.get("refusal")
        if refusal:
            self._write((index, "refusal"), refusal)
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            for place, call in enumerate(calls):
                if isinstance(call, dict):
                    tool = _place(call.get("index"), place)
                    self._read_function(index, tool, call.get("function"))
        if "function_call" in message:
            self._read_function(index, _SHARED, message["function_call"])

    def _read_function(self, index: int, tool: int, function: object) -> None:
        if isinstance(function, dict):
            self._write((index, "name", tool), function.get("name"))
            self._write((index, "arguments", tool), _spelled(function.get("arguments")))

    # Responses and Anthropic messages

    def _read_typed_event(self, kind: str, event: Message) -> None:
        if kind in _FINAL_EVENTS:
            self._ended = True
            self.error = self.error or kind == "response.failed"
        elif kind == "content_block_delta":
            if isinstance(event.delta, dict):
                self._read_block(_place(event.index, 0), event.delta)
        elif kind == "content_block_start":
            if isinstance(event.content_block, dict):
                self._read_block(_place(event.index, 0), event.content_block)
        elif kind == "response.output_item.added":
            if isinstance(event.item, dict):
                self._write(("name", _place(event.output_index, 0)), event.item.get("name"))
        elif kind.endswith(".delta") and kind not in _BINARY_DELTAS:
            part = event.content_index if event.summary_index is None else event.summary_index
            self._write((kind, _place(event.output_index, 0), _place(part, 0)), event.delta)

    def _read_item(self, place: int, item: dict[str, Any]) -> None:
        """One item of a Responses body's `output`: a message, reasoning or a call."""
        for field in ("content", "summary"):
            parts = item.get(field)
            if isinstance(parts, list):
                for number, part in enumerate(parts):
                    self._write((place, field, number), [part])
        self._write((place, "name"), item.get("name"))
        for field in ("arguments", "input"):
            self._write((place, field), _spelled(item.get(field)))

    def _read_block(self, place: int, block: dict[str, Any]) -> None:
        """One content block of Anthropic's, whole, opened or a delta of one."""
        for field in ("text", "thinking", "name", "partial_json"):
            self._write(("block", place, field), block.get(field))
        # A stream opens a tool call with an empty input and then spells the real one out.
        self._write(("block", place, "partial_json"), _spelled(block.get("input") or None))

    # Text

    def _write(self, key: tuple[int | str, ...], value: object) -> None:
        text = value if isinstance(value, str) else _text_of_parts(value)
        if not text:
            return
        self.first_output = True
        self._unreported = True
        room = MAX_TEXT_CHARS - self._held_chars
        if len(text) > room:
            self.overflow_chars += len(text) - room
            text = text[:room]
            if not text:
                return
        self._held_chars += len(text)
        channel = self._channels.get(key)
        if channel is None:
            if len(self._channels) >= MAX_CHANNELS:
                key = (_SHARED,)
            channel = self._channels.setdefault(key, io.StringIO())
        channel.write(text)


def _place(value: object, default: int) -> int:
    return value if isinstance(value, int) else default


def _tokens(usage: dict[str, Any], name: str, synonym: str) -> int | None:
    """The count under either name, whichever is credible; gateways fill the unused one with 0."""
    count = usage.get(name)
    if type(count) is int and 0 < count <= MAX_TOKENS:
        return count
    other = usage.get(synonym)
    if type(other) is int and 0 <= other <= MAX_TOKENS:
        return other
    return 0 if type(count) is int and count == 0 else None


def _text_of_parts(value: object) -> str:
    """Content given as a list of parts: strings, or objects with one text field."""
    if not isinstance(value, list):
        return ""
    texts = []
    for part in value:
        text = part
        if isinstance(part, dict):
            text = part.get("text") or part.get("thinking") or part.get("refusal")
        if isinstance(text, str):
            texts.append(text)
    return "".join(texts)


def _spelled(arguments: object) -> str:
    """Tool arguments as the model wrote them; backends that parsed them had them as JSON."""
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except RecursionError:
        return ""


def _mended(text: str) -> str:
    """The text with surrogate halves of neighbouring deltas joined, and stray ones replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
