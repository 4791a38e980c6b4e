"""
What a run recorded: every attempt of every request, and samples of the pool. JSON out and in.

Times are whole milliseconds since the start of the run, on the clock of whoever ran it.
"""

import enum
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.errors import TokenpoolsError


class Result(enum.Enum):
    """
    What became of one attempt.

    `evicted` was admitted and ended to give capacity back; `cut` was under way when the run was over.
    """

    COMPLETED = "completed"
    SHED = "shed"
    EVICTED = "evicted"
    FAILED = "failed"
    CUT = "cut"


class Attempt(msgspec.Struct, frozen=True, gc=False):
    """
    One HTTP request, as its client saw it.

    Attributes:
        entitlement: who sent it.
        wanted_ms: when the first attempt of the same request was sent.
        sent_ms: when this one was.
        ended_ms: when it was over, whatever its result.
        prompt_tokens: length of its prompt.
        asked_tokens: length of the answer that it wants.
        result: what became of it.
        reason: why it was shed, evicted or failed; empty otherwise.
        retries: how many attempts of the same request came before.
        decided_ms: when its status was known; None if it never was.
        first_token_ms: when the first text came; None if none did.
        output_tokens: tokens that were received.
    """

    entitlement: str
    wanted_ms: int
    sent_ms: int
    ended_ms: int
    prompt_tokens: int
    asked_tokens: int
    result: Result
    reason: str = ""
    retries: int = 0
    decided_ms: int | None = None
    first_token_ms: int | None = None
    output_tokens: int = 0

    @property
    def first_token_wait_ms(self) -> int | None:
        """Time to first token of this attempt."""
        return None if self.first_token_ms is None else self.first_token_ms - self.sent_ms


class Standing(msgspec.Struct, frozen=True):
    """Where one entitlement stood at the time of a sample; the filter's view."""

    in_flight: int = 0
    waiting: int = 0
    allocation: int = 0
    """Sequences that it may hold."""
    weight: float = 0.0
    debt: float = 0.0


class Sample(msgspec.Struct, frozen=True):
    """
    The pool at one moment.

    Attributes:
        at_ms: when.
        usable: sequences that the pool may hold.
        standings: by entitlement.
        running: sequences that the backend has in a slot; None if it does not tell.
        queued: sequences that wait inside the backend for a slot; None if it does not tell.
    """

    at_ms: int
    usable: int
    standings: dict[str, Standing]
    running: int | None = None
    queued: int | None = None


class Party(msgspec.Struct, frozen=True):
    """An entitlement that took part: its class, its SLO target, and the sequences of its baseline."""

    service_class: ServiceClass
    slo_target_ms: int | None
    concurrency: int


class Decisions(msgspec.Struct, frozen=True):
    """
    What one replica of the filter decided in a run.

    Attributes:
        made: requests that it let through or refused.
        alone: of these, those that it decided on without the shared books, which did not answer in time.
    """

    made: int
    alone: int = 0


class RunRecord(msgspec.Struct, frozen=True):
    """
    One run, whole.

    Attributes:
        scenario: name of the experiment.
        run: name of the run within it.
        about: what it shows.
        enforced: whether requests were really shed.
        time_scale: how much shorter than written it was.
        duration_ms: after this nothing was sent.
        slots: of the backend at full capacity.
        parties: entitlements, in the order of the configuration.
        attempts: in the order of their end.
        samples: in the order of time.
        decisions: of each replica of the filter; empty if nobody counted.
    """

    scenario: str
    run: str
    about: str
    enforced: bool
    time_scale: float
    duration_ms: int
    slots: int
    parties: dict[str, Party]
    attempts: list[Attempt]
    samples: list[Sample]
    decisions: list[Decisions] = []

    def of(self, entitlement: str) -> Iterator[Attempt]:
        """The attempts of one entitlement."""
        return (attempt for attempt in self.attempts if attempt.entitlement == entitlement)


class RecordError(TokenpoolsError):
    """A file is no record of runs."""


def write_records(path: Path, records: Mapping[str, RunRecord], checks: object = None) -> None:
    """
    Write the runs of an experiment, by their names, as one JSON file.

    Args:
        path: the file; overwritten.
        records: the runs.
        checks: what they were found to show, as plain values, for readers of the file.
    """
    path.write_bytes(msgspec.json.encode({"checks": checks, "runs": list(records.values())}))


def read_records(path: Path) -> dict[str, RunRecord]:
    """
    The runs in a file that `write_records` made.

    Raises:
        RecordError: the file cannot be read, or holds something else.
    """

    class _File(msgspec.Struct):
        runs: list[RunRecord]

    try:
        runs = msgspec.json.decode(path.read_bytes(), type=_File).runs
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise RecordError(f"{path} is no record of runs: {error}") from error
    return {run.run: run for run in runs}
