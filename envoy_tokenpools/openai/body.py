"""
Bytes to the fields of one JSON object.

As strict as the strictest backend, so that what was counted is what the backend reads.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from envoy_tokenpools.openai.codes import ErrorCode, malformed

MAX_FIELDS = 1_024
"""Fields of one body; vLLM, the richest dialect, knows about 80."""

_MAX_PARAM_CHARS = 64
"""How much of a name that a client invented is repeated to it."""

_BLANKS = b" \t\n\r"
_NAME = re.compile(rb'[ \t\n\r]*[{,][ \t\n\r]*("[^"\\]*(?:\\.[^"\\]*)*")[ \t\n\r]*:[ \t\n\r]*')

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def decode_fields(body: bytes) -> dict[str, Any]:
    """
    The fields of the JSON object that `body` is.

    A field given twice is refused whatever its name: readers differ in which of the two they take.
    Inside of values the last one counts, as everywhere in Python.

    Raises:
        RequestError: 400, when it is no JSON object, or not one that every backend reads alike.
        RecursionError: when it is nested too deeply.
    """
    try:
        fields = _decode(body)
        raw = _decode_raw(body)
    except (msgspec.MsgspecError, ValueError) as error:
        # The decoder's messages name types and positions, never contents; the path that may follow can be as long as
        # the body is deep.
        text = f"The body is not a JSON object: {str(error).partition(' - at ')[0]}."
        raise malformed(ErrorCode.INVALID_JSON, text) from None
    if len(fields) > MAX_FIELDS:
        text = f"The body must not have more than {MAX_FIELDS} fields."
        raise malformed(ErrorCode.TOO_MANY_PARAMETERS, text)
    if len(body) > _shortest(raw):
        repeated = _repeated_field(body, raw)
        if repeated is not None:
            text = "A field of the body is given more than once."
            param = repeated[:_MAX_PARAM_CHARS]
            raise malformed(ErrorCode.DUPLICATE_PARAMETER, text, param)
    return fields


def _shortest(raw: Mapping[str, msgspec.Raw]) -> int:
    """
    Least bytes that these fields can be written in: a body of that length has none of them twice.

    Names and values, and for each field two quotes, a colon and a comma or brace, after one brace.
    Most clients send no blanks, so most bodies need no closer look.
    """
    return 1 + 4 * len(raw) + sum(map(len, raw)) + sum(map(len, raw.values()))


def _repeated_field(body: bytes, raw: Mapping[str, msgspec.Raw]) -> str | None:
    """
    The first field found twice in a valid body, however its name is escaped.

    Walks the body from name to name, past the value that was kept for each. The decoder keeps the last
    of several, so an earlier one shows as another value in its place, or as the same name again.
    """
    at = 0
    name = None
    seen: set[str] = set()
    while (match := _NAME.match(body, at)) is not None:
        name = msgspec.json.decode(match[1], type=str)
        value = bytes(raw[name])
        at = match.end()
        if name in seen or not body.startswith(value, at):
            return name
        seen.add(name)
        at += len(value)
    # A number may begin with the one that was kept (12 and 1): then the walk ended inside it.
    return None if body[at:].strip(_BLANKS) == b"}" else name
