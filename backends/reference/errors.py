"""What the KV engines raise. `exit_code` is what the command line returns.

KvtapeError
|-- UsageError              (2)
|   |-- ModelUnsupported        the NumPy decoder does not know this kind of model
|   |-- EmptyPrompt             a prefill of no tokens, or a decode before any
|   `-- ExecutionRefused        this engine does not run this model, or not in this way; `kind` says which of three
|-- EnvironmentProblem      (3)
|   `-- BackendUnavailable      what the call needs (a feed-forward server) is not there
|-- RetrievalMiss           (1) a retrieval engine found nothing to answer from
|-- InvariantViolation      (1) an engine's own books do not add up; its state must not be used again
|-- BackendFailure          (1) what the call needs failed in the middle; the state is that before the call
`-- StateInvalidated        (1) a failed step could not be taken back; prefill again
"""

from __future__ import annotations

from typing import Literal

from kvtape.backends.errors import EnvironmentProblem, KvtapeError, UsageError

__all__ = [
    "BackendFailure",
    "BackendUnavailable",
    "EmptyPrompt",
    "ExecutionRefused",
    "InvariantViolation",
    "ModelUnsupported",
    "RetrievalMiss",
    "StateInvalidated",
]


class ModelUnsupported(UsageError):
    """Names the file and what stands in the way."""


class EmptyPrompt(UsageError):
    def __init__(self, what: str = "a prefill of no tokens; give at least one") -> None:
        super().__init__(what)


class BackendUnavailable(EnvironmentProblem):
    pass


class RetrievalMiss(KvtapeError):
    def __init__(self, reason: str) -> None:
        super().__init__(f"nothing retrieved: {reason}")
        self.reason = reason


class InvariantViolation(KvtapeError):
    def __init__(self, what: str) -> None:
        super().__init__(f"the engine's own books do not add up: {what}; the state must not be used again")
        self.what = what


class BackendFailure(KvtapeError):
    def __init__(self, details: str) -> None:
        super().__init__(details)
        self.details = details


class ExecutionRefused(UsageError):
    """`kind`: residency (the rows are not where they would have to be), unsupported (the model has what the engine
    cannot carry), binding_defect (the parts that were put together do not belong together).
    """

    def __init__(self, kind: Literal["residency", "unsupported", "binding_defect"], why: str) -> None:
        super().__init__(f"refused ({kind}): {why}")
        self.kind = kind
        self.why = why


class StateInvalidated(KvtapeError):
    def __init__(self, cause: str) -> None:
        super().__init__(f"the state is lost: {cause}; prefill the session again")
        self.cause = cause
