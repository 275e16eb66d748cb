"""The live sequence and the scratch sequence of one context: every change is read back from the engine.

Methods raise `MemoryFault` when the engine's memory is not what the change should have left. Nothing here knows tape
positions, tokens' meaning, capabilities or cancelling.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import StateRejected
from kvtape.backends.llama.blob import (
    Cache,
    SequenceState,
    build_sequence,
    cells_size,
    parse_cells,
    parse_sequence,
    parse_whole,
)
from kvtape.backends.llama.context import LIVE, SCRATCH, NativeContext
from kvtape.backends.llama.gates import MemoryFacts
from kvtape.backends.llama.native import engine_log

__all__ = ["LiveMemory", "MemoryFault"]

Positions = npt.NDArray[np.int64]


class MemoryFault(Exception):
    """The engine's memory is not what an operation should have left."""


class LiveMemory:
    """Positions are cache positions. A shift is applied by the engine in its next decode; `flush` forces it."""

    def __init__(self, context: NativeContext, facts: MemoryFacts) -> None:
        self._context = context
        self._facts = facts
        self._pending_shift = False

    @property
    def next_position(self) -> int:
        """Where the engine wants the next token: one past its largest position."""
        return self._context.position_max(LIVE) + 1

    def positions(self, sequence: int, n_expected: int) -> Positions:
        """The engine's positions, ascending. Reads no rows. Raises MemoryFault when it has not `n_expected` cells.

        A recurrent memory has one cell for all tokens, so there only its last position counts.
        """
        return np.sort(self.cell_positions(sequence, n_expected))

    def cell_positions(self, sequence: int, n_expected: int) -> Positions:
        """The same in the order of the cells."""
        if self._facts.kind == "recurrent":
            return np.arange(self._context.position_max(sequence) + 1, dtype=np.int64)
        extended = self._facts.multi_rope
        start = self._context.read_sequence_start(sequence, cells_size(n_expected, extended=extended))
        found = parse_cells(start, extended=extended)
        if isinstance(found, int):
            raise MemoryFault(f"the engine holds {found} rows, {n_expected} are on the books")
        return found.astype(np.int64)

    def confirm(self, expected: Positions, sequence: int = LIVE) -> None:
        """Raise MemoryFault unless the engine holds exactly these positions (ascending)."""
        found = self.positions(sequence, len(expected))
        if not np.array_equal(found, expected):
            odd = np.setxor1d(found, expected)
            raise MemoryFault(f"engine and books differ at cache position {odd[0] if len(odd) else 'order'}")

    def remove(self, start: int, stop: int) -> None:
        if not self._context.remove(LIVE, start, stop):
            raise MemoryFault(f"the engine does not remove [{start}, {stop})")

    def shift(self, start: int, stop: int, delta: int) -> None:
        """Move rows; their keys are rotated at the next flush or decode."""
        self._context.add(LIVE, start, stop, delta)
        self._pending_shift = True

    def flush(self) -> None:
        """Apply a pending shift: decode one token in the scratch sequence and remove it.

        Must come before any read of rows, and before a decode that may be stopped: a decode stopped while a shift is
        pending rotates some layers twice without any error.
        """
        if not self._pending_shift:
            return
        at = self._context.position_max(SCRATCH) + 1
        mark = engine_log.mark()
        code = self._context.decode(np.zeros(1, np.int32), at, SCRATCH, want_logits=False)
        if code != 0:
            raise MemoryFault(f"a shift cannot be applied: llama_decode returned {code}, {engine_log.quote(mark)}")
        self._pending_shift = False
        if not self._context.remove(SCRATCH, at, at + 1):
            raise MemoryFault("the scratch sequence cannot be cleared")

    def clear(self) -> None:
        self._context.clear()
        self._pending_shift = False

    def export(self, start: int, stop: int) -> bytes:
        """The rows at `[start, stop)` as a sequence state."""
        self.flush()
        self._context.copy(LIVE, SCRATCH, start, stop)
        try:
            state = self._context.read_sequence(SCRATCH)
        finally:
            self.drop_scratch()
        found = np.sort(self._attention(state)[0].positions)
        if not np.array_equal(found, np.arange(start, stop)):
            raise MemoryFault(f"exporting [{start}, {stop}) gave {len(found)} rows")
        return state

    def stage(self, state: bytes, start: int, stop: int) -> None:
        """Import into the scratch sequence rows that must stand at `[start, stop)`.

        Raises StateRejected, scratch empty again and the live sequence untouched, when the engine refuses them or they
        are others.
        """
        self.flush()
        mark = engine_log.mark()
        try:
            if not state or not self._context.write_sequence(SCRATCH, state):
                raise StateRejected(f"the engine does not accept these rows: {engine_log.quote(mark)}")
            try:
                self.confirm(np.arange(start, stop, dtype=np.int64), SCRATCH)
            except MemoryFault as err:
                raise StateRejected(f"these rows do not stand at [{start}, {stop}): {err}") from None
        except StateRejected:
            self.drop_scratch()
            raise

    def move_staged(self, start: int, stop: int, delta: int) -> None:
        """Move staged rows and rotate their keys now."""
        if delta:
            self._context.add(SCRATCH, start, stop, delta)
            self._pending_shift = True
            self.flush()

    def share(self, start: int, stop: int) -> None:
        """Let the scratch sequence hold the live rows at `[start, stop)` too."""
        self._context.copy(LIVE, SCRATCH, start, stop)

    def adopt_staged(self, start: int, stop: int) -> None:
        """Give the scratch rows at `[start, stop)` to the live sequence and empty the scratch one."""
        self._context.copy(SCRATCH, LIVE, start, stop)
        self.drop_scratch()

    def drop_scratch(self) -> None:
        if not self._context.remove(SCRATCH, -1, -1):
            raise MemoryFault("the scratch sequence cannot be cleared")

    def save(self) -> bytes:
        """Everything of the live sequence; a windowed cache with the rows beyond its window too."""
        self.flush()
        return self._context.read_all() if self._facts.kind == "windowed" else self._context.read_sequence(LIVE)

    def load(self, state: bytes) -> None:
        """Replace everything by a saved state; empty bytes leave it empty. Raises MemoryFault when refused."""
        self.clear()
        if not state:
            return
        mark = engine_log.mark()
        write_all = self._facts.kind == "windowed"
        accepted = self._context.write_all(state) if write_all else self._context.write_sequence(LIVE, state)
        if not accepted:
            raise MemoryFault(f"the engine does not accept the saved state: {engine_log.quote(mark)}")

    def in_position_order(self, state: bytes) -> bytes:
        """A saved state with its cells in position order, where the memory is one plain cache."""
        if self._facts.kind != "plain":
            return state
        (cache,) = self._attention(state)
        order = np.argsort(cache.positions, kind="stable")
        return build_sequence(SequenceState(LIVE, (cache.take(order),)))

    def read(self) -> Cache:
        """The live sequence's rows, pending shifts applied: the attention cache, of a windowed model the full one."""
        self.flush()
        return self._attention(self._context.read_sequence(LIVE))[0]

    def has_cache_without_layers(self) -> bool:
        """Of a memory that holds rows: whether one of its caches has none to hold (every layer is in the other)."""
        return any(not cache.keys for cache in self._attention(self._context.read_sequence(LIVE)))

    def windowed_positions(self) -> Positions:
        """Positions that a windowed model's windowed cache still holds."""
        caches = parse_whole(self._context.read_all(), extended=self._facts.multi_rope, latent=self._facts.latent)
        return np.sort(caches[-1].positions.astype(np.int64))

    def _attention(self, state: bytes) -> tuple[Cache, ...]:
        n_caches = {"plain": 1, "hybrid": 1}.get(self._facts.kind)
        facts = self._facts
        return parse_sequence(state, extended=facts.multi_rope, latent=facts.latent, n_caches=n_caches).caches
