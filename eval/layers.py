"""Choosing the layers whose attention tells best what a question needs, on prompts that are not tested on.

For each prompt the question is a probe over the whole context, every layer measured apart. How good a run of
neighbouring layers is: log2 of the attention (mean over a block's tokens, summed over the run) that the fact's worst
block receives over what the best of the other blocks receives, mean over the prompts. Above 0 the whole fact comes
before anything else. A run has at least a quarter of the layers: single ones go further ahead on one kind of fact, and
fall behind on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import UsageError
from kvtape.backends.protocol import AttentionMass
from kvtape.eval.places import Regions
from kvtape.eval.prompts import NeedlePrompt
from kvtape.eval.targets import Target, World
from kvtape.planner.specs import parse_policy

__all__ = ["LayerRun", "ProbedPrompt", "best_runs", "choose_layers", "least_run", "margins", "probe_prompts", "probed"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ProbedPrompt:
    """`scores` float64 `[layers, blocks]`: mean attention to a block's tokens, of the blocks outside sink and recent;
    `needle` bool `[blocks]`: those that hold some of the fact."""

    scores: Floats
    needle: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers `first` to `last`, both included. `margin`: mean over the prompts, in bits; `first_share`: share of the
    prompts in which the whole fact came before every other block."""

    first: int
    last: int
    margin: float
    first_share: float

    @property
    def text(self) -> str:
        """As `layers=` of a policy takes it."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def least_run(n_layers: int) -> int:
    """The shortest run that may be chosen: a quarter of the layers."""
    return max(1, n_layers // 4)


def probe_prompts(
    prompts: Sequence[NeedlePrompt],
    target: Target,
    world: World,
    *,
    regions: Regions,
    block: int,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Iterator[ProbedPrompt]:
    """Prefill each prompt and probe it with its question, all layers. Raises UnsupportedOperation without scores."""
    n_ctx = max(len(p.context) + len(p.question) for p in prompts)
    policy = parse_policy(f"none:block={block}")
    for done, prompt in enumerate(prompts, 1):
        session_id = f"layers-{target.engine.name}-{prompt.region}-{prompt.seed}"
        with world.session(target, policy, session_id, n_ctx) as session:
            session.ensure_prefix(prompt.context, need_logits=False)
            measured = session.score(prompt.question)
        yield probed(measured, (prompt.start, prompt.stop), block, regions)
        progress(done, len(prompts), f"{target.spec} seed {prompt.seed}")


def probed(measured: AttentionMass, needle: tuple[int, int], block: int, regions: Regions) -> ProbedPrompt:
    """By block, of those between the sink and the recent span of `regions`. The tape must be whole.

    Raises UsageError when there are no two blocks, one with and one without the fact.
    """
    length = len(measured.tape_positions)
    first = -(-regions.sink_most // block)
    starts = np.arange(first * block, length - regions.recent_most, block)
    stops = np.minimum(starts + block, length)
    holds = (starts < needle[1]) & (stops > needle[0])
    if not holds.any() or holds.all():
        raise UsageError("no blocks to tell apart between the sink and the recent span; raise --tokens")
    running = np.pad(np.cumsum(measured.mass.astype(np.float64), axis=1), ((0, 0), (1, 0)))
    return ProbedPrompt((running[:, stops] - running[:, starts]) / (stops - starts), holds)


def margins(prompt: ProbedPrompt) -> Floats:
    """Float64 `[layers, layers]`, bits, of the run from layer a to layer b; NaN below the diagonal."""
    n_layers = len(prompt.scores)
    running = np.pad(np.cumsum(prompt.scores, axis=0), ((1, 0), (0, 0)))
    out = np.full((n_layers, n_layers), np.nan)
    for a in range(n_layers):
        runs = running[a + 1 :] - running[a]
        worst, best_other = runs[:, prompt.needle].min(axis=1), runs[:, ~prompt.needle].max(axis=1)
        out[a, a:] = np.log2(worst) - np.log2(best_other)
    return out


def choose_layers(prompts: Sequence[ProbedPrompt]) -> list[LayerRun]:
    """Every run that is long enough, the best first; ties go to the longer one, then to the lower layers."""
    every = np.stack([margins(p) for p in prompts])
    n_layers = every.shape[1]
    found = [
        LayerRun(a, b, float(every[:, a, b].mean()), float((every[:, a, b] > 0).mean()))
        for a in range(n_layers)
        for b in range(a + least_run(n_layers) - 1, n_layers)
    ]
    return sorted(found, key=lambda run: (-run.margin, run.first - run.last, run.first))


def best_runs(runs: Sequence[LayerRun], most: int) -> list[LayerRun]:
    """The first `most` of `choose_layers`, and behind them, where it is not among them, the run of all layers: what
    choosing wins is seen beside it."""
    every = max(runs, key=lambda run: run.last - run.first)
    best = list(runs[:most])
    return best if every in best else [*best, every]
