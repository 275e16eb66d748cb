"""From attention mass to scores on blocks.

mass      [layers, rows]   what a backend measured, rows by tape position
   | summed over layers
tokens    [rows]           one number a token; over time in a `MassHistory`, divided by lifetime under `norm=mean`
   | averaged over `pool` neighbours
blocks                     the mean of a block's tokens, so that a short block is no worse for being short
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kvtape.planner.blocks import Block
from kvtape.planner.events import Event, Op
from kvtape.planner.layer_choice import late_layers
from kvtape.planner.plan_errors import BadScore
from kvtape.planner.table import Floats, Ints

__all__ = [
    "DENSE",
    "MassHistory",
    "Norm",
    "ScoreKind",
    "ScoreRequest",
    "is_dense",
    "pool_scores",
    "score_blocks",
    "sum_blocks",
    "sum_layers",
]

ScoreKind = Literal["accumulated", "window", "probe", "later"]
"""`accumulated`: every query since the session began. `window`: the last `queries` tokens. `probe`: tokens that the
caller names, for instance the question. `later`: every query that is still to come, which only a recording knows."""

DENSE: Final = "dense"
"""Reason of a score event that no policy asked for: every query over the whole tape, measured by a pass beside the
session, which changes nothing in it and takes none of its time."""

Norm = Literal["sum", "mean"]
"""`sum`: mass as accumulated, which favours whatever has been there longest. `mean`: mass over the number of queries
that could see the token."""


def is_dense(event: Event) -> bool:
    """Whether the event is such a score: nothing that the session itself did."""
    return event.op == Op.SCORE and event.reason == DENSE


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """What a policy wants measured before it plans.

    `queries`: how many last tokens ask, for kind `window`; else None. `layers`: model layers, ascending; None for
    all. `late`: all are measured, those that `layer_choice.late_layers` names count. `heads`: `sum` over query heads
    (`AttentionMass.mass`) or the `max` of them (`AttentionMass.peak`).
    """

    kind: ScoreKind
    queries: int | None = None
    layers: tuple[int, ...] | None = None
    heads: Literal["sum", "max"] = "sum"
    late: bool = False

    def wanted(self, measured: Sequence[int]) -> tuple[int, ...] | None:
        """Which of the `measured` layers count; None for all of them."""
        return late_layers(max(measured, default=0) + 1) if self.late else self.layers


def sum_layers(mass: npt.NDArray[Any], measured: Sequence[int], wanted: Sequence[int] | None) -> Floats:
    """Float64 `[rows]`: `mass` `[layers, rows]` summed over the `wanted` of the `measured` layers, None for all.

    Raises BadScore when a wanted layer was not measured or the mass is not finite.
    """
    if mass.ndim != 2 or mass.shape[0] != len(measured):
        raise BadScore(f"mass of shape {mass.shape} for {len(measured)} layers; needs [layers, rows]")
    missing = sorted(set(wanted or ()) - set(measured))
    if missing:
        raise BadScore(f"layers {missing} were not measured; the model gave layers {list(measured)}")
    rows = [i for i, layer in enumerate(measured) if wanted is None or layer in wanted]
    total = np.asarray(mass, dtype=np.float64)[rows].sum(axis=0)
    if not np.isfinite(total).all():
        raise BadScore(f"row {int(np.argmin(np.isfinite(total)))} has a mass that is not finite")
    return np.asarray(total, dtype=np.float64)


def pool_scores(scores: Floats, pool: int) -> Floats:
    """Mean over a window of `pool` (odd) neighbours, zeros past both ends.

    SnapKV (Li et al. 2024, arXiv:2404.14469) pools so that what surrounds an important token stays with it; its
    published code averages, with zero padding, and so does this. Neighbours are neighbours among the scored rows.
    """
    if pool < 1 or pool % 2 == 0:
        raise BadScore(f"pool {pool}: needs an odd number of tokens")
    if pool == 1 or not scores.size:
        return scores
    # Past the far end there are only zeros, however wide the window.
    padded = np.pad(scores, min(pool // 2, scores.size))
    windows: Floats = np.lib.stride_tricks.sliding_window_view(padded, 1 + padded.size - scores.size)
    return np.asarray(windows.sum(axis=1) / pool, dtype=np.float64)


def score_blocks(blocks: Iterable[Block], positions: Ints, scores: Floats) -> tuple[Block, ...]:
    """The blocks, each with the mean score of its tokens; None where none of them was scored.

    `positions` int64 `[rows]` tape positions, ascending; `scores` `[rows]`. A token that was not scored does not
    count. Raises BadScore for arrays that do not fit each other.
    """
    if positions.shape != scores.shape or positions.ndim != 1:
        raise BadScore(f"{positions.shape} positions and {scores.shape} scores; needs as many of one as of the other")
    if positions.size > 1 and (positions[1:] <= positions[:-1]).any():
        raise BadScore("positions must ascend, each once")
    found = list(blocks)
    if not found:
        return ()
    sums, counts = sum_blocks(found, positions, np.asarray(scores, dtype=np.float64))
    return tuple(
        replace(b, score=total / n if n > 0 else None)
        for b, total, n in zip(found, sums.tolist(), counts.tolist(), strict=True)
    )


def sum_blocks(blocks: Sequence[Block], positions: Ints, values: Floats) -> tuple[Floats, Ints]:
    """Sums of `values` float64 `[..., rows]` over each block's rows, `[..., blocks]`, and how many rows each has.

    `positions` as in `score_blocks`; `blocks` in tape order, at least one.
    """
    first = np.searchsorted(positions, [b.start for b in blocks])
    last = np.searchsorted(positions, [b.stop for b in blocks])
    # Each block is summed by itself: differences of a running sum would tell equal blocks apart by rounding.
    pairs = np.column_stack((first, last)).ravel()
    padded = np.concatenate((values, np.zeros((*values.shape[:-1], 1))), axis=-1)
    sums: Floats = np.add.reduceat(padded, pairs, axis=-1)[..., ::2]
    return sums, last - first


@dataclass(frozen=True, slots=True)
class MassHistory:
    """Attention that each tape position has received so far, and from how many queries it could have.

    float64 `[tape]` each. What was evicted keeps what it had, and goes on from there when it comes back.
    """

    mass: Floats = field(default_factory=lambda: np.zeros(0))
    queries: Floats = field(default_factory=lambda: np.zeros(0))

    def add(self, positions: Ints, mass: Floats, n_queries: int, tape_length: int) -> MassHistory:
        """With what the last `n_queries` tokens of a tape of `tape_length` paid to the resident `positions`.

        A token sees itself and what is before it, so one of those last tokens could be seen only by those from it on.
        Raises BadScore for arrays that do not fit or positions off the tape.
        """
        if positions.shape != mass.shape or (positions.size and not 0 <= positions[0] <= positions[-1] < tape_length):
            raise BadScore(f"mass of {mass.size} rows for {positions.size} positions on a tape of {tape_length}")
        grown = max(tape_length, self.mass.size)
        total, seen = np.zeros(grown), np.zeros(grown)
        total[: self.mass.size], seen[: self.queries.size] = self.mass, self.queries
        total[positions] += mass
        seen[positions] += np.minimum(n_queries, tape_length - positions)
        return MassHistory(total, seen)

    def truncate(self, tape_length: int) -> MassHistory:
        """Without what lies at or past `tape_length`."""
        return MassHistory(self.mass[:tape_length], self.queries[:tape_length])

    def scores(self, positions: Ints, norm: Norm) -> Floats:
        """Float64 `[rows]`; 0 where no query could see the token yet. Raises BadScore off the tape."""
        if positions.size and not 0 <= positions.min() <= positions.max() < self.mass.size:
            raise BadScore(f"positions reach to {positions.max()}, the history to {self.mass.size}")
        mass = self.mass[positions]
        if norm == "sum":
            return mass
        seen = self.queries[positions]
        mean = np.zeros(mass.size)
        np.divide(mass, seen, out=mean, where=seen > 0)
        return mean
