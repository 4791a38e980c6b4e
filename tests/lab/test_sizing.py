"""A traffic log replayed against a configuration."""

import json
from pathlib import Path

import pytest

from envoy_tokenpools.cli import main
from envoy_tokenpools.config import Config, load_config
from envoy_tokenpools.errors import ConfigError
from envoy_tokenpools.lab.sizing import Waits, size
from envoy_tokenpools.lab.trace import read_trace

POOLS = """
pools:
  - name: shared
    models: [m]
    capacity: {tokens_per_second: 400, kv_cache: 16GiB, concurrency: 4}
    kv_bytes_per_token: 144KiB
    entitlements:
      - name: vip
        class: guaranteed
        baseline: {tokens_per_second: 200, kv_cache: 4GiB, concurrency: 2}
        keys: [{plain: vip}]
      - {name: batch, class: spot, keys: [{plain: batch}]}
"""


def config() -> Config:
    """A pool of four sequences."""
    return load_config(POOLS, env={})


def line(
    at: object, who: str = "vip", prompt: object = 10, output: object = 100, **more: object
) -> str:
    """One request of a log."""
    fields = {"time": at, "entitlement": who, "prompt_tokens": prompt, "output_tokens": output}
    return json.dumps(fields | more)


def log(path: Path, *lines: str) -> Path:
    """A log of these lines."""
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_who_would_have_got_what(tmp_path: Path) -> None:
    """Eight requests of spot at once on four slots: four are served, four shed; the guaranteed tenant comes through."""
    lines = [line(0, "batch") for _ in range(8)] + [line(0.5), line(0.5)]
    sizing = size(config(), log(tmp_path / "log", *lines), tokens_per_second=200)
    batch, vip = sizing.got["batch"], sizing.got["vip"]
    assert (batch.requests, batch.completed, batch.shed.total()) == (8, 4, 4)
    assert (vip.requests, vip.completed, vip.shed.total()) == (2, 2, 0)
    assert (vip.tokens_wanted, vip.tokens_got) == (220, 220)
    assert batch.tokens_got == 440
    assert sizing.by_class()["spot"].requests == 8
    assert vip.waits.percentile_ms(0.99) is not None


def test_shed_requests_may_be_tried_again(tmp_path: Path) -> None:
    """Counted once as wanted, however often they are tried."""
    lines = [line(0, "batch", 10, 50) for _ in range(6)]
    sizing = size(config(), log(tmp_path / "log", *lines), tokens_per_second=200, retries=5)
    batch = sizing.got["batch"]
    assert (batch.requests, batch.completed) == (6, 6)
    assert batch.shed.total() >= 2


def test_times_may_be_instants_and_a_little_out_of_order(tmp_path: Path) -> None:
    """As logs of several writers are."""
    path = log(
        tmp_path / "log",
        line("2026-11-30T10:00:01Z"),
        line("2026-11-30T10:00:00.500+00:00"),
        "",
        line("2026-11-30T10:00:09"),
    )
    trace = read_trace(path, {"vip": None})
    assert (trace.requests, trace.duration_ms) == (3, 8_500)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 2: Input data was truncated"),
        (line(1, "who"), "line 2: names an entitlement that the pool does not have"),
        (line(1, prompt=0), "line 2: has a length that is not between 1 and 10000000"),
        (line(1, max_tokens=-1), "line 2: has a length that is not between 1 and 10000000"),
        (line(1, output="many"), "line 2: Expected `int`, got `str` - at `$.output_tokens`"),
        (line("yesterday"), "line 2: has a time that is neither seconds nor ISO 8601"),
        (line(-5), "line 2: is more than a second earlier than a line before it: sort the log"),
        (line(1e300), "line 2: has a time that is not a number of seconds"),
    ],
)
def test_faults_name_their_line(tmp_path: Path, text: str, message: str) -> None:
    """And nothing is replayed."""
    with pytest.raises(ConfigError) as raised:
        size(config(), log(tmp_path / "log", line(0), text))
    assert [str(fault) for fault in raised.value.faults] == [message]


def test_a_log_of_faults_is_not_told_line_by_line(tmp_path: Path) -> None:
    """Twenty are enough."""
    with pytest.raises(ConfigError) as raised:
        size(config(), log(tmp_path / "log", *["{"] * 100))
    assert len(raised.value.faults) == 20


def test_an_empty_log_and_no_log(tmp_path: Path) -> None:
    """Both are told."""
    with pytest.raises(ConfigError, match="holds no request"):
        size(config(), log(tmp_path / "log"))
    with pytest.raises(ConfigError, match="cannot be read"):
        size(config(), tmp_path / "none")
    with pytest.raises(ConfigError, match="have none named 'x'"):
        size(config(), tmp_path / "none", pool_name="x")


def test_waits_are_kept_closely_enough() -> None:
    """Within five in a hundred, in constant memory."""
    waits = Waits()
    for wait_ms in range(1, 10_001):
        waits.add(wait_ms)
    assert waits.percentile_ms(0.5) == pytest.approx(5_000, rel=0.05)
    assert waits.percentile_ms(0.99) == pytest.approx(9_900, rel=0.05)
    assert Waits().percentile_ms(0.5) is None


def test_the_command_sizes_a_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a configuration file and a log; without either it says what is missing."""
    pools = tmp_path / "pools.yaml"
    pools.write_text(POOLS, "utf-8")
    trace = log(tmp_path / "log", line(0), line(1, "batch"))
    assert main(["simulate", "--config", str(pools), "--trace", str(trace)]) == 0
    said = capsys.readouterr().out
    assert "Pool shared: 2 requests in 1 s; 4 slots" in said
    assert main(["simulate"]) == 1
    assert "name a SCENARIO, or --config with --trace" in capsys.readouterr().err


def test_the_command_simulates_a_scenario(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And writes the record and the picture."""
    record, picture = tmp_path / "r.json", tmp_path / "p.png"
    arguments = ["simulate", "mixed", "--json", str(record), "--plot", str(picture)]
    assert main(arguments) == 0
    assert "s of CPU" in capsys.readouterr().out
    assert json.loads(record.read_bytes())["runs"]
    assert picture.read_bytes().startswith(b"\x89PNG")
