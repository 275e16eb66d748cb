"""What a session can do, and why it cannot do the rest."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from kvtape.backends.errors import UnsupportedOperation, UsageError
from kvtape.planner.capabilities import Capabilities

__all__ = ["Gates"]


@dataclass(frozen=True, slots=True)
class Gates:
    """The capability struct and the reason of every flag that is false."""

    capabilities: Capabilities
    reasons: dict[str, str]

    def without(self, flag: str, reason: str) -> Gates:
        """With one more flag down."""
        return Gates(replace(self.capabilities, **{flag: False}), {**self.reasons, flag: reason})

    def refusal(self, flag: str) -> str | None:
        """The reason of a false flag, None of a true one. Raises UsageError for a name that is no flag."""
        if flag not in {f.name for f in fields(Capabilities)}:
            known = ", ".join(f.name for f in fields(Capabilities))
            raise UsageError(f"{flag!r} is no capability; known: {known}")
        return self.reasons.get(flag)

    def require(self, operation: str, flag: str) -> None:
        """Raises UnsupportedOperation, with the reason, where `operation` needs a flag that is false."""
        why = self.refusal(flag)
        if why is not None:
            raise UnsupportedOperation(operation, f"{flag} is false: {why}")
