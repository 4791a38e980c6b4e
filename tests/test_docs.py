"""
The README tells the truth: every name that an operator can meet is in it, and its examples work.
"""

import argparse
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from envoy_tokenpools.cli import build_parser
from envoy_tokenpools.config import load_config
from envoy_tokenpools.config.shape import (
    EntitlementFields,
    GainsFields,
    IdentityFields,
    KeyFields,
    ModelShapeFields,
    PoolFields,
    ResourcesFields,
    RootFields,
    ServerFields,
)
from envoy_tokenpools.core.admission import Reason
from envoy_tokenpools.core.pool import EntitlementState, ServiceClass
from envoy_tokenpools.metrics import FAMILIES
from envoy_tokenpools.openai.answers import RateLimits, rate_limit_headers
from envoy_tokenpools.openai.endpoint import Endpoint

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize(
    "fields",
    [
        RootFields,
        ServerFields,
        PoolFields,
        EntitlementFields,
        ResourcesFields,
        GainsFields,
        ModelShapeFields,
        KeyFields,
        IdentityFields,
    ],
)
def test_every_configuration_field_is_documented(fields: type[BaseModel]) -> None:
    """Each field that a configuration may hold is named in the README."""
    names = [field.alias or name for name, field in fields.model_fields.items()]
    assert [name for name in names if not re.search(rf"\b{name}\b", README)] == []


def test_every_metric_and_its_labels_are_documented() -> None:
    """Each metric is in the table, with its labels in the same row."""
    rows = [line for line in README.splitlines() if line.startswith("| `tokenpools_")]
    for family in FAMILIES:
        row = next((row for row in rows if f"`{family.name}`" in row), None)
        assert row is not None, family.name
        assert ", ".join(family.labels) in row, family.name


def test_every_reason_class_state_endpoint_and_header_is_documented() -> None:
    """What an operator or client can read in an answer is explained."""
    headers = [name for name, _ in rate_limit_headers(RateLimits(1, 1, 1, 1, 1, 1, 1_000))]
    words = [
        *(reason.value for reason in Reason),
        *(service_class.value for service_class in ServiceClass),
        *(state.value for state in EntitlementState),
        *(endpoint.value for endpoint in Endpoint),
        *headers,
        *("retry-after", "retry-after-ms", "x-should-retry", "x-tokenpools-reason"),
    ]
    assert [word for word in words if f"`{word}`" not in README] == []


def test_every_command_and_option_is_documented() -> None:
    """Each command with its options is in the README's table of commands."""
    (commands,) = (
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    for name, parser in commands.choices.items():
        row = next(
            line for line in README.splitlines() if line.startswith(f"| `envoy-tokenpools {name}")
        )
        options = {o for a in parser._actions for o in a.option_strings if o.startswith("--")}
        hidden = {"--help", "--envoy-admin-port", "--envoy-log-level"}
        assert [option for option in sorted(options - hidden) if option not in row] == [], name


def test_the_example_configuration_is_valid() -> None:
    """The README's pools.yaml loads, with warnings about its trial keys only."""
    (example,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    config = load_config(example, env={})
    assert list(config.pools) == ["qwen3-8b"]
    assert {warning.path.rpartition(".")[2] for warning in config.warnings} <= {"keys[0]", "plain"}
