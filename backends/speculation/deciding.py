"""One run of decoding with drafts: the tokens of a plain run, from fewer calls of the engine.

Each call computes the token that is chosen already and the drafts behind it. The logits after each say what the model
chooses there; as long as that is the draft it stays, and where it is not, it is the next token. So every token is
chosen once, from logits after the tokens before it, in the order of a plain run.

Where an engine's call for several tokens is not to the bit that for one (`Verifier.verify_margin`), a choice between
two logits that are nearer than the margin is not made from it: that token is computed again, alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from kvtape.backends.errors import Cancelled, EngineFault
from kvtape.backends.protocol import Backend, Choose, DecodeRun, Logits
from kvtape.backends.speculation.drafter import Drafter
from kvtape.backends.verifying import Verifier

__all__ = ["SpeculatedRun", "speculate"]


@dataclass(frozen=True, slots=True)
class SpeculatedRun:
    """A decode run, how many drafts the engine looked at in it, and how many of those it generates itself."""

    run: DecodeRun
    drafted: int
    accepted: int


def speculate(
    backend: Backend,
    verifier: Verifier,
    drafter: Drafter,
    tape: Sequence[int],
    n: int,
    logits: Logits,
    choose: Choose,
) -> SpeculatedRun:
    """Up to `n` tokens behind `tape`, `logits` those after its last; `n` rows are free.

    Whatever is raised, by `choose` and the drafter too, the state is that of the start. Raises as `decode_until` and
    `Verifier.verify`, and DraftFailed.
    """
    deciding = _Deciding(backend, verifier, drafter, list(tape), n, logits, choose)
    try:
        return deciding.run()
    except EngineFault:
        raise
    except BaseException:
        if deciding.done:
            _cut(backend, len(tape))
        raise


def _cut(backend: Backend, tape_stop: int) -> None:
    """Take rows back, also when somebody goes on asking to cancel."""
    for _ in range(3):
        with suppress(Cancelled):
            backend.truncate(tape_stop)
            return
    backend.truncate(tape_stop)


@dataclass(slots=True)
class _Deciding:
    backend: Backend
    verifier: Verifier
    drafter: Drafter
    tape: list[int]
    n: int
    logits: Logits
    choose: Choose
    done: list[int] = field(default_factory=list)
    chosen: int | None = None
    alone: bool = False
    ended: bool = False
    calls: int = 0
    drafted: int = 0
    accepted: int = 0
    counted: bool = True

    def run(self) -> SpeculatedRun:
        while len(self.done) < self.n and not self.ended:
            token = self.choose(self.logits) if self.chosen is None else self.chosen
            self.chosen = None
            if token is None:
                self.ended = True
            else:
                self._compute(token)
        run = DecodeRun(
            tuple(self.done), self.logits, self.calls, "chosen_none" if self.ended else "n", counted=self.counted
        )
        return SpeculatedRun(run, self.drafted, self.accepted)

    def _compute(self, token: int) -> None:
        """Put `token` on the tape, and what was drafted behind it as far as it is what comes anyway."""
        at_most = 0 if self.alone else min(self.n - len(self.done), self.backend.config.chunk) - 1
        self.alone = False
        drafts = list(self.drafter.draft([*self.tape, *self.done, token], at_most))[:at_most] if at_most else []
        start = len(self.tape) + len(self.done)
        if not drafts:
            run = self.backend.decode_until(1, self.backend.n_ctx, start, self.logits, lambda _: token)
            self.done += run.tokens
            self.logits, self.calls = run.logits, self.calls + run.calls
            self.counted = self.counted and run.counted
            return
        tokens = [token, *drafts]
        found = self.verifier.verify(tokens, start, lambda each: self._keep(tokens, each))
        self.done += tokens[: found.kept]
        self.drafted += len(drafts)
        self.accepted += max(0, found.kept - 1)
        self.calls += found.calls
        self.counted = self.counted and found.counted
        if found.kept:
            self.logits = found.logits

    def _keep(self, tokens: list[int], each: Logits) -> int:
        """How many of `tokens` stay, from the logits after each; the token that comes next where it is known."""
        for i, logits in enumerate(each):
            if self._is_near(logits):
                # Its logits decide nothing: the token is computed again by a call of its own.
                self.chosen, self.alone = tokens[i], True
                return i
            if i + 1 == len(tokens):
                break
            token = self.choose(logits)
            if token is None:
                self.ended = True
                return i + 1
            if token != tokens[i + 1]:
                self.chosen = token
                return i + 1
        return len(tokens)

    def _is_near(self, logits: Logits) -> bool:
        margin = self.verifier.verify_margin
        if not margin or len(logits) < 2:
            return False
        second, best = np.partition(logits, -2)[-2:]
        return bool(best - second < margin)
