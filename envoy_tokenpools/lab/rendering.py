"""
What a vLLM server answers: chunks, bodies and usage in the shapes of its four APIs. Pure.

The fields and their order follow recordings of vLLM 0.32, so that whatever reads them here can
read the real ones.
"""

from collections.abc import Mapping, Sequence

import msgspec

from envoy_tokenpools.lab.dialect import Api, Question, Reply

DONE = b"data: [DONE]\n\n"

_FINGERPRINT = "tokenpools-lab"
_ID_PREFIX = {
    Api.CHAT: "chatcmpl",
    Api.COMPLETIONS: "cmpl",
    Api.RESPONSES: "resp",
    Api.EMBEDDINGS: "embd",
}
_VECTOR = (0.5, -0.5, 0.5, -0.5)

Json = dict[str, object]


class Rendering:
    """The answer to one question, piece by piece (streams) or whole."""

    def __init__(self, question: Question, number: int, created: int, *, usage: bool) -> None:
        """
        Begin an answer.

        Args:
            question: what was asked.
            number: makes the id of the answer unique.
            created: the time that the answer states, in seconds.
            usage: False leaves every usage out, as a backend that does not report it.
        """
        self._question = question
        self._id = f"{_ID_PREFIX[question.api]}-{number:016x}"
        self._created = created
        self._usage = usage
        self._events_sent = 0

    def opening(self) -> bytes:
        """What a stream sends with the first output, before any text."""
        question = self._question
        if question.api is Api.RESPONSES:
            return self._event("response.created", {"response": self._response("in_progress", ())})
        if question.api is not Api.CHAT:
            return b""
        role: Json = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk(
                {"index": reply.index, "delta": role, "logprobs": None, "finish_reason": None},
                reply,
                generated=0,
            )
            for reply in question.replies
        )

    def piece(self, reply: Reply, number: int) -> bytes:
        """The chunk of a reply's `number`-th token; the last one has the finish reason."""
        text = reply.piece(number)
        if self._question.api is Api.RESPONSES:
            return self._event(
                "response.output_text.delta",
                {
                    "content_index": 0,
                    "delta": text,
                    "item_id": f"msg-{self._id}",
                    "output_index": 0,
                    "logprobs": [],
                },
            )
        choice: Json = {"index": reply.index}
        is_chat = self._question.api is Api.CHAT
        if is_chat:
            choice["delta"] = {"content": text} if text else {}
        else:
            choice["text"] = text
        last = number == reply.output_tokens
        choice |= {"logprobs": None, "finish_reason": reply.finish_reason if last else None}
        if last or not is_chat:
            choice["stop_reason"] = reply.stop_reason if last else None
        return self._chunk(choice, reply, generated=number)

    def closing(self) -> bytes:
        """What follows the last token: usage if it was asked for, and the end mark."""
        question = self._question
        if question.api is Api.RESPONSES:
            body = self._response("completed", question.replies)
            return self._event("response.completed", {"response": body})
        if not (question.include_usage and self._usage):
            return DONE
        final = self._head(streamed=True) | {"choices": [], "usage": self._total_usage()}
        return _data(final | {"system_fingerprint": _FINGERPRINT}) + DONE

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""
        question = self._question
        if question.api is Api.RESPONSES:
            return msgspec.json.encode(self._response("completed", question.replies))
        body = self._head(streamed=False)
        if question.api is Api.EMBEDDINGS:
            body["data"] = [
                {"index": reply.index, "object": "embedding", "embedding": _VECTOR}
                for reply in question.replies
            ]
        else:
            body["choices"] = [self._choice(reply) for reply in question.replies]
            body |= {"service_tier": None, "system_fingerprint": _FINGERPRINT}
        body["usage"] = self._total_usage() | {"prompt_tokens_details": None}
        if not self._usage:
            body["usage"] = None
        return msgspec.json.encode(body)

    def _choice(self, reply: Reply) -> Json:
        choice: Json = {"index": reply.index}
        if self._question.api is Api.CHAT:
            choice["message"] = {"role": "assistant", "content": reply.text(), "refusal": None}
        else:
            choice["text"] = reply.text()
        return choice | {
            "logprobs": None,
            "finish_reason": reply.finish_reason,
            "stop_reason": reply.stop_reason,
        }

    def _head(self, *, streamed: bool) -> Json:
        kind = {
            Api.CHAT: "chat.completion.chunk" if streamed else "chat.completion",
            Api.COMPLETIONS: "text_completion",
            Api.EMBEDDINGS: "list",
        }[self._question.api]
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._question.model,
        }

    def _chunk(self, choice: Json, reply: Reply, *, generated: int) -> bytes:
        chunk = self._head(streamed=True) | {"choices": [choice]}
        if self._question.continuous_usage and self._usage:
            chunk["usage"] = _usage(reply.prompt_tokens, generated)
        return _data(chunk)

    def _total_usage(self) -> Json:
        generated = sum(reply.output_tokens for reply in self._question.replies)
        return _usage(self._question.prompt_tokens, generated)

    def _event(self, kind: str, fields: Mapping[str, object]) -> bytes:
        """One event of the Responses API, numbered in order."""
        event = {"type": kind, "sequence_number": self._events_sent, **fields}
        self._events_sent += 1
        return f"event: {kind}\n".encode() + _data(event)

    def _response(self, status: str, replies: Sequence[Reply]) -> Json:
        """The response object; `replies` is empty while it is in progress."""
        body: Json = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self._question.model,
            "status": status,
            "output": [_output_message(f"msg-{self._id}", reply) for reply in replies],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": None,
        }
        if replies and self._usage:
            generated = sum(reply.output_tokens for reply in replies)
            body["usage"] = {
                "input_tokens": self._question.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": generated,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self._question.prompt_tokens + generated,
            }
        return body


def _output_message(item_id: str, reply: Reply) -> Json:
    part: Json = {"type": "output_text", "text": reply.text(), "annotations": [], "logprobs": None}
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _usage(prompt_tokens: int, generated: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + generated,
        "completion_tokens": generated,
    }


def _data(value: Mapping[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
