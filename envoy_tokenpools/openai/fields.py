"""
Single fields of a request body, as strictly typed as the strictest backend reads them.
"""

import enum
from typing import Any

from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.openai.codes import ErrorCode, malformed

Fields = dict[str, Any]


class UsageWish(enum.Enum):
    """
    What a request says in `stream_options` about the usage of a stream; it means nothing without one.

    ASKED: `include_usage` is true. OTHERWISE: the field is there and does not ask: false, `{}`, null or
    anything else. SILENT: there is no such field.
    """

    ASKED = "asked"
    OTHERWISE = "otherwise"
    SILENT = "silent"


def integer(fields: Fields, name: str, least: int, most: int, path: str = "") -> int | None:
    """
    A field from `least` to `most`; None where it is absent or null. `path` names what it is a field of.

    Raises:
        RequestError: 400, for anything else.
    """
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is float and value.is_integer():
        value = int(value)
    param = path + name
    # bool is an int to Python, and 1 to lax backends: neither is meant by a client.
    if type(value) is not int:
        raise malformed(ErrorCode.INVALID_TYPE, f"'{param}' must be an integer.", param)
    if value < least:
        text = f"'{param}' must be at least {least}."
        raise malformed(ErrorCode.INTEGER_TOO_SMALL, text, param)
    if value > most:
        text = f"'{param}' must be at most {most}."
        raise malformed(ErrorCode.INTEGER_TOO_LARGE, text, param)
    return value


def flag(fields: Fields, name: str) -> bool:
    """
    A field that is true or false; False where it is absent or null.

    Raises:
        RequestError: 400, for anything else.
    """
    value = fields.get(name)
    if value is None:
        return False
    if type(value) is not bool:
        raise malformed(ErrorCode.INVALID_TYPE, f"'{name}' must be true or false.", name)
    return value


def required(fields: Fields, name: str) -> object:
    """
    A field that must be there.

    Raises:
        RequestError: 400, where it is absent or null.
    """
    value = fields.get(name)
    if value is None:
        raise missing(name)
    return value


def missing(name: str) -> RequestError:
    """The 400 for a body without the field that its endpoint runs on."""
    return malformed(ErrorCode.MISSING_PARAMETER, f"'{name}' is required.", name)


def usage_wish(fields: Fields) -> UsageWish:
    """What `stream_options` says about usage; never raises."""
    if "stream_options" not in fields:
        return UsageWish.SILENT
    options = fields["stream_options"]
    asked = type(options) is dict and options.get("include_usage") is True
    return UsageWish.ASKED if asked else UsageWish.OTHERWISE
