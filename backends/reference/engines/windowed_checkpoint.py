"""`windowed-checkpoint`: a window of rows that begins anew when it is full, with one row of the past in front.

Contract: exact in the window. Bit-identical to `standard` for the first `window` tokens, that is until the first
close, and not after: a query of window k > 0 attends to its own window's rows up to itself and to the last row of
window k - 1, which carries what it gathered when it was computed, and to nothing else of the past. Prefill and decode
close at the same tokens: how a text was cut into calls changes no bit.

`replay(k)` makes the rows of a closed window again, from checkpoint k - 1 and the archived tokens, and holds the last
of them against checkpoint k.

Memory: at most `window` + 1 rows of keys and values, one row for each closed window, 4 bytes a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvtape.backends.reference.engines.catalogue import EngineEntry
from kvtape.backends.reference.engines.engine import Contract, EngineInfo, Memory, MemoryKind
from kvtape.backends.reference.engines.session_engine import SessionEngine
from kvtape.backends.reference.engines.window_state import WindowState
from kvtape.backends.reference.errors import EmptyPrompt, InvariantViolation
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.dispatch import advance
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.kv_rows import KvRows
from kvtape.backends.reference.model.steps import embed
from kvtape.backends.reference.model.tokens import Ids
from kvtape.backends.reference.model.weights import Weights
from kvtape.planner.grammar import Option, OptionValue

__all__ = ["ENTRY", "ReplayedWindow", "WindowedCheckpointEngine"]


@dataclass(frozen=True, slots=True)
class ReplayedWindow:
    """Positions `[start, stop)`: `hidden` `[stop - start, n_embd]` behind the last layer, and `rows`, which also hold
    the checkpoint in front.
    """

    start: int
    stop: int
    tokens: Ids
    hidden: Floats
    rows: KvRows


class WindowedCheckpointEngine(SessionEngine):
    def __init__(self, info: EngineInfo, window: int) -> None:
        super().__init__(info)
        self._size = window
        self._state: WindowState | None = None

    @property
    def window_tokens(self) -> int | None:
        return self._size + 1

    @property
    def n_closed(self) -> int:
        """Windows that are closed, and may be replayed: 0 up to this."""
        return len(self._state.archive) if self._state else 0

    def memory(self) -> Memory:
        """Kinds: `kv` of the open window and the row in front; `checkpoints`; `tokens` of the open window, and those of
        closed ones, which only a replay reads.
        """
        state, n = self._state, self._n_tokens
        if state is None:
            return Memory(0, 0, (MemoryKind("kv", 0, 0),))
        kept = sum(c.keys.nbytes + c.values.nbytes for c in state.checkpoints)
        archived, current = sum(ids.nbytes for ids in state.archive), state.open_ids.nbytes
        kinds = (
            MemoryKind("kv", state.open.occupied_bytes, state.open.allocated_bytes),
            MemoryKind("checkpoints", kept, kept, cold=True),
            MemoryKind("tokens", current, current),
            MemoryKind("archived tokens", archived, archived, cold=True),
        )
        reachable = (n - 1) % self._size + 1 + (n > self._size)
        # The newest checkpoint stands among the open rows too, and is one row of the session.
        return Memory(reachable, state.open.n_rows + max(0, self.n_closed - 1), kinds)

    def read_kv_row(self, layer: int, position: int) -> tuple[Floats, Floats] | None:
        self._check_layer(layer)
        return self._state.row(layer, position) if self._state else None

    def replay(self, weights: Weights, ffn: FfnRouter, window: int) -> ReplayedWindow:
        """Closed window `window` once more; the session stays as it is.

        Raises EmptyPrompt before a prefill, StateInvalidated, IndexError for a window that is not closed,
        InvariantViolation where the last row is not the checkpoint, and what `ffn` raises.
        """
        if self._state is None:
            raise EmptyPrompt("no window to replay before any prefill; prefill a prompt first")
        self._bound(weights)
        if not 0 <= window < self.n_closed:
            raise IndexError(f"window {window} of {self.n_closed} closed ones")
        tokens, start, rows = self._state.archive[window], window * self._size, KvRows(weights)
        if window:
            self._state.checkpoints[window - 1].put_into(rows)
        positions = np.arange(start, start + self._size, dtype=np.int64)
        hidden = advance(weights, ffn, embed(weights, tokens), positions, rows)
        self._count("rows_replayed", len(tokens))
        self._compare(rows, window)
        return ReplayedWindow(start, start + self._size, tokens, hidden, rows)

    def _begin(self, weights: Weights, ffn: FfnRouter, ids: Ids) -> Floats:
        state = WindowState(weights, self._size)
        while state.n_tokens < len(ids):
            hidden = self._extend(weights, ffn, state, ids[state.n_tokens :][: state.room])
        self._state = state
        return hidden[-1:]

    def _step(self, weights: Weights, ffn: FfnRouter, ids: Ids) -> Floats:
        assert self._state is not None
        return self._extend(weights, ffn, self._state, ids)

    def _rewind(self) -> None:
        assert self._state is not None
        self._state.rewind()
        if self._state.n_tokens != self._n_tokens:
            raise InvariantViolation(f"{self._state.n_tokens} tokens are kept of {self._n_tokens}")

    def _extend(self, weights: Weights, ffn: FfnRouter, state: WindowState, ids: Ids) -> Floats:
        """All rows of `ids`, at most as many as the open window has room for."""
        hidden = self._advance(weights, ffn, ids, state.n_tokens, state.open)
        closes = len(ids) == state.room
        state.take(ids)
        self._count("windows_closed", int(closes))
        return hidden

    def _compare(self, rows: KvRows, window: int) -> None:
        assert self._state is not None
        kept = self._state.checkpoints[window]
        for layer in range(len(rows.layers)):
            row = rows.row(layer, kept.position)
            same = row is not None and np.array_equal(row[0], kept.keys[layer], equal_nan=True)
            if row is None or not same or not np.array_equal(row[1], kept.values[layer], equal_nan=True):
                raise InvariantViolation(f"the replay of window {window} does not end in its checkpoint, layer {layer}")


def _make(info: EngineInfo, options: Mapping[str, OptionValue]) -> WindowedCheckpointEngine:
    return WindowedCheckpointEngine(info, int(options["window"] or 0))


ENTRY = EngineEntry(
    name="windowed-checkpoint",
    aliases={"unlimited": "windowed-checkpoint", "unlimited-context": "windowed-checkpoint"},
    options={"window": Option(int, 512, (1, None))},
    contract=Contract.EXACT_IN_WINDOW,
    make=_make,
    about="windows that begin anew from the last row of the one before; closed ones can be replayed",
)
