"""
Messages as YAML with the field names of Envoy's documentation.
"""

from collections.abc import Mapping
from typing import cast

import betterproto2
import yaml


def to_plain(message: betterproto2.Message) -> dict[str, object]:
    """
    The message as plain values.

    Field names are the proto's, durations are `5s`, enums go by name, an `Any` has its fields
    beside its `@type`. Fields at their default are left out.
    """
    # The library only calls what it is given, and its own snake case splits `consecutive_5xx`.
    return message.to_dict(casing=cast("betterproto2.Casing", _as_declared))


def _as_declared(field_name: str) -> str:
    """The generated Python names are the proto's."""
    return field_name


def render_yaml(document: Mapping[str, object], header: str = "") -> str:
    """
    YAML of `document` in its own key order, below `header` as comment lines.

    The same document always gives the same text.
    """
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    body = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return comment + body


class _Dumper(yaml.SafeDumper):
    """Lists are indented below their key, and nothing is written as an alias."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True
