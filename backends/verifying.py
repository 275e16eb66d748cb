"""What a backend can do beside the others that speculation needs: look at several proposed tokens in one engine call.

The engine computes all of them, as it would a prefill, and gives the logits after each. Whoever proposed them says
how many stay; the rows of the others are gone before the call returns, so that no row of a rejected token is ever
resident between two operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import numpy as np

from kvtape.backends.errors import InputRejected
from kvtape.backends.protocol import Backend, Logits
from kvtape.planner.capabilities import Capabilities

__all__ = ["Keep", "Verified", "Verifier", "as_verifier", "check_kept", "check_one_call", "no_verifying_reason"]

Keep = Callable[[Logits], int]
"""From the float32 logits `[n, n_vocab]` after each of n tokens: how many of the tokens stay, 0 to n."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The first `kept` of the tokens are resident; `logits` `[n_vocab]` after the last of them, `[0]` after none.

    `calls` of the engine; `counted` as in `protocol.Computed`.
    """

    kept: int
    logits: Logits
    calls: int
    counted: bool = True

    @classmethod
    def of(cls, kept: int, each: Logits, calls: int) -> Verified:
        """From the logits after each token."""
        return cls(kept, each[kept - 1].copy() if kept else np.empty(0, np.float32), calls)


@runtime_checkable
class Verifier(Protocol):
    """A backend that can look at drafts, or says why it cannot.

    `verify_margin`: how far apart the two best logits must be for a greedy choice to be that of a call for one token.
    0 where all numbers are those of such calls to the bit, so that whatever is chosen from them is, too.
    """

    verify_margin: float

    def verify_refusal(self) -> str | None:
        """Why `verify` is refused here; None where it works."""

    def verify(self, tokens: Sequence[int], tape_start: int, keep: Keep) -> Verified:
        """Compute `tokens` (at most `config.chunk`) behind the last row in one call; those that `keep` gives up go.

        Raises UnsupportedOperation, InputRejected, ContextOverflow (the given up ones need room too), Cancelled and
        whatever `keep` raises with the state of the start; EngineFault.
        """


def as_verifier(backend: Backend) -> Verifier | str:
    """The backend as one that verifies drafts, or why it does not."""
    # Not by isinstance: it asks for the margin, and a backend that measures its own would compute for the answer.
    if not all(callable(getattr(backend, name, None)) for name in ("verify", "verify_refusal")):
        return f"{backend.name} has no operation that looks at several proposed tokens in one call"
    verifier = cast("Verifier", backend)
    return verifier.verify_refusal() or verifier


def no_verifying_reason(capabilities: Capabilities, refusal: Callable[[str], str | None]) -> str | None:
    """What every backend needs for it: rows can be cut off at the end, and nobody counts attention.

    A rejected token's queries are computed like any other's; what they attended to would stay in the account.
    """
    if not capabilities.remove_tail:
        return f"remove_tail is false: {refusal('remove_tail')}"
    if capabilities.attention_scores:
        return "scores=on counts what every query attended to, and those of rejected tokens would count too"
    return None


def check_one_call(n: int, chunk: int) -> None:
    """Raises InputRejected for more tokens than one engine call takes."""
    if n > chunk:
        raise InputRejected(f"{n} tokens to verify: one engine call takes {chunk}")


def check_kept(kept: int, n: int) -> int:
    """What `keep` answered. Raises InputRejected for no number from 0 to `n`."""
    if isinstance(kept, bool) or not isinstance(kept, int | np.integer) or not 0 <= kept <= n:
        raise InputRejected(f"{kept!r} of {n} tokens cannot stay: give a whole number from 0 to {n}")
    return int(kept)
