"""
The machine-readable codes of the requests that we refuse as malformed, spelled as OpenAI spells its own.
"""

import enum

from envoy_tokenpools.errors import RequestError


class ErrorCode(enum.StrEnum):
    """`error.code` of a 400 answer; a closed set, so it can be counted."""

    INVALID_JSON = "invalid_json"
    MISSING_PARAMETER = "missing_required_parameter"
    DUPLICATE_PARAMETER = "duplicate_parameter"
    TOO_MANY_PARAMETERS = "object_above_max_properties"
    INVALID_TYPE = "invalid_type"
    INTEGER_TOO_SMALL = "integer_below_min_value"
    INTEGER_TOO_LARGE = "integer_above_max_value"
    STRING_TOO_LONG = "string_above_max_length"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    EMPTY_ARRAY = "empty_array"
    ARRAY_TOO_LONG = "array_above_max_length"


def malformed(code: ErrorCode, message: str, param: str | None = None) -> RequestError:
    """The 400 for a body that breaks a rule of the API; `message` never quotes the body."""
    return RequestError(400, code.value, message, param)


def too_many(param: str, most: int, what: str) -> RequestError:
    """The 400 for an array of more than `most` of `what`."""
    text = f"'{param}' must not hold more than {most} {what}."
    return malformed(ErrorCode.ARRAY_TOO_LONG, text, param)
