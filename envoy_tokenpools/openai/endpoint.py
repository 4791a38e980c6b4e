"""
The metered endpoints: where they are found, and what kind of work each of them is.

Paths are those of vLLM, with the spellings of SGLang where they differ. What is not listed here is for
the caller to let pass or not.
"""

import enum
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote

MAX_PATH_DECODINGS = 3
"""Percent-decodings of a path; each hop to the backend may do one."""


class Dialect(enum.Enum):
    """Whose shapes an endpoint speaks; answers of our own follow it."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


@dataclass(frozen=True, slots=True)
class _Traits:
    """See the attributes of `Endpoint`."""

    paths: tuple[str, ...]
    decodes: bool = False
    reads_body: bool = True
    flat: bool = False
    dialect: Dialect = Dialect.OPENAI


class Endpoint(enum.Enum):
    """
    The metered endpoints; the value of each is its usual path.

    Attributes:
        paths: everywhere that it is found, its usual path first.
        decodes: whether tokens are generated that a client can set a limit to. Of INVOCATIONS some
            requests do and others do not: `RequestFacts.decodes` tells.
        reads_body: False where the body is a form with a file: it is never buffered, and the request is
            decided on its head alone, by `facts_without_body`.
        flat: whether the work is not text and costs the pool's flat amount.
        dialect: whose error shape its clients expect.
    """

    _value_: str
    paths: tuple[str, ...]
    decodes: bool
    reads_body: bool
    flat: bool
    dialect: Dialect

    def __new__(cls, traits: _Traits) -> Self:
        """A member with these traits."""
        member = object.__new__(cls)
        member._value_ = traits.paths[0]
        member.paths = traits.paths
        member.decodes = traits.decodes
        member.reads_body = traits.reads_body
        member.flat = traits.flat
        member.dialect = traits.dialect
        return member

    CHAT = _Traits(("/v1/chat/completions", "/v1/chat/completions/batch"), decodes=True)
    COMPLETIONS = _Traits(("/v1/completions",), decodes=True)
    RESPONSES = _Traits(("/v1/responses",), decodes=True)
    MESSAGES = _Traits(("/v1/messages",), decodes=True, dialect=Dialect.ANTHROPIC)
    GENERATE = _Traits(("/generate", "/inference/v1/generate"), decodes=True)
    INVOCATIONS = _Traits(("/invocations",), decodes=True)

    EMBEDDINGS = _Traits(("/v1/embeddings", "/v2/embed"))
    POOLING = _Traits(("/pooling",))
    CLASSIFY = _Traits(("/classify", "/v1/classify"))
    SCORE = _Traits(("/score", "/v1/score", "/generative_scoring"))
    RERANK = _Traits(("/rerank", "/v1/rerank", "/v2/rerank"))
    TOKENIZE = _Traits(("/tokenize", "/v1/tokenize"))
    DETOKENIZE = _Traits(("/detokenize", "/v1/detokenize"))
    COUNT_TOKENS = _Traits(("/v1/messages/count_tokens",), dialect=Dialect.ANTHROPIC)

    SPEECH = _Traits(("/v1/audio/speech",), flat=True)
    IMAGES = _Traits(("/v1/images/generations",), flat=True)
    TRANSCRIPTIONS = _Traits(("/v1/audio/transcriptions",), reads_body=False, flat=True)
    TRANSLATIONS = _Traits(("/v1/audio/translations",), reads_body=False, flat=True)
    IMAGE_EDITS = _Traits(
        ("/v1/images/edits", "/v1/images/variations"), reads_body=False, flat=True
    )


_BY_PATH: Mapping[str, Endpoint] = {
    path: endpoint for endpoint in Endpoint for path in endpoint.paths
}


def endpoint_of(path: str, prefix: str = "") -> Endpoint | None:
    """
    The metered endpoint that a `:path` leads to, or None.

    A path counts as metered when any usual backend or proxy could take it for one: percent-encoded,
    with doubled or trailing slashes, dot segments, or blanks at the end of a segment (`$` of a
    regular expression, which Starlette routes by, matches before a final newline).

    Args:
        path: as the client sent it.
        prefix: the path that the backend lives below (`/team-a`), slashes at its ends or not. Then only
            what is below it is metered.
    """
    exact = path.partition("?")[0]
    if not prefix:
        return _BY_PATH.get(exact) or _BY_PATH.get(_normal(exact))
    base = _base(prefix)
    return _BY_PATH.get(_below(base, exact)) or _BY_PATH.get(_below(base, _normal(exact)))


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


@functools.lru_cache(maxsize=64)
def _base(prefix: str) -> str:
    """A prefix as normal paths begin with it, without a slash at its end; there are few, the operator's."""
    return _normal(prefix).rstrip("/")


def _below(base: str, path: str) -> str:
    """The rest of a path below `base`, or nothing."""
    rest = path.removeprefix(base)
    return rest if len(rest) + len(base) == len(path) else ""
