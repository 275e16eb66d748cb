"""Attention that the oracle's rows receive: float64, one query, one head, one row object at a time.

A row that leaves takes what it received along, and one that comes back is another row object: that is the whole rule
of what `take_mass` drops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtape.backends.protocol import AttentionMass
from support.oracle import Array, OracleModel, OracleRow, OracleSession

__all__ = ["ScoredOracle", "Taken", "assert_mass", "rank_correlation", "whole_mass"]


@dataclass(frozen=True, slots=True)
class Taken:
    """`by_head` `[layers, heads, n]` of the rows at `tape_positions`, ascending."""

    tape_positions: list[int]
    n_queries: int
    by_head: Array


class ScoredOracle(OracleSession):
    def __init__(self, model: OracleModel) -> None:
        super().__init__(model)
        self._received: list[tuple[OracleRow, Array]] = []
        self._queries = 0

    def take(self) -> Taken:
        """What the rows that are here received since the last take."""
        taken = Taken(sorted(self.rows), self._queries, self._sums(sorted(self.rows)))
        self._received, self._queries = [], 0
        return taken

    def score(self, tokens: Sequence[int], tape_start: int) -> Taken:
        """What `tokens` pay to the rows before `tape_start`; they are gone again afterwards."""
        kept = self.rows, self._received, self._queries
        here = self.rows.get(tape_start)
        self.rows = {t: row for t, row in self.rows.items() if t < tape_start}
        self._received, self._queries = [], 0
        before = sorted(self.rows)
        place = max(self._next(), here.cache if here else 0)
        for i, token in enumerate(tokens):
            self._compute(token, tape_start + i, place + i, self.rows.values())
        scored = Taken(before, self._queries, self._sums(before))
        self.rows, self._received, self._queries = kept
        return scored

    def _sums(self, tape: list[int]) -> Array:
        place = {id(self.rows[t]): i for i, t in enumerate(tape)}
        sums = np.zeros((self.model.n_layer, self.model.n_head, len(tape)))
        for row, share in self._received:
            if id(row) in place:
                sums[:, :, place[id(row)]] += share
        return sums

    def _attend(self, queries: Array, visible: list[OracleRow], layer: int) -> Array:
        model = self.model
        self._queries += layer == 0
        for head, query in enumerate(queries):
            kv = head * model.n_head_kv // model.n_head
            dots = [query @ model.rotate(row.keys[layer], row.cache)[kv] for row in visible]
            weights = np.exp(np.array(dots) / np.sqrt(model.head_dim))
            weights /= weights.sum()
            for row, weight in zip(visible, weights, strict=True):
                share = np.zeros((model.n_layer, model.n_head))
                share[layer, head] = weight
                self._received.append((row, share))
        return super()._attend(queries, visible, layer)


def assert_mass(got: AttentionMass, want: Taken, atol: float, layers: Sequence[int] | None = None) -> None:
    """Positions, layers, queries, mass and peak of `layers` (all) are the oracle's."""
    chosen = list(range(len(want.by_head)) if layers is None else layers)
    assert got.tape_positions.tolist() == want.tape_positions
    assert got.tape_positions.dtype == np.int64
    assert got.layers == tuple(chosen)
    assert got.n_queries == want.n_queries
    assert (got.mass.dtype, got.peak.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(got.mass, want.by_head[chosen].sum(axis=1), rtol=0, atol=atol)
    np.testing.assert_allclose(got.peak, want.by_head[chosen].max(axis=1), rtol=0, atol=atol)


def whole_mass(mass: AttentionMass) -> Array:
    """Of each layer, over all rows."""
    return mass.mass.astype(np.float64).sum(axis=1)


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's, of two vectors without ties."""
    ranks = [np.argsort(np.argsort(x)).astype(np.float64) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])
