"""An observer that writes down what it is told."""

from dataclasses import dataclass, field

from envoy_tokenpools.observer import Decided, FirstToken, Outcome, Settled, Waited


@dataclass(slots=True)
class RecordingObserver:
    """Every event, by kind, in order."""

    decisions: list[Decided] = field(default_factory=list)
    settlements: list[Settled] = field(default_factory=list)
    first_tokens: list[FirstToken] = field(default_factory=list)
    waits: list[Waited] = field(default_factory=list)
    store_failures: list[str] = field(default_factory=list)
    reloads: list[bool] = field(default_factory=list)

    def decided(self, event: Decided) -> None:
        """See `Observer`."""
        self.decisions.append(event)

    def settled(self, event: Settled) -> None:
        """See `Observer`."""
        self.settlements.append(event)

    def first_token(self, event: FirstToken) -> None:
        """See `Observer`."""
        self.first_tokens.append(event)

    def waited(self, event: Waited) -> None:
        """See `Observer`."""
        self.waits.append(event)

    def store_failed(self, operation: str) -> None:
        """See `Observer`."""
        self.store_failures.append(operation)

    def config_reloaded(self, *, succeeded: bool) -> None:
        """See `Observer`."""
        self.reloads.append(succeeded)

    def outcomes(self) -> list[tuple[Outcome, str]]:
        """Outcome and reason of every decision."""
        return [(event.outcome, event.reason) for event in self.decisions]
