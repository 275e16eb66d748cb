"""`RecordedAttention`: the attention of a simulated session, from what dense attention paid when it was recorded.

Under teacher forcing the tape is the recorded one, so the dense attention of its queries is known whatever a policy
would have kept. It is known for whole pieces of queries and whole chunks of keys: a plan inside a piece does not see
that piece yet, and a chunk's mass is spread evenly over its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from kvtape.backends.protocol import AttentionMass
from kvtape.planner.layout import Layout
from kvtape.sim.errors import NoAttention
from kvtape.sim.quality.attention import AttentionMap, AttentionPath, Piece
from kvtape.sim.quality.meter import TurnMass, turn_mass
from kvtape.sim.quality.retained import Floats, Ints, Seen

__all__ = ["RecordedAttention"]

_ALL: Final = 2**62
"""A length that no tape has."""


class RecordedAttention:
    """`backends.modelled.attention.Attention` of one session, and the meter of what its queries found resident.

    `rows`: how many rows its policy may hold. The player says where in the log it is, and when a state is saved or put
    back.
    """

    def __init__(self, recorded: AttentionMap, rows: int) -> None:
        self._map, self._rows = recorded, rows
        self._until = 0
        self._length = 0
        self._seen: list[Seen] = []
        self._untaken: list[Seen] = []
        self._saved: dict[int, tuple[int, list[Seen]]] = {}

    # -- the player ------------------------------------------------------------------------------------------------

    def begin_turn(self) -> None:
        """What is computed from here on is another turn's."""
        self._seen, self._saved = [], {k: (length, []) for k, (length, _) in self._saved.items()}

    def begin_step(self, until: int) -> None:
        """What was recorded of this step, and before it, stands in the log before its event `until`."""
        self._until = until

    def save(self, snapshot: int) -> None:
        self._saved[snapshot] = self._length, list(self._seen)

    def put_back(self, snapshot: int) -> None:
        """What was computed since the snapshot is off the tape; what the engine counted of it is nobody's."""
        self._length, seen = self._saved[snapshot]
        self._seen, self._untaken = list(seen), []

    def account(self) -> TurnMass | None:
        """Of the turn's queries that are on the tape; None where not all of them were recorded."""
        return turn_mass(self._map.path_before(self._until, _ALL), self._seen, self._rows)

    # -- the backend -----------------------------------------------------------------------------------------------

    def computed(self, start: int, stop: int, before: Layout, *, again: bool = False) -> None:
        ranges = sorted((s.tape_start, s.tape_stop) for s in before)
        seen = Seen(start, stop, np.array(ranges, dtype=np.int64).reshape(-1, 2))
        self._untaken.append(seen)
        if not again:
            self._length = stop
            self._seen.append(seen)

    def cut(self, tape_stop: int) -> None:
        self._length = min(self._length, tape_stop)
        self._seen = [s.part(s.start, tape_stop) for s in self._seen if s.start < tape_stop]
        self._untaken = [s.part(s.start, tape_stop) for s in self._untaken if s.start < tape_stop]

    def taken(self, layout: Layout) -> AttentionMass:
        """Of queries whose whole piece is on the tape; the others are taken with it."""
        path = self._path()
        rows = _positions(layout)
        mass = np.zeros((2, len(path.layers), rows.size))
        asked = 0
        for piece in self._pieces_of(path):
            asked += piece.n_queries
            there = np.ones(rows.size, dtype=np.bool_)
            for one in self._untaken:
                if one.start < piece.stop and piece.start < one.stop:
                    there &= _among(rows, one)
            mass += np.where(there, _spread(piece, rows), 0.0)
        self._untaken = [s.part(path.covered, s.stop) for s in self._untaken if s.stop > path.covered]
        return _measured(rows, path.layers, asked, mass)

    def window(self, start: int, stop: int, layers: Sequence[int] | None, layout: Layout) -> AttentionMass:
        """Of the fewest last pieces that have as many queries as were asked for."""
        path = self._path()
        rows = _positions(layout)
        rows = rows[rows < start]
        asked = 0
        mass = np.zeros((2, len(path.layers), rows.size))
        for piece in reversed(path.pieces):
            if asked >= stop - start:
                break
            asked += piece.n_queries
            mass += _spread(piece, rows)
        chosen = [i for i, layer in enumerate(path.layers) if layers is None or layer in layers]
        return _measured(rows, tuple(path.layers[i] for i in chosen), asked, mass[:, chosen])

    def later(self, layout: Layout) -> AttentionMass:
        """Of every piece that the log has behind this place, for as long as the tape before it is the same."""
        rows = _positions(layout)
        here = [p for p in self._map.path_before(self._until, _ALL).pieces if p.stop > self._length]
        mass = np.zeros((2, len(self._map.layers), rows.size))
        asked, same, end = 0, self._length, here[-1].stop if here else self._length
        for piece in (*here, *(p for p in self._map.pieces if p.seq >= self._until and not p.repeated)):
            if piece.seq >= self._until:
                same, end = min(same, piece.start) if piece.start < end else same, piece.stop
            asked += piece.n_queries
            mass += np.where(rows < same, _spread(piece, rows), 0.0)
        return _measured(rows, self._map.layers, asked, mass)

    def _path(self) -> AttentionPath:
        """What is in force on this tape, but for a piece that it ends in. Raises NoAttention where there is a gap."""
        path = self._map.path_before(self._until, self._length)
        if path.covered < self._length:
            whole = self._map.path_before(self._until, _ALL)
            if whole.covered < self._length:
                raise NoAttention(
                    f"session {self._map.session_id}: the dense attention of the queries from tape position "
                    f"{whole.covered} on is not in the log; record with --score-all"
                )
        return path

    def _pieces_of(self, path: AttentionPath) -> Iterable[Piece]:
        found: dict[int, Piece] = {}
        for one in self._untaken:
            found |= {piece.start: piece for piece in path.computed(one.start, one.stop)}
        return found.values()


def _positions(layout: Layout) -> Ints:
    """int64, ascending: the tape positions of all rows."""
    spans = [np.arange(s.tape_start, s.tape_stop, dtype=np.int64) for s in layout]
    return np.sort(np.concatenate(spans)) if spans else np.empty(0, dtype=np.int64)


def _among(rows: Ints, seen: Seen) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which of the tape positions these queries had before them, their own included; later ones nobody missed."""
    ranges = np.concatenate((seen.ranges, [[seen.start, seen.stop]]))
    index = np.searchsorted(ranges[:, 0], rows, side="right") - 1
    there = (index >= 0) & (rows < ranges[np.maximum(index, 0), 1])
    return np.asarray(there | (rows >= seen.stop), dtype=np.bool_)


def _spread(piece: Piece, rows: Ints) -> Floats:
    """float64 `[2, layers, rows]`: mass and peak of each of the tape positions; 0 past the piece's end."""
    both = np.stack((piece.mass, piece.peak)).astype(np.float64) / (piece.stops - piece.starts)
    chunk = np.searchsorted(piece.starts, rows, side="right") - 1
    return np.asarray(np.where(rows < piece.stop, both[:, :, chunk], 0.0), dtype=np.float64)


def _measured(rows: Ints, layers: tuple[int, ...], queries: int, mass: Floats) -> AttentionMass:
    both = mass.astype(np.float32)
    return AttentionMass(rows, layers, queries, both[0], both[1])
