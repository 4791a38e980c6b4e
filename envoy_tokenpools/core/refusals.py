"""
Who was refused lately, so that nobody with a lesser claim slips past them (design: admission rule 5).
"""

from dataclasses import dataclass, field

Precedence = tuple[int, float]
"""Rank of the class, then weight: no debt or SLO lets one class pass a higher one."""

_NOBODY: tuple[Precedence, str] = ((-1, 0.0), "")


@dataclass(slots=True)
class _Tick:
    """The refusals of one tick; of the precedences only the two highest matter: one may be the asker's own."""

    inside: set[str] = field(default_factory=set)
    first: tuple[Precedence, str] = _NOBODY
    second: tuple[Precedence, str] = _NOBODY

    def add(self, entitlement: str, precedence: Precedence, *, inside_share: bool) -> None:
        if inside_share:
            self.inside.add(entitlement)
        entry = (precedence, entitlement)
        if entitlement == self.first[1]:
            self.first = max(self.first, entry)
        elif entry > self.first:
            self.first, self.second = entry, self.first
        elif entry > self.second:
            self.second = entry

    def blocks(self, entitlement: str, precedence: Precedence) -> bool:
        if self.inside and (len(self.inside) > 1 or entitlement not in self.inside):
            return True
        highest = self.second if self.first[1] == entitlement else self.first
        return highest[0] > precedence


@dataclass(slots=True)
class RefusalLog:
    """Pool refusals of the current and the last tick; constant work however many entitlements there are."""

    _current: _Tick = field(default_factory=_Tick)
    _last: _Tick = field(default_factory=_Tick)

    def add(self, entitlement: str, precedence: Precedence, *, inside_share: bool) -> None:
        """`entitlement` was refused because the pool was contended."""
        self._current.add(entitlement, precedence, inside_share=inside_share)

    def blocks(self, entitlement: str, precedence: Precedence) -> bool:
        """
        Whether a request beyond its entitlement's share would pass somebody.

        That is another who was refused while inside its share, or another of higher precedence who was refused.
        """
        return self._current.blocks(entitlement, precedence) or self._last.blocks(
            entitlement, precedence
        )

    def roll(self) -> None:
        """A tick ended: what was refused two ticks ago is forgotten."""
        self._last, self._current = self._current, _Tick()
