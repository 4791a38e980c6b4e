"""
YAML text -> plain values, without YAML's traps.

Scalars follow the YAML 1.2 core schema (`no`, `on`, `1:30` and `2024-01-01` are text). A field
given twice is a fault, where PyYAML would silently keep the last. Tags construct nothing. Depth
and size are bounded after aliases are followed, so a small text cannot become a large document.
No message repeats the text: it holds keys.
"""

import re
from typing import Final

import yaml

from envoy_tokenpools.config.findings import Findings, field_path, item_path
from envoy_tokenpools.errors import ConfigError, Fault

# PyYAML reads about 400 KB per second: more would hold up a reload for over ten seconds.
MAX_CHARS: Final = 4 * 1_024**2
# A configuration is 6 deep; PyYAML recurses once per level.
MAX_DEPTH: Final = 32
# About 20,000 entitlements of 25 nodes each.
MAX_NODES: Final = 500_000

_TAG: Final = "tag:yaml.org,2002:"
_ABOUT_TEXT: Final = re.compile(r"\b(alias|anchor|handle) ['\"].*", re.DOTALL)


class _DocumentError(Exception):
    """The document is too deep or too large to go on."""


# In the order of the specification's section 10.3.2; what matches none is text.
_CORE_SCHEMA: Final = (
    ("null", r"~|null|Null|NULL|"),
    ("bool", r"true|True|TRUE|false|False|FALSE"),
    ("int", r"[-+]?[0-9]+"),
    ("float", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
)


class _CoreSchemaLoader(yaml.SafeLoader):
    """Composes nodes only; resolves plain scalars by the YAML 1.2 core schema."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        # None: whatever the first character is
        self.yaml_implicit_resolvers = {
            None: [(_TAG + kind, re.compile(rf"(?:{form})\Z")) for kind, form in _CORE_SCHEMA]
        }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """As PyYAML's, but refuses to recurse deeper than `MAX_DEPTH`."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _DocumentError(f"nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def read_document(text: str, findings: Findings) -> object:
    """
    Parse one YAML document into dicts, lists and scalars.

    Fields given twice, field names that are no strings, and unknown tags go to `findings`
    (the first value of a field stands); what cannot be parsed at all is raised.

    Raises:
        ConfigError: a syntax error (with line and column), or a document too large or deep.
    """
    if len(text) > MAX_CHARS:
        raise ConfigError([Fault("", f"longer than {MAX_CHARS} characters")])
    try:
        loader = _CoreSchemaLoader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        return None if node is None else _Walk(findings).value(node, "", 1)
    except yaml.MarkedYAMLError as error:
        raise ConfigError([_syntax_fault(error)]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        fault = Fault(f"line {line}", "holds a control character that YAML does not allow")
        raise ConfigError([fault]) from None
    except _DocumentError as error:
        raise ConfigError([Fault("", str(error))]) from None


def _syntax_fault(error: yaml.MarkedYAMLError) -> Fault:
    """Where and what, without the snippet that PyYAML adds and the names that it quotes."""
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    said = ", ".join(part for part in (error.context, error.problem) if part)
    return Fault(where, "not valid YAML: " + _ABOUT_TEXT.sub(r"\1", said))


class _Walk:
    """One walk over the nodes; aliases are followed, and every step is paid for."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._nodes_left = MAX_NODES

    def value(self, node: yaml.Node, path: str, depth: int) -> object:
        """The plain value of `node`."""
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise _DocumentError(f"more than {MAX_NODES} values, aliases included")
        if depth > MAX_DEPTH:
            raise _DocumentError(f"nested more than {MAX_DEPTH} deep, aliases included")
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [
                self.value(item, item_path(path, index), depth + 1)
                for index, item in enumerate(node.value)
            ]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, object]:
        fields: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                self._findings.fault(path, f"a field's name must be text (line {line})")
                continue
            key = key_node.value
            value = self.value(value_node, field_path(path, key), depth + 1)
            if key in fields:
                self._findings.fault(field_path(path, key), f"is given twice (line {line})")
            else:
                fields[key] = value
        return fields

    def _scalar(self, node: yaml.Node, path: str) -> object:
        try:
            return _scalar_value(node)
        except ValueError:
            line = node.start_mark.line + 1
            self._findings.fault(
                path, f"has a YAML tag or form that is not used here (line {line})"
            )
            return None


def _scalar_value(node: yaml.Node) -> str | bool | int | float | None:
    """ValueError: a tag of no core type, or one that the text contradicts, or endless digits."""
    kind, text = node.tag.removeprefix(_TAG), node.value
    if not isinstance(text, str):
        raise ValueError("not a scalar")  # noqa: TRY004  a document's fault, not a program's
    match kind:
        case "str":
            return text
        case "null":
            return None
        case "bool" if text.lower() in ("true", "false"):
            return text.lower() == "true"
        case "int":
            return int(text)
        case "float":
            return float(re.sub(r"(?i)\.(inf|nan)$", r"\1", text))
    raise ValueError("no scalar of the core schema")
