"""Logs: one JSON object a line."""

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from envoy_tokenpools.logs import (
    MAX_MESSAGES,
    MAX_PER_PERIOD,
    PERIOD_SECONDS,
    JsonFormatter,
    Throttle,
    configure_logs,
)


def line(**fields: object) -> dict[str, object]:
    """A record with these extra fields, formatted and read again."""
    record = logging.LogRecord("envoy_tokenpools.x", logging.INFO, "x.py", 1, "done", (), None)
    vars(record).update(fields)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    read: dict[str, object] = json.loads(text)
    return read


@pytest.fixture
def _restored() -> Iterator[None]:
    """The root logger as it was."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_says_when_how_bad_who_and_what() -> None:
    """In four fields, and whatever else was given."""
    read = line(pool="qwen", count=3)
    assert (read["level"], read["logger"]) == ("info", "envoy_tokenpools.x")
    assert (read["message"], read["pool"], read["count"]) == ("done", "qwen", 3)
    assert set(read) == {"time", "level", "logger", "message", "pool", "count"}


def test_the_time_has_milliseconds_and_is_in_utc() -> None:
    """Lines of several machines can be put in order."""
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, "done", (), None)
    record.created, record.msecs = 1_700_000_000.007, 7.0
    assert json.loads(JsonFormatter().format(record))["time"] == "2023-11-14T22:13:20.007+00:00"


@pytest.mark.parametrize("text", ["a\nb", 'quote " and \\', "ключ", "\x00\x1b[31m", "\u2028"])
def test_no_text_breaks_a_line(text: str) -> None:
    """Whatever a name or an error says stays inside of its field."""
    assert line(error=text)["error"] == text


def test_values_of_any_type_are_written() -> None:
    """As JSON where it has them, else as text."""
    read = line(nothing=None, names=["a", "b"], error=ValueError("x"), size=1.5)
    assert (read["nothing"], read["names"], read["size"]) == (None, ["a", "b"], 1.5)
    assert "x" in str(read["error"])


def test_a_lone_surrogate_does_not_lose_the_line() -> None:
    """A file's name may hold one."""
    assert "path" in line(path="bad-\udcff")


def test_an_exception_brings_its_traceback() -> None:
    """In one field, on the same line."""
    try:
        1 / int("0")
    except ZeroDivisionError:
        record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "no", (), sys.exc_info())
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert "ZeroDivisionError" in json.loads(text)["exception"]


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    ("level", "shown"), [("debug", 3), ("info", 2), ("warning", 1), ("error", 0)]
)
def test_logs_go_to_standard_error_from_their_level_on(
    level: str, shown: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One object a line; standard output stays for answers."""
    configure_logs(level)
    log = logging.getLogger("envoy_tokenpools.test")
    log.debug("one")
    log.info("two")
    log.warning("three", extra={"pool": "qwen"})
    out, err = capsys.readouterr()
    assert out == ""
    assert [json.loads(text)["message"] for text in err.splitlines()] == ["one", "two", "three"][
        3 - shown :
    ]


@pytest.mark.usefixtures("_restored")
def test_configuring_again_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    """No line twice."""
    configure_logs("info")
    configure_logs("info")
    logging.getLogger("x").info("once")
    assert len(capsys.readouterr().err.splitlines()) == 1


def _record(message: str, at_s: float, level: int = logging.WARNING) -> logging.LogRecord:
    record = logging.makeLogRecord({"name": "house", "msg": message, "levelno": level})
    record.created = at_s
    return record


def test_a_message_is_written_so_often_and_then_held_back() -> None:
    """The last that passes, the first that does not; and the next period says how many there were."""
    throttle = Throttle()
    written = [throttle.filter(_record("down", 1.0)) for _ in range(MAX_PER_PERIOD + 5)]
    assert written == [True] * MAX_PER_PERIOD + [False] * 5
    assert throttle.filter(_record("another", 1.0))
    late = _record("down", 1.0 + PERIOD_SECONDS)
    assert throttle.filter(late)
    assert vars(late)["held_back"] == 5
    assert "held_back" not in vars(_again(throttle, "another", 1.0 + PERIOD_SECONDS))


def _again(throttle: Throttle, message: str, at_s: float) -> logging.LogRecord:
    record = _record(message, at_s)
    assert throttle.filter(record)
    return record


def test_messages_that_never_repeat_do_not_fill_the_memory() -> None:
    """At the bound everything is forgotten, and nothing is lost."""
    throttle = Throttle()
    assert all(throttle.filter(_record(f"m{n}", 1.0)) for n in range(3 * MAX_MESSAGES))
    assert len(throttle._seen) <= MAX_MESSAGES


def test_debugging_lines_are_never_held_back() -> None:
    """Who asks for them looks for a certain one; and they hold back nothing of what is worse."""
    throttle = Throttle()
    written = [throttle.filter(_record("decided", 1.0, logging.DEBUG)) for _ in range(1_000)]
    assert all(written)
    assert throttle.filter(_record("decided", 1.0, logging.INFO))
