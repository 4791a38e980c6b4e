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

MAX_AWAY = 64
"""Refused requests remembered per entitlement: one that is away is enough to block."""


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
            self.first = (max(self.first[0], precedence), entitlement)
        elif precedence > self.first[0]:
            self.first, self.second = entry, self.first
        elif precedence > self.second[0]:
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
    _away: dict[str, dict[int, int]] = field(default_factory=dict)

    def add(
        self,
        entitlement: str,
        precedence: Precedence,
        fingerprint: int,
        *,
        inside_share: bool,
        retry_after_ms: int,
        now_ms: int,
    ) -> None:
        """A request was refused because the pool was contended, and told to come back in `retry_after_ms`."""
        self._age(now_ms)
        current = self._current
        if current.span_ms == 0 == self._last.span_ms:
            self._since_ms = now_ms
        numerator, denominator = PATIENCE
        away_ms = min(MAX_SPAN_MS, retry_after_ms * numerator // denominator + RETURN_MS)
        current.span_ms = max(current.span_ms, away_ms)
        current.add(entitlement, precedence, inside_share=inside_share)
        away = self._away.setdefault(entitlement, {})
        away.pop(fingerprint, None)  # in the order of the last refusals
        away[fingerprint] = now_ms + away_ms
        if len(away) > MAX_AWAY:
            del away[next(iter(away))]

    def admitted(self, entitlement: str, fingerprint: int, now_ms: int) -> None:
        """
        A request has what it wanted; its entitlement is forgotten when no other of its refused requests is away.

        A fingerprint of 0 is unknown: who knows which of them was admitted.
        """
        away = self._away.get(entitlement)
        if away is None:
            return
        if fingerprint:
            away.pop(fingerprint, None)
        while away:
            oldest = next(iter(away))
            if now_ms < away[oldest]:
                return
            del away[oldest]
        del self._away[entitlement]
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
