"""
Logs as one JSON object per line on standard error, for machines that collect them.

What is logged never holds prompts, keys or bodies: messages are constant texts, the rest are named fields.
"""

import json
import logging
import sys
from datetime import UTC, datetime

MAX_PER_PERIOD = 20
PERIOD_SECONDS = 60
MAX_MESSAGES = 1_000
"""How often one message is written, and how many messages are told apart."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, and whatever was passed as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((k, v) for k, v in vars(record).items() if k not in _STANDARD)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # Escapes whatever is not ASCII, halves of surrogates too, which file names may hold.
        return json.dumps(line, default=str)


class Throttle(logging.Filter):
    """
    Lets each message through `MAX_PER_PERIOD` times in `PERIOD_SECONDS`, and then says how many it held back.

    What fails with every request would else fill a disk. Our messages are constant texts, so that there are few of
    them; the lines of an Envoy child are not, and each of them counts alone. Debugging lines are all written: whoever
    asks for them looks for a certain one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], list[float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this record is written."""
        if record.levelno <= logging.DEBUG:
            return True
        key = (record.name, record.getMessage())
        begun_count = self._seen.get(key)
        if begun_count is None or record.created - begun_count[0] >= PERIOD_SECONDS:
            if len(self._seen) >= MAX_MESSAGES:
                self._seen.clear()
            held_back = int(begun_count[1]) - MAX_PER_PERIOD if begun_count is not None else 0
            if held_back > 0:
                record.held_back = held_back
            self._seen[key] = [record.created, 1]
            return True
        begun_count[1] += 1
        return begun_count[1] <= MAX_PER_PERIOD


def configure_logs(level: str) -> None:
    """Send logs of `level` and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(Throttle())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
