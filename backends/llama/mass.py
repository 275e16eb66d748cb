"""Attention by tape position: sums by memory cell, mapped before anything moves, kept for the rows that stay.

While tokens are only appended, no cell changes its row, so sums stay with the cells and cost one addition a layer.
Before any surgery they are folded into a ledger by tape position.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvtape.backends.books import Books
from kvtape.backends.llama.attention import AttentionTap, CellSums
from kvtape.backends.llama.context import LIVE
from kvtape.backends.llama.memory import LiveMemory, MemoryFault
from kvtape.backends.mass_ledger import MassLedger
from kvtape.backends.protocol import AttentionMass

__all__ = ["AttentionRecord", "by_tape_position", "mass_of"]

Positions = npt.NDArray[np.int64]


def by_tape_position(
    sums: CellSums, books: Books, memory: LiveMemory, sequence: int = LIVE
) -> tuple[Positions, npt.NDArray[np.intp]]:
    """Tape positions, ascending, of the rows that the last query saw, and the cell of each.

    The cells are those that its mask leaves open; the engine lists their cache positions in the same order. Raises
    MemoryFault when the two, or the books, do not fit together.
    """
    cells = sums.visible_cells
    cache = memory.cell_positions(sequence, len(cells))
    if len(cache) != len(cells):
        raise MemoryFault(f"the last query saw {len(cells)} cells, its sequence has {len(cache)} rows")
    tape = books.tape_positions_at(cache)
    order = np.argsort(tape)
    return tape[order], cells[order]


def mass_of(sums: CellSums, books: Books, wanted: Positions, memory: LiveMemory, sequence: int) -> AttentionMass:
    """What `sums` paid to the rows at the ascending tape positions `wanted`. `books` have all that were seen."""
    tape, cells = by_tape_position(sums, books, memory, sequence)
    ledger = MassLedger(sorted(sums.layers))
    ledger.add(tape, {layer: heads[:, cells] for layer, heads in sums.heads.items()}, sums.n_seen)
    return ledger.mass(wanted)


class AttentionRecord:
    """What every query paid since the last `take`. Sums of an operation count only when it succeeds."""

    def __init__(self, tap: AttentionTap, memory: LiveMemory, n_cells: int, n_layers: int) -> None:
        self.tap = tap
        self.n_cells = n_cells
        self.layers = frozenset(range(n_layers))
        self._memory = memory
        self._running = CellSums(n_cells, self.layers)
        self._done = CellSums(n_cells, self.layers)
        self._ledger = MassLedger(range(n_layers))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what the body computes, unless it raises."""
        self._running.reset()
        with self.tap.collect(self._running):
            yield
        self._done.take_over(self._running)

    def fold(self, books: Books, sequence: int = LIVE) -> None:
        """Map the sums to tape positions; before any operation that moves or frees cells, with the books of now."""
        if not self._done.n_seen:
            return
        tape, cells = by_tape_position(self._done, books, self._memory, sequence)
        heads = {layer: sums[:, cells] for layer, sums in self._done.heads.items()}
        self._ledger.add(tape, heads, self._done.n_seen)
        self._done.reset()

    def retain(self, books: Books) -> None:
        """Drop what was paid to rows that are no longer on the books."""
        self._ledger.retain(books.tape_positions())

    def forget(self) -> None:
        """Other rows took the place of all: they begin at zero. The queries were computed all the same."""
        self._ledger.n_queries += self._done.n_seen
        self._done.reset()
        self._ledger.retain(np.zeros(0, np.int64))

    def take(self, books: Books) -> AttentionMass:
        """What was paid to the rows on the books; counting begins anew."""
        self.fold(books)
        mass = self._ledger.mass(books.tape_positions())
        self._ledger.clear()
        return mass
