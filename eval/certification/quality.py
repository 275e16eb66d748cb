"""Quality smoke: what a storage type costs in what the model predicts, and whether it still finds a fact.

The same tokens are forced through the best precision and the knob; their distributions are compared before each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtape.backends.proofs.rows import Measure
from kvtape.backends.session import Session
from kvtape.eval.candidates import Candidate
from kvtape.eval.certification.bench import Bench
from kvtape.eval.certification.thresholds import judged
from kvtape.eval.needle import NeedleTask, prepare, run_needle
from kvtape.eval.nll import forced, kl_divergence
from kvtape.eval.places import Regions
from kvtape.planner.specs import parse_policy

__all__ = ["Predictions", "compared", "measure_predictions", "predict", "quality", "recall"]

_DENSE = "none"


@dataclass(frozen=True, slots=True)
class Predictions:
    """`log_probs` float32 `[n, n_vocab]` before each of `n` tokens; `nll` float64 `[n]` of those tokens, nats."""

    log_probs: npt.NDArray[np.float32]
    nll: npt.NDArray[np.float64]

    @property
    def mean_nll(self) -> float:
        return float(self.nll.mean())


def predict(session: Session, tokens: tuple[int, ...]) -> Predictions:
    """Force `tokens` behind the session's tape and keep the distribution before each."""
    rows = forced(session, tokens)
    nll = np.array([-row[token] for row, token in zip(rows, tokens, strict=True)])
    return Predictions(np.array(rows, np.float32), nll)


def measure_predictions(bench: Bench) -> Predictions:
    """The scored tokens behind the context, nothing evicted."""
    smoke, sizes = bench.smoke, bench.smoke.sizes
    with bench.opened(_DENSE, sizes.context + sizes.scored) as (session, _):
        session.ensure_prefix(smoke.tokens[: sizes.context])
        return predict(session, smoke.tokens[sizes.context : sizes.context + sizes.scored])


def compared(best: Predictions, other: Predictions) -> tuple[float, float, float]:
    """(mean NLL delta, mean KL(best || other), share of equal first choices); nats a token.

    KL in float64 over the kept float32 log-probabilities, never below 0.
    """
    pairs = zip(best.log_probs, other.log_probs, strict=True)
    kl = np.mean([kl_divergence(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs])
    same = best.log_probs.argmax(axis=1) == other.log_probs.argmax(axis=1)
    return other.mean_nll - best.mean_nll, float(kl), float(same.mean())


def quality(
    best: Predictions, other: Predictions, best_recall: float, own_recall: float, n_needles: int
) -> list[Measure]:
    """The measures of the quality smoke, held against the table."""
    delta, kl, top1 = compared(best, other)
    measures = [
        Measure.judged("quality", "nll", other.mean_nll, "nats/token"),
        judged("quality", "nll_delta", delta),
        judged("quality", "kl", kl),
        judged("quality", "top1", top1),
    ]
    if n_needles:
        measures += [
            Measure.judged("quality", "recall", own_recall, "share"),
            judged("quality", "recall_delta", own_recall - best_recall),
        ]
    return measures


def recall(bench: Bench) -> float:
    """Share of planted facts that the model repeats when asked, all of the prompt resident; 0 of none."""
    sizes = bench.smoke.sizes
    if not sizes.needles:
        return 0.0
    regions = Regions(4, 32, 4, 32)
    task = NeedleTask("city", tuple(range(sizes.needles)), ("middle",), regions, sizes.needle_tokens)
    candidates = [Candidate(parse_policy(_DENSE), None)]
    target = bench.target()
    trials = run_needle(task, [target], prepare(task, [target], candidates), candidates, bench.world())
    return sum(trial.correct for trial in trials) / len(trials)
