"""
What a request asks the backend to read: texts, token ids, pictures and clips, pulled out of its body.

Everything that a chat template may render is a text; encoded media never are. Parts of unknown kinds
add the `text` they carry and nothing else, and never raise: the backend judges them, we only count.
"""

from collections.abc import Callable, Mapping, Sized
from itertools import chain

import msgspec

from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.openai.codes import ErrorCode, malformed, too_many

TOKENS_PER_MESSAGE = 4
"""Three that frame a ChatML message and one for its role (OpenAI cookbook, counting chat tokens)."""

TOKENS_PRIMING_REPLY = 3
"""Every ChatML reply is primed with `<|start|>assistant<|message|>` (the same source)."""

MAX_PROMPTS = 2_048
"""Prompts in one completion request; OpenAI's own bound on arrays of inputs."""

MAX_PIECES = 65_536
"""
Messages, parts, tool calls and inputs of one request together: far more than any conversation has, and
few enough to be walked through in some milliseconds.
"""

MAX_USUAL_ID_CHARS = 64
"""Longest identifier of a call that is no text: a UUID has 36 characters, those of the APIs up to 60."""

EMBEDS_BYTES_PER_TOKEN = 8_192
"""
Bytes of one token that comes as its embedding: 4,096 numbers of 16 bits, the width of a model of 8
billion parameters. The width of the pool's own model is not known here.
"""

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

_encode = msgspec.json.encode


class Prompt:
    """
    Gathers what one body gives the backend to read.

    Attributes:
        texts: to be tokenized, each by itself; never empty strings.
        token_ids: prompt tokens that came as ids.
        overhead_tokens: framing that a chat template adds around messages.
        images: pictures and videos.
        audio_clips: audio clips and files.
        prompts: prompts or inputs that the backend handles independently.
        shared_texts: texts that the backend reads again with every one of the prompts.
        flat: whether something is asked for that is not counted in tokens.
    """

    __slots__ = (
        "_pieces",
        "audio_clips",
        "flat",
        "images",
        "overhead_tokens",
        "prompts",
        "shared_texts",
        "texts",
        "token_ids",
    )

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids = 0
        self.overhead_tokens = 0
        self.images = 0
        self.audio_clips = 0
        self.prompts = 1
        self.shared_texts: list[str] = []
        self.flat = False
        self._pieces = 0

    def add_messages(self, messages: object, param: str) -> None:
        """
        Chat messages or Responses items.

        Raises:
            RequestError: 400, unless `messages` is a list, not empty, of objects.
        """
        if type(messages) is not list:
            text = f"'{param}' must be an array of objects."
            raise malformed(ErrorCode.INVALID_TYPE, text, param)
        if not messages:
            raise malformed(ErrorCode.EMPTY_ARRAY, f"'{param}' must not be empty.", param)
        self._take_up(messages)
        self.overhead_tokens += TOKENS_PER_MESSAGE * len(messages)
        for index, message in enumerate(messages):
            if type(message) is not dict:
                path = f"{param}[{index}]"
                raise malformed(ErrorCode.INVALID_TYPE, f"'{path}' must be an object.", path)
            self._add_object(message)

    def add_conversations(self, messages: object, param: str) -> None:
        """
        Messages of one conversation, or an array of conversations, each a prompt of its own.

        Raises:
            RequestError: 400, for any other shape and for more than `MAX_PROMPTS` of them.
        """
        if type(messages) is not list or not messages or type(messages[0]) is not list:
            self.add_messages(messages, param)
            return
        if len(messages) > MAX_PROMPTS:
            raise too_many(param, MAX_PROMPTS, "conversations")
        self.prompts = max(self.prompts, len(messages))
        for index, conversation in enumerate(messages):
            self.add_messages(conversation, f"{param}[{index}]")

    def add_inputs(self, inputs: object, param: str, max_inputs: int | None) -> None:
        """
        The prompts of a completion or the inputs of an embedding.

        A text, token ids, or an array of either; also one conversation or several.

        Raises:
            RequestError: 400, for any other shape and for more than `max_inputs` of them.
        """
        if type(inputs) is str:
            self.add_content(inputs)
            return
        if type(inputs) is not list:
            raise _not_inputs(param)
        if not inputs:
            raise malformed(ErrorCode.EMPTY_ARRAY, f"'{param}' must not be empty.", param)
        kinds = set(map(type, inputs))
        if kinds == {int}:
            self.token_ids += len(inputs)
            return
        if max_inputs is not None and len(inputs) > max_inputs:
            raise too_many(param, max_inputs, "prompts")
        self.prompts = max(self.prompts, len(inputs))
        if kinds == {list}:
            self._add_arrays(inputs, param)
        elif kinds == {str}:
            self.add_content(inputs)
        elif kinds == {dict}:
            self._add_dialogue(inputs)
        else:
            raise _not_inputs(param)

    def add_each(self, values: list[object]) -> None:
        """Texts, parts, lists of parts or lists of token ids; anything else among them adds nothing."""
        self._take_up(values)
        for value in values:
            if type(value) is list and set(map(type, value)) == {int}:
                self.token_ids += len(value)
            else:
                self.add_content(value)

    def add_content(self, content: object) -> None:
        """
        A text, or parts of a message; anything else adds nothing.

        Raises:
            RequestError: 400, for more than `MAX_PIECES` altogether; so do the methods below.
        """
        if type(content) is str:
            if content:
                self.texts.append(content)
        elif type(content) is list:
            self._take_up(content)
            for part in content:
                if type(part) is dict:
                    self._add_part(part)
                elif type(part) is str and part:
                    self.texts.append(part)
        elif type(content) is dict:
            self._add_part(content)

    def add_json(self, value: object) -> None:
        """Schemas and arguments, which templates render as JSON; a string is taken as it stands."""
        if type(value) is str:
            self.add_content(value)
        elif value:
            self.texts.append(_encode(value).decode())

    def add_image(self, image: object) -> None:
        """A picture or video, whatever it holds: it counts a flat amount, unless it is null."""
        self.images += image is not None

    def add_images(self, images: object) -> None:
        """A picture or video, or lists of them within lists."""
        if type(images) is list:
            self._take_up(images)
            for image in images:
                self.add_images(image)
        else:
            self.add_image(images)

    def add_clip(self, clip: object) -> None:
        """An audio clip or file, likewise."""
        self.audio_clips += clip is not None

    def add_clips(self, clips: object) -> None:
        """An audio clip, or lists of them within lists."""
        if type(clips) is list:
            self._take_up(clips)
            for clip in clips:
                self.add_clips(clip)
        else:
            self.add_clip(clips)

    def add_embeds(self, encoded: object) -> None:
        """Tokens that come as their embeddings, in base64, or a list of such: counted by their size."""
        if type(encoded) is str:
            self.token_ids += -(-len(encoded) * 3 // 4 // EMBEDS_BYTES_PER_TOKEN)
        elif type(encoded) is list:
            self._take_up(encoded)
            for one in encoded:
                if type(one) is str:
                    self.add_embeds(one)

    def add_values(self, options: object) -> None:
        """Options that a chat template may render: what is a text among their values."""
        if type(options) is dict:
            self.add_content(list(options.values()))

    def add_source(self, source: object) -> None:
        """The source of an Anthropic document: its text where it has one, else a file."""
        if type(source) is dict and source.get("type") in ("text", "content"):
            self.add_content(source.get("data"))
            self.add_content(source.get("content"))
        elif type(source) is str:
            self.add_content(source)
        else:
            self.add_clip(source)

    def add_role(self, role: object) -> None:
        """A usual role is one token, counted as overhead; an invented one could hide a prompt."""
        if type(role) is str and role not in _ROLES:
            self.add_content(role)

    def add_id(self, identifier: object) -> None:
        """A usual identifier is part of the overhead, if it is rendered at all; a long one could hide a prompt."""
        if type(identifier) is str and len(identifier) > MAX_USUAL_ID_CHARS:
            self.add_content(identifier)

    def add_calls(self, calls: object) -> None:
        """Tool calls of a message, or the one function inside of such a call."""
        if type(calls) is dict:
            self._add_object(calls)
        elif type(calls) is list:
            self._take_up(calls)
            for call in calls:
                if type(call) is dict:
                    self._add_object(call)

    def _take_up(self, pieces: Sized) -> None:
        self._pieces += len(pieces)
        if self._pieces > MAX_PIECES:
            text = f"The request holds more than {MAX_PIECES} messages, parts, calls or inputs."
            raise malformed(ErrorCode.ARRAY_TOO_LONG, text)

    def _add_arrays(self, arrays: list[list[object]], param: str) -> None:
        self._take_up(arrays)
        kinds = set(map(type, chain.from_iterable(arrays)))
        if kinds <= {int}:
            self.token_ids += sum(map(len, arrays))
        elif kinds == {dict}:
            for conversation in arrays:
                self._add_dialogue(conversation)
        else:
            raise _not_inputs(param)

    def _add_dialogue(self, items: list[object]) -> None:
        """Inputs that are objects: parts, or the messages of a conversation."""
        self.add_content(items)
        messages = sum(type(item) is dict and "role" in item for item in items)
        self.overhead_tokens += TOKENS_PER_MESSAGE * messages

    def _add_part(self, part: dict[str, object]) -> None:
        kind = part.get("type")
        if kind == "prompt_embeds" or "prompt_embeds" in part:
            self.add_embeds(part.get("data"))
        reader = _MEDIA.get(kind) if type(kind) is str else None
        if reader is None:
            self._add_object(part)
        else:
            reader(self, part)

    def _add_object(self, value: dict[str, object]) -> None:
        for name, inner in value.items():
            reader = _READERS.get(name)
            if reader is not None:
                reader(self, inner)


_Reader = Callable[[Prompt, object], None]

_MEDIA: Mapping[str, _Reader] = {
    "image": Prompt.add_image,
    "image_embeds": Prompt.add_image,
    "image_url": Prompt.add_image,
    "input_image": Prompt.add_image,
    "computer_screenshot": Prompt.add_image,
    "video": Prompt.add_image,
    "image_pil": Prompt.add_image,
    "video_url": Prompt.add_image,
    "video_embeds": Prompt.add_image,
    "input_video": Prompt.add_image,
    "audio": Prompt.add_clip,
    "audio_embeds": Prompt.add_clip,
    "audio_url": Prompt.add_clip,
    "input_audio": Prompt.add_clip,
    "file": Prompt.add_clip,
    "input_file": Prompt.add_clip,
}
"""Types of parts that are counted and never read; also the fields that hold them in parts without a type."""

_READERS: Mapping[str, _Reader] = {
    **_MEDIA,
    "role": Prompt.add_role,
    "name": Prompt.add_content,
    "content": Prompt.add_content,
    "text": Prompt.add_content,
    "refusal": Prompt.add_content,
    "reasoning": Prompt.add_content,
    "reasoning_content": Prompt.add_content,
    "thinking": Prompt.add_content,
    "summary": Prompt.add_content,
    "output": Prompt.add_content,
    "stdout": Prompt.add_content,
    "stderr": Prompt.add_content,
    "title": Prompt.add_content,
    "context": Prompt.add_content,
    "source": Prompt.add_source,
    "tool_name": Prompt.add_content,
    "tool_plan": Prompt.add_content,
    "task": Prompt.add_id,
    "id": Prompt.add_id,
    "call_id": Prompt.add_id,
    "tool_call_id": Prompt.add_id,
    "tool_use_id": Prompt.add_id,
    "arguments": Prompt.add_json,
    "input": Prompt.add_json,
    "tools": Prompt.add_json,
    "definition": Prompt.add_json,
    "tool": Prompt.add_calls,
    "tool_calls": Prompt.add_calls,
    "function_call": Prompt.add_calls,
    "function": Prompt.add_calls,
    "custom": Prompt.add_calls,
}
"""Fields of messages, items, parts and tool calls that a chat template may render, each with how it is read."""


def _not_inputs(param: str) -> RequestError:
    text = f"'{param}' must be a string, an array of strings, or token ids."
    return malformed(ErrorCode.INVALID_TYPE, text, param)
