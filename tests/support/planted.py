"""Arms of the gate whose turns cost what a test plants: real sessions on the toy, and a clock that the toy moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvtape.backends.protocol import Choose, Computed, DecodeRun, Logits, SessionConfig
from kvtape.backends.session import Session
from kvtape.eval.gate.arms import Arm, Meter
from kvtape.eval.targets import NullSink
from kvtape.planner.specs import parse_policy
from kvtape.testing.toy import TOY_CAPABILITIES, ToyBackend

__all__ = ["PlantedArms", "PlantedClock"]

_TOKEN_NS = 1000


class PlantedClock:
    """Says what it was moved to."""

    def __init__(self) -> None:
        self.now = 0

    def now_ns(self) -> int:
        return self.now


class _Costly(ToyBackend):
    """A toy whose tokens take time; it says another token from its `errs_at`-th on."""

    def __init__(self, arms: PlantedArms, arm: Arm) -> None:
        super().__init__(SessionConfig(n_ctx=4096), TOY_CAPABILITIES, n_ctx_train=1 << 20)
        self._arms, self._arm, self._decoded = arms, arm, 0

    def prefill(self, tokens: Sequence[int], tape_start: int) -> Computed:
        done = super().prefill(tokens, tape_start)
        self._arms.spend(self._arm, len(tokens))
        return Computed(self._bent(done.logits), done.calls, done.tokens, done.counted)

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        def bent(said: Logits) -> int | None:
            self._decoded += 1
            return choose(self._bent(said))

        run = super().decode_until(n, limit, tape_start, logits, bent)
        self._arms.spend(self._arm, len(run.tokens))
        return replace(run, logits=self._bent(run.logits))

    def _bent(self, logits: Logits) -> Logits:
        errs = self._arm == "optimised" and self._arms.errs_at is not None and self._decoded > self._arms.errs_at
        if self._arm == "optimised" and self._arms.blurs:
            logits = (logits * (1 - self._arms.blurs)).astype(np.float32)
        return np.roll(logits, 1) if errs else logits


@dataclass
class PlantedArms:
    """The optimised arm takes `factor` of the plain one's CPU time, and `wall_factor` of its wall time.

    `noise`: deviation of the logarithm of each operation's cost, drawn from `seed`. `uses`: what each optimised turn
    counts as. `errs_at`: tokens after which the optimised arm says something else. `blurs`: its distributions are
    flatter, by this share of the logits, and its tokens the same.
    """

    factor: float = 1.0
    wall_factor: float | None = None
    noise: float = 0.0
    seed: int = 0
    uses: int = 1
    errs_at: int | None = None
    blurs: float = 0.0
    opened: list[str] = field(default_factory=list)
    closed: int = 0

    def __post_init__(self) -> None:
        self.wall, self.cpu = PlantedClock(), PlantedClock()
        self._random = np.random.default_rng(self.seed)

    def meter(self, threads: int = 1) -> Meter:
        return Meter(self.wall, self.cpu, threads)

    def open(self, arm: Arm, session_id: str) -> Session:
        self.opened.append(session_id)
        return Session(
            _Costly(self, arm), parse_policy("none"), NullSink(), self.wall, run_id="r", session_id=session_id
        )

    def used(self, session: Session) -> int:
        return self.uses * session.explain().turn

    def spend(self, arm: Arm, tokens: int) -> None:
        busy = tokens * _TOKEN_NS * float(np.exp(self.noise * self._random.standard_normal()))
        share = self.factor if arm == "optimised" else 1.0
        waited = share if self.wall_factor is None or arm == "plain" else self.wall_factor
        self.cpu.now += round(busy * share)
        self.wall.now += round(busy * waited)

    @staticmethod
    def tokenize(text: str) -> list[int]:
        """A token a word: conversations of real length on a toy that is slow."""
        return [sum(word.encode()) % 64 for word in text.split()]
