"""
The one change that is ever made to a request body: a top-level member put in or taken out.

Every other byte stays as the client wrote it (blanks, order of members, spelling of numbers), since a
body decoded and encoded again is another body to caches, logs and signatures. Bodies are JSON objects
that `decode_fields` took; their values are passed over by msgspec, whatever they hold and however deep.
"""

import re
from collections.abc import Iterator, Mapping

import msgspec

from envoy_tokenpools.openai.codes import ErrorCode, malformed

_STREAM_OPTIONS = "stream_options"
_USAGE_REQUESTED = b',"stream_options":{"include_usage":true}'

# A comma if one comes before it, then a name and all up to its value.
_NAME = re.compile(
    rb'(?:[ \t\n\r]*+,)?+([ \t\n\r]*+("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\n\r]*+:[ \t\n\r]*+)'
)
_IN_NUMBERS = frozenset(b"0123456789.eE")

_decode_name = msgspec.json.Decoder(str).decode
_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def with_usage_requested(body: bytes) -> bytes | None:
    """
    A streaming request that asks for usage, made from one that says nothing of it.

    `stream_options` goes in front of the closing brace, behind the members there are (`stream` is one of
    them). None where the request has `stream_options` already, whatever their value: with an explicit
    `false`, `{}` or null the client has had its say. None also where the body is nested too deeply to tell.
    """
    try:
        if _may_name(body, _STREAM_OPTIONS) and _STREAM_OPTIONS in _decode_raw(body):
            return None
    except RecursionError:
        return None
    end = body.rindex(b"}")
    return body[:end] + _USAGE_REQUESTED + body[end:]


def without_members(body: bytes, names: frozenset[str]) -> bytes | None:
    r"""
    The body without its top-level members of these names; None where it has none of them.

    A member goes with the comma and the blanks before it, each time that it is given; from what comes to
    stand first, the comma goes. The names are words, of letters, digits and underscores: only `\u`
    escapes can disguise them.

    Raises:
        RequestError: 400, when it is nested too deeply. How deep that is varies with the caller's own
            depth, by a few levels of about a thousand, so `decode_fields` may just have taken it.
    """
    if not any(_may_name(body, name) for name in names):
        return None
    try:
        values = _decode_raw(body)
    except RecursionError:
        raise malformed(ErrorCode.INVALID_JSON, "The body is nested too deeply.") from None
    if names.isdisjoint(values):
        return None
    opened = before = body.index(b"{") + 1
    kept: list[bytes] = []
    for name, start, end in _members(body, opened, values):
        if name not in names:
            kept.append(body[before if kept else start : end])
        before = end
    return b"".join([body[:opened], *kept, body[before:]])


def _may_name(body: bytes, name: str) -> bool:
    """Whether the name could be in there, which most bodies rule out at the speed of a search."""
    return name.encode() in body or b"\\u" in body


def _members(
    body: bytes, opened: int, values: Mapping[str, msgspec.Raw]
) -> Iterator[tuple[str, int, int]]:
    """
    The top-level members: name, start (behind any comma) and end.

    Args:
        body: a JSON object.
        opened: where it is, behind its brace.
        values: what its decoder kept, the last value of each name.
    """
    end = opened
    while (match := _NAME.match(body, end)) is not None:
        name = _decode_name(match[2])
        value = bytes(values[name])
        at = match.end()
        end = at + len(value)
        # A shorter number may begin another one (1 and 12); all other values end by themselves.
        if not body.startswith(value, at) or body[end] in _IN_NUMBERS:
            end = at + _length_of_value(body[at:], values)
        yield name, match.start(1), end


def _length_of_value(rest: bytes, values: Mapping[str, msgspec.Raw]) -> int:
    """
    Length of the value that `rest` begins with: of a member that is given again further on.

    Costs a pass over the rest, each time. No accepted request has such a member.
    """
    unused = "_" * (1 + max(map(len, values)))
    return len(_decode_raw(b'{"' + unused.encode() + b'":' + rest)[unused])
