"""Equal quality: what the optimised session computes, held against the plain one at checkpoints. Untimed.

Both answer greedily, as in the timed turns, a few tokens at a time, and after each few the distributions of what comes
next are compared: they are computed over all rows that the optimised session has made in its own way. The text at a
checkpoint is the same in both, forced on neither: a session that speculates does so only where it chooses itself. Where
the tokens part, nothing behind them can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtape.backends.logits import log_softmax
from kvtape.backends.protocol import Logits
from kvtape.eval.gate.arms import Arms
from kvtape.eval.gate.turns import Talk, Tokenize, talks
from kvtape.eval.gate.workloads import Workload
from kvtape.eval.nll import kl_divergence

__all__ = ["LIMITS", "STEP_TOKENS", "Smoke", "run_smoke"]

LIMITS = {"kl": 0.01, "nll_delta": 0.02, "top1": 0.9}
"""Mean KL(plain || optimised), nats, and agreement of the likeliest token: those that replay holds real models to. Two
correct runs of a quantised model can be a mean KL of 0.003 apart. `nll_delta`, nats either way, of the plain session's
likeliest token: three standard errors of what such a KL makes of 128 tokens."""

STEP_TOKENS = 4
"""Tokens between two checkpoints."""


@dataclass(frozen=True, slots=True)
class Smoke:
    """`checkpoints` compared; `parted` conversations in which other tokens were generated; `used`: how often the
    optimisation came into play meanwhile, 0 makes the rest worthless."""

    checkpoints: int
    kl: float
    nll_delta: float
    top1: float
    used: int
    parted: int = 0

    @property
    def problem(self) -> str | None:
        """What is beyond its limit, in words; None when nothing is."""
        if self.parted:
            return f"other tokens were generated in {self.parted} conversations of the quality smoke"
        if not self.checkpoints:
            return "nothing was generated to compare"
        # Negated, so that a mean that is not a number is beyond its limit.
        if not self.kl <= LIMITS["kl"]:
            return f"mean KL {self.kl:.4g} is above {LIMITS['kl']}"
        if not abs(self.nll_delta) <= LIMITS["nll_delta"]:
            return f"NLL differs by {self.nll_delta:+.4g}, more than {LIMITS['nll_delta']}"
        if self.top1 < LIMITS["top1"]:
            return f"the likeliest token agrees in {self.top1:.3f}, less than {LIMITS['top1']}"
        return None


def run_smoke(workload: Workload, conversations: int, arms: Arms, tokenize: Tokenize, *, seed: int) -> Smoke:
    """Compare over `conversations` of the workload."""
    pairs: list[tuple[Logits, Logits]] = []
    parted = used = 0
    for number in range(conversations):
        with talks(workload, number, seed, arms, tokenize, "smoke-") as (plain, optimised):
            try:
                for at in range(workload.turns):
                    pairs += _compare(plain, optimised, at, workload.answer)
            except _Parted:
                parted += 1
            used += arms.used(optimised.session)
    return _judged(pairs, used, parted)


class _Parted(Exception):
    """Both were asked the same and said something else."""


def _compare(plain: Talk, optimised: Talk, number: int, answer: int) -> Iterator[tuple[Logits, Logits]]:
    """One turn in both: the logits of each at the checkpoints. Raises _Parted where their tokens part."""
    said: list[int] = []
    for talk in (plain, optimised):
        talk.prompt(number)
    while len(said) < answer:
        n = min(STEP_TOKENS, answer - len(said))
        one, other = (talk.session.decode(n).tokens for talk in (plain, optimised))
        if one != other:
            raise _Parted
        said += one
        a, b = plain.session.logits, optimised.session.logits
        if one and a is not None and b is not None:
            yield a.copy(), b.copy()
        if len(one) < n:
            break
    for talk in (plain, optimised):
        talk.answered(said)


def _judged(pairs: Sequence[tuple[Logits, Logits]], used: int, parted: int) -> Smoke:
    kls: list[float] = []
    deltas: list[float] = []
    agree = 0
    for a, b in pairs:
        one, other = log_softmax(a), log_softmax(b)
        token = int(one.argmax())
        kls.append(kl_divergence(one, other))
        deltas.append(float(one[token] - other[token]))
        agree += token == int(other.argmax())
    if not pairs:
        return Smoke(0, 0.0, 0.0, 0.0, used, parted)
    return Smoke(len(pairs), float(np.mean(kls)), float(np.mean(deltas)), agree / len(pairs), used, parted)
