"""Equal quality: what the optimised session computes, held against the plain one, token by token.

The plain session answers greedily; the optimised one is made to say the same (teacher-forced), and before each token
the distributions of both are compared. Two correct runs of a quantised model that cut their batches differently are a
mean KL of some 0.003 apart, which is why the limits are not 0. Untimed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvtape.backends.protocol import Logits
from kvtape.eval.gate.arms import Arms
from kvtape.eval.gate.turns import Talk
from kvtape.eval.gate.workloads import Workload
from kvtape.eval.nll import LogProbs, kl_divergence, log_softmax

__all__ = ["LIMITS", "Smoke", "run_smoke"]

LIMITS = {"kl": 0.01, "nll_delta": 0.02, "top1": 0.9}
"""Mean KL(plain || optimised), nats, and agreement of the likeliest token: those that replay holds real models to.
`nll_delta`, nats a token either way: three standard errors of what a mean KL of 0.003 makes of 128 tokens."""


@dataclass(frozen=True, slots=True)
class Smoke:
    """`tokens` compared; `used`: how often the optimisation came into play meanwhile, 0 makes the rest worthless."""

    tokens: int
    kl: float
    nll_delta: float
    top1: float
    used: int

    @property
    def problem(self) -> str | None:
        """What is beyond its limit, in words; None when nothing is."""
        if not self.tokens:
            return "no token was generated to compare"
        if self.kl > LIMITS["kl"]:
            return f"mean KL {self.kl:.4g} is above {LIMITS['kl']}"
        if abs(self.nll_delta) > LIMITS["nll_delta"]:
            return f"NLL differs by {self.nll_delta:+.4g}, more than {LIMITS['nll_delta']}"
        if self.top1 < LIMITS["top1"]:
            return f"the likeliest token agrees in {self.top1:.3f}, less than {LIMITS['top1']}"
        return None


def run_smoke(
    workload: Workload, conversations: int, arms: Arms, tokenize: Callable[[str], Sequence[int]], *, seed: int
) -> Smoke:
    """Compare over `conversations` of the workload."""
    kls: list[float] = []
    deltas: list[float] = []
    agree = used = 0
    for number in range(conversations):
        conversation = workload.draw(number, seed)
        with ExitStack() as stack:
            plain, optimised = (
                Talk(stack.enter_context(arms.open(arm, f"smoke-{number}-{arm}")), workload, conversation, tokenize)
                for arm in ("plain", "optimised")
            )
            for at in range(workload.turns):
                plain.prompt(at)
                tokens, said = _watch(plain, workload.answer, None)
                optimised.prompt(at)
                _, other = _watch(optimised, len(tokens), tokens)
                for token, a, b in zip(tokens, said, other, strict=True):
                    kls.append(kl_divergence(a, b))
                    deltas.append(float(a[token] - b[token]))
                    agree += int(a.argmax() == b.argmax())
                plain.answered(tokens)
                optimised.answered(tokens)
            used += arms.used(optimised.session)
    n = len(kls)
    mean = (float(np.mean(kls)), float(np.mean(deltas)), agree / n) if n else (0.0, 0.0, 0.0)
    return Smoke(n, *mean, used)


def _watch(talk: Talk, n: int, forced: Sequence[int] | None) -> tuple[tuple[int, ...], list[LogProbs]]:
    """Generate up to `n` tokens, those `forced` where given; the log-probabilities before each of them."""
    seen: list[LogProbs] = []

    def choose(logits: Logits) -> int:
        seen.append(log_softmax(logits))
        return int(logits.argmax()) if forced is None else int(forced[len(seen) - 1])

    if n == 0:
        return (), []
    tokens = talk.session.decode(n, choose=choose, stop_tokens=None if forced is None else frozenset()).tokens
    return tokens, seen[: len(tokens)]
