"""
Trouble that a request may ask the simulated backend for, with the header `x-lab-fault`. Pure.
"""

from dataclasses import dataclass

FAULT_HEADER = "x-lab-fault"

_KNOWN = {"status", "reset-after", "truncate-after", "no-usage"}


@dataclass(frozen=True, slots=True)
class Fault:
    """
    What goes wrong with one answer; several faults are joined by `;`.

    Attributes:
        status: `status=500` answers with that status at once.
        reset_after: `reset-after=3` closes the connection after three tokens, in mid-message.
        truncate_after: `truncate-after=3` ends a stream cleanly after three tokens, without
            finish reason, usage or end mark; a whole body is cut in half.
        no_usage: `no-usage` leaves every usage out.
    """

    status: int | None = None
    reset_after: int | None = None
    truncate_after: int | None = None
    no_usage: bool = False

    @classmethod
    def parse(cls, header: str) -> "Fault":
        """
        Read the header; empty is no fault.

        Raises:
            ValueError: it asks for something unknown, or a number is none.
        """
        wanted: dict[str, str] = {}
        for part in filter(None, (piece.strip() for piece in header.split(";"))):
            name, _, value = part.partition("=")
            wanted[name] = value
        if unknown := wanted.keys() - _KNOWN:
            message = f"{FAULT_HEADER} knows {sorted(_KNOWN)}, not {sorted(unknown)}"
            raise ValueError(message)
        return cls(
            status=_number(wanted, "status"),
            reset_after=_number(wanted, "reset-after"),
            truncate_after=_number(wanted, "truncate-after"),
            no_usage="no-usage" in wanted,
        )

    def cuts_after(self, tokens: int) -> bool:
        """Whether an answer ends early once it has `tokens` tokens."""
        return tokens in (self.reset_after, self.truncate_after)


def _number(wanted: dict[str, str], name: str) -> int | None:
    return int(wanted[name]) if name in wanted else None
