"""
Who was refused lately, so that nobody with a lesser claim slips past them (design: admission rule 5).

Lately is as long as a client that does as it was told may stay away: an entitlement that was refused is remembered for
that time, and no longer than until all that it was refused has been admitted.
"""

from dataclasses import dataclass, field

Precedence = tuple[int, float]
"""Rank of the class, then weight: no debt or SLO lets one class pass a higher one."""

_NOBODY: tuple[Precedence, str] = ((-1, 0.0), "")

PATIENCE = (5, 4)
"""A refused client comes back after up to five quarters of the time that it was told."""

RETURN_MS = 100
"""What the way back may take."""

MAX_SPAN_MS = 10_000
"""Whoever was told to stay away for longer blocks nobody meanwhile."""


@dataclass(slots=True)
class _Generation:
    """
    Refusals of some time; of the precedences only the two highest matter: one may be the asker's own.

    Attributes:
        span_ms: how long the last of them may stay away.
    """

    span_ms: int = 0
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

    def forget(self, entitlement: str) -> None:
        """It wants nothing any more; who would come next after the two highest is not known, and refused again soon."""
        self.inside.discard(entitlement)
        if entitlement == self.first[1]:
            self.first, self.second = self.second, _NOBODY
        elif entitlement == self.second[1]:
            self.second = _NOBODY

    def blocks(self, entitlement: str, precedence: Precedence) -> bool:
        if self.inside and (len(self.inside) > 1 or entitlement not in self.inside):
            return True
        highest = self.second if self.first[1] == entitlement else self.first
        return highest[0] > precedence


@dataclass(slots=True)
class RefusalLog:
    """Pool refusals in two generations; constant work however many entitlements there are."""

    _current: _Generation = field(default_factory=_Generation)
    _last: _Generation = field(default_factory=_Generation)
    _since_ms: int = 0

    def add(
        self,
        entitlement: str,
        precedence: Precedence,
        *,
        inside_share: bool,
        retry_after_ms: int,
        now_ms: int,
    ) -> None:
        """`entitlement` was refused because the pool was contended, and told to come back in `retry_after_ms`."""
        self._age(now_ms)
        current = self._current
        if current.span_ms == 0 == self._last.span_ms:
            self._since_ms = now_ms
        numerator, denominator = PATIENCE
        away_ms = min(MAX_SPAN_MS, retry_after_ms * numerator // denominator + RETURN_MS)
        current.span_ms = max(current.span_ms, away_ms)
        current.add(entitlement, precedence, inside_share=inside_share)

    def forget(self, entitlement: str) -> None:
        """All that `entitlement` was refused has been admitted."""
        if self._current.span_ms or self._last.span_ms:
            self._current.forget(entitlement)
            self._last.forget(entitlement)

    def blocks(self, entitlement: str, precedence: Precedence, now_ms: int) -> bool:
        """
        Whether a request beyond its entitlement's share would pass somebody.

        That is another who was refused while inside its share, or another of higher precedence who was refused.
        """
        self._age(now_ms)
        return self._current.blocks(entitlement, precedence) or self._last.blocks(
            entitlement, precedence
        )

    def _age(self, now_ms: int) -> None:
        """A generation ends when all of it and of the one before should be back, and is forgotten with the next."""
        span_ms = max(self._current.span_ms, self._last.span_ms)
        age_ms = now_ms - self._since_ms
        if span_ms == 0 or age_ms < span_ms:
            return
        self._last = self._current if age_ms < 2 * span_ms else _Generation()
        self._current = _Generation()
        self._since_ms = now_ms
