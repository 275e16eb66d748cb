"""Who proposes tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtape.backends.errors import UsageError

__all__ = ["DraftFailed", "Drafter"]


class DraftFailed(UsageError):
    """What proposes tokens failed. The session it proposes for is as it was, and can go on without it."""


class Drafter(Protocol):
    """Proposes what may come next on a tape. Right or wrong, it changes how long a decode takes and nothing else.

    `spec`: its canonical text, which stands on the session's open event.
    """

    spec: str

    def draft(self, tape: Sequence[int], at_most: int) -> Sequence[int]:
        """0 to `at_most` tokens that may follow `tape`; what is more is not looked at.

        `tape` may have been cut and changed since the last call. Raises DraftFailed.
        """

    def close(self) -> None:
        """Free what it holds. Idempotent."""
