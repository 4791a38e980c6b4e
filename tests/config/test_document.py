"""Behaviour of the YAML reader."""

import math

import pytest

from envoy_tokenpools.config.document import MAX_CHARS, read_document
from envoy_tokenpools.config.findings import Findings
from envoy_tokenpools.errors import ConfigError


def read(text: str) -> tuple[object, list[str]]:
    """The document and its faults as text."""
    findings = Findings()
    return read_document(text, findings), [str(fault) for fault in findings.faults]


def fault_of(text: str) -> str:
    """The only fault of a text that cannot be parsed."""
    with pytest.raises(ConfigError) as raised:
        read_document(text, Findings())
    (fault,) = raised.value.faults
    return str(fault)


def test_scalars_follow_the_core_schema() -> None:
    """YAML 1.1's surprises (no, on, sexagesimals, dates, octals, underscores) are text."""
    text = "[no, on, y, 1:30, 2024-01-01, 1_000, 0x1f, ~, null, '', true, FALSE, 010, 1.5, -2, +3]"
    expected: list[object] = ["no", "on", "y", "1:30", "2024-01-01", "1_000", "0x1f"]
    expected += [None, None, "", True, False, 10, 1.5, -2, 3]
    value, faults = read(text)
    assert repr(value) == repr(expected)
    assert faults == []


def test_endless_floats_are_floats() -> None:
    """Infinity and not-a-number are read, for the range checks to refuse."""
    value, _ = read("[.inf, -.INF, .nan]")
    assert isinstance(value, list)
    assert value[:2] == [math.inf, -math.inf]
    assert math.isnan(value[2])


def test_an_absent_value_is_null() -> None:
    """A field without a value is null, and so is an empty document."""
    assert read("a:\n") == ({"a": None}, [])
    assert read("# nothing\n") == (None, [])


def test_merge_keys_are_ordinary_fields() -> None:
    """A merge key merges nothing, as in YAML 1.2."""
    value, _ = read("a: &a {x: 1}\nb:\n  <<: *a\n")
    assert value == {"a": {"x": 1}, "b": {"<<": {"x": 1}}}


def test_every_field_given_twice_is_a_fault() -> None:
    """All doubled fields are told with path and line, and the first value stands."""
    value, faults = read("a: 1\nb:\n  - {c: 1, c: 2}\na: 3\n")
    assert value == {"a": 1, "b": [{"c": 1}]}
    assert faults == ["b[0].c: is given twice (line 3)", "a: is given twice (line 4)"]


@pytest.mark.parametrize("text", ["{1: a}", "{? [x] : a}", "{? !!str [x] : a}", "{~: a}"])
def test_field_names_are_text(text: str) -> None:
    """A number, null or list is no field name."""
    assert read(text) == ({}, ["a field's name must be text (line 1)"])


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system [hunter2]",
        "a: !!python/name:os.system hunter2",
        "a: !hunter2 x",
        "a: !!int hunter2",
        "a: !!bool hunter2",
        "a: !!float hunter2",
        "a: !!set {hunter2}",
        "a: !!binary aHVudGVyMg==",
        "a: " + "9" * 5_000,
    ],
)
def test_tags_construct_nothing(text: str) -> None:
    """Other tags, wrong tags and endless digits are faults that repeat nothing."""
    assert read(text) == ({"a": None}, ["a: has a YAML tag or form that is not used here (line 1)"])


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a: [hunter2", "line 1, column 12"),
        ("a: 1\nb: *hunter2", "line 2, column 4"),
        ("a: !hunter2!y x", "line 1, column 4"),
        ("a: &hunter2 1\nb: {c: &d 2}\n e: 3", "line 3, column 2"),
        ("a: 'hunter2", "line 1, column 12"),
        ("a: @hunter2", "line 1, column 4"),
        ("a: hunter2: b", "line 1, column 11"),
        ("a: 1\n--- \nb: hunter2", "line 2, column 1"),
        ("a: 1\nb: hunter2\x07", "line 2"),
    ],
)
def test_syntax_errors_have_a_place_and_no_content(text: str, where: str) -> None:
    """A syntax error is told with line and column, never with what was written."""
    fault = fault_of(text)
    assert fault.startswith(f"{where}: ")
    assert "hunter2" not in fault


def test_a_billion_aliases_are_refused_at_once() -> None:
    """Aliases are followed only as far as the bound on values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert fault_of("\n".join(lines)) == "more than 500000 values, aliases included"


@pytest.mark.parametrize(
    "text", ["a: &a [*a]", "a: " + "[" * 5_000, "a: &a {b: *a}", "a: " + "- " * 5_000]
)
def test_depth_is_bounded(text: str) -> None:
    """Endless nesting, by brackets or by an alias of itself, is a fault."""
    assert "nested more than 32 deep" in fault_of(text) or "not valid YAML" in fault_of(text)


def test_length_is_bounded() -> None:
    """A text over the bound is refused before it is parsed."""
    assert fault_of("#" * (MAX_CHARS + 1)) == f"longer than {MAX_CHARS} characters"
