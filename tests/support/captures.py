"""
Reads the responses and requests recorded from a real vLLM server (tests/captures/README.md).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "captures"


@dataclass(frozen=True, slots=True)
class Recorded:
    """
    One recorded HTTP response.

    Attributes:
        name: the file's name without its suffix.
        status: HTTP status code.
        headers: by lower-case name.
        body: without the framing of chunked transfer.
        chunks: the body in the pieces in which the server sent it.
        request: the request body that was answered, where it was recorded.
    """

    name: str
    status: int
    headers: dict[str, str]
    body: bytes
    chunks: tuple[bytes, ...]
    request: dict[str, Any] | None

    @property
    def content_type(self) -> str:
        """The header's value, empty if there is none."""
        return self.headers.get("content-type", "")

    @property
    def is_stream(self) -> bool:
        """Whether the server sent server-sent events."""
        return self.content_type.startswith("text/event-stream")


def response_names() -> list[str]:
    """Names of all recorded responses; the bare /metrics pages are none."""
    return sorted(
        path.stem for path in FOLDER.glob("*.txt") if path.read_bytes().startswith(b"HTTP/")
    )


def load(name: str) -> Recorded:
    """
    One recorded response by name.

    Raises:
        ValueError: the file is no HTTP response, or its chunked framing is broken.
    """
    head, blank, rest = (FOLDER / f"{name}.txt").read_bytes().partition(b"\r\n\r\n")
    status_line, *header_lines = head.decode("latin-1").split("\r\n")
    if not blank or not status_line.startswith("HTTP/"):
        raise ValueError(f"{name} is no recorded response")
    headers = {}
    for line in header_lines:
        field, _, value = line.partition(":")
        headers[field.lower()] = value.strip()
    chunks = _unframed(rest) if headers.get("transfer-encoding") == "chunked" else (rest,)
    return Recorded(
        name=name,
        status=int(status_line.split(" ")[1]),
        headers=headers,
        body=b"".join(chunks),
        chunks=chunks,
        request=_request(name),
    )


def _unframed(framed: bytes) -> tuple[bytes, ...]:
    chunks: list[bytes] = []
    position = 0
    while True:
        line_end = framed.index(b"\r\n", position)
        size = int(framed[position:line_end], 16)
        start, end = line_end + 2, line_end + 2 + size
        if framed[end : end + 2] != b"\r\n":
            raise ValueError(f"chunk at byte {position} is not {size} bytes long")
        if size == 0:
            return tuple(chunks)
        chunks.append(framed[start:end])
        position = end + 2


def _request(name: str) -> dict[str, Any] | None:
    path = FOLDER / f"{name}.request.json"
    if not path.exists():
        return None
    try:
        request = json.loads(path.read_bytes())
    except ValueError:  # one of them is broken on purpose
        return None
    return request if isinstance(request, dict) else None
