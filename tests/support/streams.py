"""
Event streams and bodies of the OpenAI family, made and metered, for the tests of both.
"""

import json

from envoy_tokenpools.openai.usage import BodyMeter, Metered, StreamMeter, Usage, UsageMeter

_HEAD = '{"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":['
S_EVENTS = [
    _HEAD + '{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}',
    _HEAD + '{"index":0,"delta":{"content":"Hello 你好"},"finish_reason":null}]}',
    _HEAD + '{"index":0,"delta":{"content":" world"},"finish_reason":"stop"}]}',
    _HEAD + '],"usage":{"prompt_tokens":26,"completion_tokens":9,"total_tokens":35}}',
    "[DONE]",
]
S_TEXT = "Hello 你好 world"


def stream_of(*events: object) -> bytes:
    """A stream of these events: strings as they are, anything else as JSON."""
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return b"".join(b"data: " + text.encode() + b"\n\n" for text in texts)


S = stream_of(*S_EVENTS)
S_METERED = Metered(
    usage=Usage(26, 9), texts=(S_TEXT,), finished=True, error=False, overflow_chars=0, unread=0
)


def chunk(delta: object, index: int = 0, **fields: object) -> dict[str, object]:
    """One chat chunk."""
    return {"choices": [{"index": index, "delta": delta, "finish_reason": None}], **fields}


def total(prompt: object, completion: object) -> dict[str, object]:
    """The chunk that closes a stream with the usage of all choices."""
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def fed(meter: UsageMeter, *pieces: bytes) -> Metered:
    """What the meter says of these pieces."""
    for piece in pieces:
        meter.feed(piece)
    return meter.finish()


def of_stream(*events: object) -> Metered:
    """What the meter says of a stream of these events."""
    return fed(StreamMeter(), stream_of(*events))


def of_body(body: object) -> Metered:
    """What the meter says of a body of this JSON."""
    return fed(BodyMeter(), json.dumps(body).encode())
