"""
Every exception of the package, drawn once.

    TokenpoolsError
    ├── ConfigError          the configuration has faults (all of them are listed)
    ├── VocabularyError      a tokenizer vocabulary is missing or damaged: a start-up error
    ├── EnvoyError           the Envoy child cannot be found or started
    ├── WorkerError          a worker process does not come up, or dies again and again
    ├── RequestError         a client's request cannot be served; carries the answer's status and code
    └── StoreError           the shared state cannot be reached or answered wrongly

Being shed is not an exception: it is a return value (`core.admission.Refusal`).
"""

from collections.abc import Sequence
from dataclasses import dataclass


class TokenpoolsError(Exception):
    """Base of all errors that the package raises on purpose."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a configuration: where it is and what is wrong with it."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(TokenpoolsError):
    """The configuration has faults; `faults` names every one of them with its path."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class VocabularyError(TokenpoolsError):
    """A tokenizer vocabulary is missing or damaged; the message says what to install."""


class EnvoyError(TokenpoolsError):
    """The Envoy binary is missing, or the child process did not become ready."""


class WorkerError(TokenpoolsError):
    """A worker process did not come up, or died too often; its own log says why."""


class RequestError(TokenpoolsError):
    """
    A request that cannot be served, with the answer it should get.

    Attributes:
        status: HTTP status of the answer (400, 401, 404, 413, 415).
        code: the machine-readable `error.code` of the OpenAI error body.
        param: the request field at fault, or None.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        self.status = status
        self.code = code
        self.param = param
        super().__init__(message)


class StoreError(TokenpoolsError):
    """
    The store failed.

    Attributes:
        transient: whether the same call may succeed later.
        uncertain: whether it may have been carried out all the same.
    """

    def __init__(self, message: str, *, transient: bool, uncertain: bool = True) -> None:
        self.transient = transient
        self.uncertain = uncertain
        super().__init__(message)
