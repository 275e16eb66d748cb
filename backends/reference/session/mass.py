"""Attention of queries, summed by cache position while they are computed, then put down by tape position."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtape.backends.books import Books
from kvtape.backends.mass_ledger import MassLedger
from kvtape.backends.reference.model.attention import AttentionBlock, Observe

__all__ = ["HeadSums", "count"]

Heads = npt.NDArray[np.float64]
Positions = npt.NDArray[np.int64]


class HeadSums:
    """Sums over queries, per layer, query head and cache position, of one operation. `layers`: those that count."""

    def __init__(self, n_head: int, n_head_kv: int, layers: Iterable[int]) -> None:
        self._group = n_head // n_head_kv
        self._sums: dict[int, Heads] = {layer: np.zeros((n_head, 0)) for layer in layers}

    def observer(self, layer: int) -> Observe | None:
        """What attention of `layer` calls; None where it does not count."""
        return partial(self._add, layer) if layer in self._sums else None

    def heads(self, positions: Positions) -> dict[int, Heads]:
        """By layer: `[n_head, n]` of these cache positions."""
        stop = int(positions.max()) + 1 if len(positions) else 0
        return {layer: self._until(layer, stop)[:, positions] for layer in self._sums}

    def _add(self, layer: int, block: AttentionBlock) -> None:
        n_kv, _, n_keys = block.weights.shape
        first = int(block.positions[0])
        sums = self._until(layer, first + n_keys)
        for member in range(self._group):
            paid = block.weights[:, block.members == member].sum(axis=1, dtype=np.float64)
            heads = (block.first_head + np.arange(n_kv)) * self._group + member
            sums[heads, first : first + n_keys] += paid

    def _until(self, layer: int, stop: int) -> Heads:
        sums = self._sums[layer]
        if sums.shape[1] < stop:
            sums = self._sums[layer] = np.pad(sums, ((0, 0), (0, stop - sums.shape[1])))
        return sums


def count(ledger: MassLedger, sums: HeadSums, books: Books, n_queries: int) -> None:
    """Put `sums` down by the tape positions of `books`, which have every row that was seen."""
    cache = books.cache_positions()
    tape = books.tape_positions_at(cache)
    order = np.argsort(tape)
    ledger.add(tape[order], sums.heads(cache[order]), n_queries)
