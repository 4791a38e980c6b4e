"""Records of runs: to JSON and back, and what is no record."""

from pathlib import Path

import msgspec
import pytest

from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.lab.record import RecordError, Result, read_records, write_records
from tests.support.records import attempt, record, sample, shed

RUN = record(
    attempt("chat", 0, 250, 900),
    shed("batch", 5, "low_priority"),
    attempt("batch", 7, None, 99, result=Result.CUT),
    samples=[sample(0, chat=0.0), sample(200, running=None, queued=None, chat=-0.25)],
    classes={"chat": ServiceClass.GUARANTEED, "batch": ServiceClass.SPOT},
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Every attempt, sample and party, in their order."""
    path = tmp_path / "small.json"
    write_records(path, {"run": RUN}, [{"name": "a check"}])
    assert read_records(path) == {"run": RUN}
    assert msgspec.json.decode(path.read_bytes())["checks"] == [{"name": "a check"}]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"runs": [{"scenario": 1}]}', b"\xff"])
def test_other_files_are_no_records(tmp_path: Path, content: bytes) -> None:
    """Neither other JSON nor anything else."""
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="is no record of runs"):
        read_records(path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(RecordError, match="cannot be read"):
        read_records(tmp_path / "absent.json")


def test_attempts_of_one_entitlement() -> None:
    """In the order of their end; the wait for the first token is counted from when it was sent."""
    assert [one.result for one in RUN.of("batch")] == [Result.SHED, Result.CUT]
    assert [one.first_token_wait_ms for one in RUN.attempts] == [250, None, None]
