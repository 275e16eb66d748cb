"""Draft-model speculation: a second, smaller model follows the tape and says greedily what it would go on with."""

from __future__ import annotations

from collections.abc import Sequence

from kvtape.backends.errors import KvtapeError
from kvtape.backends.protocol import Backend, Engine, Logits
from kvtape.backends.speculation.drafter import DraftFailed

__all__ = ["DraftModel"]


class DraftModel:
    """A session of the draft engine, which this owns, as it does `engine`, and the stretch of the tape that it holds.

    It keeps what it has in common with the tape and computes the rest. When its own context is full it goes on from
    the last half of it: its proposals get worse then, which costs time and nothing else. Where the tape has half a
    context, it never follows less.
    """

    def __init__(self, backend: Backend, *, name: str, tokens: int = 4, engine: Engine | None = None) -> None:
        self.spec = f"draft:model={name},tokens={tokens}"
        self._backend, self._tokens, self._engine = backend, tokens, engine
        self._held: list[int] = []
        self._base = 0

    def draft(self, tape: Sequence[int], at_most: int) -> Sequence[int]:
        """See `Drafter`."""
        n = min(at_most, self._tokens)
        if n < 1 or not tape:
            return ()
        try:
            logits = self._follow(list(tape), n)
            run = self._backend.decode_until(n - 1, self._backend.n_ctx, len(self._held), logits, _greedy)
        except KvtapeError as err:
            raise DraftFailed(f"the draft model cannot go on ({err}); open the session without speculation") from err
        self._held += run.tokens
        ending = len(run.tokens) == n - 1
        return [*run.tokens, _greedy(run.logits)] if ending else run.tokens

    def _follow(self, tape: list[int], n: int) -> Logits:
        """Hold `tape`, or its last half a context where it is longer; logits after its last token."""
        room, half = self._backend.n_ctx - n, self._backend.n_ctx // 2
        held = len(tape) - self._base
        # A tape that was cut to just behind the base would leave next to nothing to draft from.
        if held > room or (self._base and held < half):
            self._base = max(0, len(tape) - half)
            self._cut(0)
        wanted = tape[self._base :]
        same = next((i for i, (a, b) in enumerate(zip(self._held, wanted, strict=False)) if a != b), None)
        # At least the last token is computed: its logits are what is asked for.
        self._cut(min(len(self._held), len(wanted) - 1) if same is None else min(same, len(wanted) - 1))
        rest = wanted[len(self._held) :]
        logits = self._backend.prefill(rest, len(self._held)).logits
        self._held += rest
        return logits

    def _cut(self, stop: int) -> None:
        if stop < len(self._held):
            self._backend.truncate(stop)
            del self._held[stop:]

    def close(self) -> None:
        """See `Drafter`."""
        self._backend.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _greedy(logits: Logits) -> int:
    return int(logits.argmax())
