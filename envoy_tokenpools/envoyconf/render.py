"""
Messages as YAML with the field names of Envoy's documentation.
"""

from collections.abc import Mapping

import betterproto2
import yaml


def to_plain(message: betterproto2.Message) -> dict[str, object]:
    """
    The message as plain values: proto field names, `5s` durations, enums by name, `Any` inline
    beside its `@type`. Fields at their default are left out.
    """
    return message.to_dict(casing=betterproto2.Casing.SNAKE)


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
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True
