"""
What a reading of the configuration found wrong, collected so that all of it is told at once.
"""

import re
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from envoy_tokenpools.errors import Fault

Shape = TypeVar("Shape", bound=BaseModel)

# What may stand in a path unquoted; other names are cut short and escaped.
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST_NAME: Final = 40

_MESSAGES: Final = {
    "missing": "is required",
    "extra_forbidden": "unknown field",
    "model_type": "must be a mapping of fields",
    "list_type": "must be a list",
    "string_type": "must be text (put it in quotes)",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "too_short": "must have at least one item",
}


def field_path(path: str, name: str) -> str:
    """The path of field `name` of the mapping at `path`."""
    shown = name if _PLAIN_NAME.fullmatch(name) else ascii(name[:_LONGEST_NAME])
    return f"{path}.{shown}" if path else shown


def item_path(path: str, index: int) -> str:
    """The path of an item of the list at `path`."""
    return f"{path}[{index}]"


class Findings:
    """Faults, which refuse the configuration, and warnings, which do not."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.warnings: list[Fault] = []

    def fault(self, path: str, message: str) -> None:
        """Note a fault."""
        self.faults.append(Fault(path, message))

    def warn(self, path: str, message: str) -> None:
        """Note a warning."""
        self.warnings.append(Fault(path, message))

    def shaped(self, shape: type[Shape], raw: object, path: str) -> Shape | None:
        """`raw` as `shape`, or None with every fault noted; values are never repeated."""
        try:
            return shape.model_validate(raw)
        except ValidationError as error:
            for detail in error.errors(include_input=False, include_url=False):
                where = path
                for part in detail["loc"]:
                    where = (
                        item_path(where, part) if isinstance(part, int) else field_path(where, part)
                    )
                self.fault(where, _message(detail))
            return None

    @staticmethod
    def part(shape: type[Shape], raw: object) -> Shape | None:
        """The fields of `raw` that `shape` has, if they are valid; silent about the others."""
        if not isinstance(raw, dict):
            return None
        names = {field.alias or name for name, field in shape.model_fields.items()}
        try:
            return shape.model_validate({name: raw[name] for name in names & raw.keys()})
        except ValidationError:
            return None


def _message(detail: ErrorDetails) -> str:
    raised = detail.get("ctx", {}).get("error")
    if detail["type"] == "value_error" and isinstance(raised, ValueError):
        return str(raised)
    return _MESSAGES.get(detail["type"]) or detail["msg"].replace("Input should be", "must be")
