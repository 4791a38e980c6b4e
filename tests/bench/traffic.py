"""
What is sent and what is answered: one small chat request, a JSON answer, and a stream of many chunks.

The sizes are fixed here, so that figures of different days can be compared.
"""

import json

PATH = "/v1/chat/completions"
STREAM_PATH = f"{PATH}?stream"
"""The same endpoint to the filter; the Envoy of the benchmark routes by the query."""

API_KEY = "bench"

CHUNKS = 50
"""Events of one streamed answer, each written by itself."""

CHUNK_BYTES = 250
"""Of one event, its `data: ` and blank line included."""

CHUNK_GAP_S = 0.005
"""Between two events, so that they arrive at Envoy one by one: 200 tokens per second and sequence."""

CONFIG = f"""
pools:
  - name: bench
    models: [bench-model]
    capacity: {{tokens_per_second: 1G, kv_cache: 1024GiB, concurrency: 10000}}
    kv_bytes_per_token: 144KiB
    entitlements:
      - name: tenant
        class: elastic
        slo_target: 500ms
        baseline: {{tokens_per_second: 500M, kv_cache: 512GiB, concurrency: 5000}}
        keys: [{{plain: {API_KEY}}}]
"""
"""A pool in which nothing is ever short, so that every request takes the whole way of an admitted one."""


def request_body(*, stream: bool) -> bytes:
    """A chat request of 150 bytes (a few more when it asks for a stream)."""
    text = "In one sentence, why is the sky blue in the daylight and red at dusk?"
    fields: dict[str, object] = {
        "model": "bench-model",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 64,
    }
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(fields, separators=(",", ":")).encode()


def answer_body() -> str:
    """A whole answer with usage."""
    return json.dumps(
        {
            "id": "chatcmpl-0123456789abcdef",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": "bench-model",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Because air scatters blue most."},
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 23, "completion_tokens": 8, "total_tokens": 31},
        },
        separators=(",", ":"),
    )


def stream_chunks() -> list[bytes]:
    """The events of one streamed answer: text, then the end with its usage and `[DONE]`."""
    chunks = [_event({"choices": [_choice(f" word{number}")]}) for number in range(CHUNKS - 1)]
    usage = {"prompt_tokens": 23, "completion_tokens": CHUNKS - 1, "total_tokens": CHUNKS + 22}
    last = _event({"choices": [_choice("", finish="stop")]})
    return [*chunks, last + _event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"]


def _choice(text: str, finish: str | None = None) -> dict[str, object]:
    return {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}


def _event(fields: dict[str, object]) -> bytes:
    head = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "bench-model",
    }
    bare = json.dumps(head | fields, separators=(",", ":"))
    padding = CHUNK_BYTES - len(f"data: {bare}\n\n") - len(',"system_fingerprint":""')
    whole = head | fields | {"system_fingerprint": "f" * max(0, padding)}
    return f"data: {json.dumps(whole, separators=(',', ':'))}\n\n".encode()
