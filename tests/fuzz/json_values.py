"""
Values as bodies of this family hold them, in their usual places and in others, and ways to write them down.
"""

import json
import random
from collections.abc import Callable
from typing import Any

NAMES = (
    *("role", "content", "name", "type", "text", "image_url", "input_audio", "file", "video_url"),
    *(
        "tool_calls",
        "function",
        "function_call",
        "arguments",
        "tool_call_id",
        "id",
        "input",
        "output",
    ),
    *(
        "reasoning",
        "reasoning_content",
        "thinking",
        "refusal",
        "summary",
        "source",
        "data",
        "tools",
    ),
    *("index", "delta", "message", "finish_reason", "usage", "prompt_tokens", "completion_tokens"),
    *(
        "input_tokens",
        "output_tokens",
        "include_usage",
        "max_tokens",
        "max_new_tokens",
        "n",
        "schema",
    ),
    *("prompt_embeds", "budget_tokens", "json_schema", "format", "custom", "definition", "url"),
)

_TEXTS = (
    *(
        "",
        "hi",
        "user",
        "assistant",
        "text",
        "image_url",
        "input_text",
        "message",
        "Hello 你好",
        "👍",
    ),
    *(
        "<|endoftext|>",
        "data: x\n\n",
        '"',
        "\\",
        "\u0000",
        "\u2028",
        " " * 70,
        "a" * 300,
        "m",
        "sse",
    ),
    *("prompt_embeds", "document", "file", "auto", "stop", "length", "tool_calls", "AAAA" * 40),
)
_NUMBERS = (
    *(0, 1, 2, 7, -1, 16, 100, 4096, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**30, -(2**63)),
    *(1.0, 0.5, 1e3, 1e300, -0.0, 1e15),
)


def value(rng: random.Random, depth: int = 3) -> Any:
    """Any JSON value, of at most `depth` levels."""
    if depth == 0:
        return rng.choice(_LEAVES)(rng)
    return rng.choice(_KINDS)(rng, depth)


def text(rng: random.Random) -> str:
    """A text, plain or odd."""
    return rng.choice(_TEXTS)


def spelled(document: Any, rng: random.Random) -> bytes:
    """The document as JSON, in one of the ways to write it."""
    separators = rng.choice(((",", ":"), (", ", ": "), ("\n,\t", " : ")))
    return json.dumps(document, ensure_ascii=rng.random() < 0.5, separators=separators).encode(
        "utf-8", "replace"
    )


def message(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A chat message, or something that looks like one."""
    fields: dict[str, Any] = {"role": rng.choice(("user", "system", "tool", text(rng)))}
    fields["content"] = text(rng) if rng.random() < 0.6 else value(rng, depth)
    if rng.random() < 0.3:
        fields[rng.choice(NAMES)] = value(rng, depth)
    return fields


def _number(rng: random.Random) -> Any:
    return rng.choice(_NUMBERS)


def _constant(rng: random.Random) -> Any:
    return rng.choice((None, True, False))


def _leaf(rng: random.Random, _: int) -> Any:
    return rng.choice(_LEAVES)(rng)


def _list(rng: random.Random, depth: int) -> Any:
    return [value(rng, depth - 1) for _ in range(rng.choice((0, 1, 1, 2, 3)))]


def _ids(rng: random.Random, _: int) -> Any:
    return [rng.choice((1, 5, 7)) for _ in range(rng.choice((1, 3, 20)))]


def _object(rng: random.Random, depth: int) -> Any:
    return {rng.choice(NAMES): value(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 3)))}


def _messages(rng: random.Random, depth: int) -> Any:
    return [message(rng, depth - 1) for _ in range(rng.choice((1, 1, 2, 4)))]


def _call(rng: random.Random, depth: int) -> Any:
    function = {"name": text(rng), "arguments": value(rng, depth - 1)}
    return [{"index": rng.choice((0, 1, None)), "type": "function", "function": function}]


_LEAVES: tuple[Callable[[random.Random], Any], ...] = (text, text, _number, _number, _constant)
_KINDS: tuple[Callable[[random.Random, int], Any], ...] = (
    *(_leaf, _leaf, _leaf, _list, _object, _object, _ids, _messages, _call),
)
