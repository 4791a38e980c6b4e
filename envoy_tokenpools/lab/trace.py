"""
A recorded traffic log as arrivals: JSON lines, read twice and never held.

    {"time": 1.5, "entitlement": "chat", "prompt_tokens": 40, "output_tokens": 60}

`time` is seconds, or an ISO 8601 instant; `max_tokens` may say what the request stated, else it stated its output.
"""

import datetime as dt
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from envoy_tokenpools.errors import ConfigError, Fault
from envoy_tokenpools.lab.arrivals import Arrival
from envoy_tokenpools.lab.scenario import Load

DISORDER_MS = 1_000
"""Lines may be this much earlier than one before them: logs are written by several writers."""

MAX_FAULTS = 20

MAX_TOKENS = 10_000_000


class _Line(msgspec.Struct):
    time: float | str
    entitlement: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None


_LINES = msgspec.json.Decoder(_Line)


@dataclass(frozen=True, slots=True)
class Trace:
    """
    A log that was read once and has no faults.

    Attributes:
        path: where it is.
        start_ms: the time of its first request, in its own time.
        duration_ms: from there to the last one.
        requests: how many there are.
    """

    path: Path
    start_ms: float
    duration_ms: float
    requests: int

    def arrivals(self, loads: Mapping[str, Load]) -> Iterator[Arrival]:
        """The requests, sent as the load of their entitlement says; read as they are needed."""
        stated: dict[tuple[str, int], Load] = {}
        for line, at_ms in _read(self.path):
            load = loads[line.entitlement]
            if line.max_tokens is not None:
                key = (line.entitlement, line.max_tokens)
                load = stated.setdefault(key, replace(load, max_tokens=line.max_tokens))
            since_ms = max(0.0, at_ms - self.start_ms)
            yield Arrival(since_ms, load, line.prompt_tokens, line.output_tokens)


def read_trace(path: Path, entitlements: Mapping[str, object]) -> Trace:
    """
    Check the whole log.

    Raises:
        ConfigError: the first faults by their line; or there is no request, or no file.
    """
    faults: list[Fault] = []
    start_ms = last_ms = None
    requests = 0
    try:
        for number, text in _numbered(path):
            try:
                line = _LINES.decode(text)
                at_ms = _time_ms(line.time)
                _check(line, at_ms, last_ms, entitlements)
            except (msgspec.DecodeError, ValueError) as error:
                faults.append(Fault(f"line {number}", str(error)))
                if len(faults) == MAX_FAULTS:
                    break
                continue
            start_ms = at_ms if start_ms is None else min(start_ms, at_ms)
            last_ms = at_ms if last_ms is None else max(last_ms, at_ms)
            requests += 1
    except OSError as error:
        raise ConfigError([Fault(str(path), f"cannot be read: {error.strerror}")]) from error
    if faults:
        raise ConfigError(faults)
    if start_ms is None or last_ms is None:
        raise ConfigError([Fault(str(path), "holds no request")])
    return Trace(path, start_ms, last_ms - start_ms, requests)


def _check(
    line: _Line, at_ms: float, last_ms: float | None, entitlements: Mapping[str, object]
) -> None:
    if line.entitlement not in entitlements:
        raise ValueError("names an entitlement that the pool does not have")
    stated = 1 if line.max_tokens is None else line.max_tokens
    if not all(0 < n <= MAX_TOKENS for n in (line.prompt_tokens, line.output_tokens, stated)):
        raise ValueError(f"has a length that is not between 1 and {MAX_TOKENS}")
    if last_ms is not None and at_ms < last_ms - DISORDER_MS:
        raise ValueError("is more than a second earlier than a line before it: sort the log")


def _time_ms(value: float | str) -> float:
    if isinstance(value, str):
        try:
            instant = dt.datetime.fromisoformat(value)
        except ValueError:
            raise ValueError("has a time that is neither seconds nor ISO 8601") from None
        if instant.tzinfo is None:
            instant = instant.replace(tzinfo=dt.UTC)
        return instant.timestamp() * 1_000
    if not abs(value) < 1e12:
        raise ValueError("has a time that is not a number of seconds")
    return value * 1_000


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield number, text


def _read(path: Path) -> Iterator[tuple[_Line, float]]:
    for _, text in _numbered(path):
        line = _LINES.decode(text)
        yield line, _time_ms(line.time)
