"""Attention by tape position: what rows received, kept for those that stay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtape.backends.protocol import AttentionMass

__all__ = ["MassLedger"]

Heads = npt.NDArray[np.float64]
Positions = npt.NDArray[np.int64]


class MassLedger:
    """Sums per layer and head of the rows that are resident, by tape position."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self.clear()

    def clear(self) -> None:
        self.positions: Positions = np.zeros(0, np.int64)
        self._heads: dict[int, Heads] = {}
        self.n_queries = 0

    def add(self, positions: Positions, heads: dict[int, Heads], n_queries: int) -> None:
        """Count `heads[layer]`, `[n_heads, n_rows]`, of these ascending tape positions; new ones begin at zero."""
        self._spread(np.union1d(self.positions, positions))
        at = np.searchsorted(self.positions, positions)
        for layer, sums in heads.items():
            known = self._heads.setdefault(layer, np.zeros((len(sums), len(self.positions))))
            known[:, at] += sums
        self.n_queries += n_queries

    def retain(self, resident: Positions) -> None:
        """Drop what was paid to rows that are not among these ascending tape positions."""
        kept = np.isin(self.positions, resident)
        self.positions = self.positions[kept]
        self._heads = {layer: sums[:, kept] for layer, sums in self._heads.items()}

    def mass(self, resident: Positions) -> AttentionMass:
        """Of exactly these ascending tape positions; one that no query has seen has zero."""
        self.retain(resident)
        self._spread(resident)
        none = np.zeros((1, len(resident)))
        heads = [self._heads.get(layer, none) for layer in self._layers]
        return AttentionMass(
            tape_positions=resident,
            layers=self._layers,
            n_queries=self.n_queries,
            mass=np.array([h.sum(axis=0) for h in heads], np.float32),
            peak=np.array([h.max(axis=0) for h in heads], np.float32),
        )

    def _spread(self, positions: Positions) -> None:
        """Make room for these too, which contain those that are there."""
        if len(positions) == len(self.positions):
            return
        at = np.searchsorted(positions, self.positions)
        for layer, sums in self._heads.items():
            self._heads[layer] = np.zeros((len(sums), len(positions)))
            self._heads[layer][:, at] = sums
        self.positions = positions
