"""Dense attention over a session's tape, as a shadow pass measured it: which keys each piece of queries attended to.

A piece is a run of queries that were computed together; the keys are the tape up to the piece's end, in chunks. When
the tape is cut and grows again the pieces of the old path stay in the map, but are not in force any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtape.sim.errors import SimulationError

__all__ = ["AttentionMap", "AttentionPath", "ChunkSums", "Piece"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What the queries of tape positions `[start, stop)` paid, all of them, to the tape `[0, stop)`.

    `starts`, `stops` int64 `[n_chunks]`: tape ranges of the keys, contiguous from 0 to `stop`; the last of them are
    the queries' own. `mass` float32 `[n_layers, n_chunks]`: attention summed over query heads, queries and the chunk's
    tokens; over all chunks `n_heads * n_queries` (less where a model has attention sinks that are no tokens). `peak`,
    the same shape: for each token the largest head's sum over the queries, summed over the chunk's tokens.

    `turn`, `seq`: of the log's event. `repeated`: the recorded session did not compute these queries at that time; it
    had them already, and they were measured again because a piece was cut in two, or because a state was restored.
    """

    start: int
    stop: int
    turn: int
    seq: int
    starts: Ints
    stops: Ints
    mass: npt.NDArray[np.float32]
    peak: npt.NDArray[np.float32]
    repeated: bool = False

    @property
    def n_queries(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class ChunkSums:
    """Sums over `n_queries` queries. `starts`, `stops` int64 `[n_chunks]`, `mass`, `peak` float64 `[layers, chunks]`.

    A sum of peaks over several pieces is an upper bound of the peak over all their queries.
    """

    starts: Ints
    stops: Ints
    mass: Floats
    peak: Floats
    n_queries: int


class AttentionPath:
    """The pieces that are in force for one tape: they follow each other from position 0 on, each query in one of them.

    `length`: tokens of that tape. `layers`: model layers, ascending, those of the axis of every mass.
    """

    def __init__(self, session_id: str, layers: tuple[int, ...], pieces: Sequence[Piece], length: int) -> None:
        self.session_id = session_id
        self.layers = layers
        self.pieces = tuple(p for p in pieces if p.stop <= length)
        self.length = length

    @property
    def covered(self) -> int:
        """Queries from 0 on that were measured; up to a piece shorter than `length` where that lies inside a piece."""
        return self.pieces[-1].stop if self.pieces else 0

    @property
    def complete(self) -> bool:
        """Whether every query of the tape was measured."""
        return self.covered == self.length

    @property
    def borders(self) -> Ints:
        """Ascending tape positions at which one piece ends and the next begins; 0 and `covered` included."""
        return np.array([0, *(p.stop for p in self.pieces)], np.int64)

    def computed(self, start: int, stop: int) -> tuple[Piece, ...]:
        """The pieces with queries in `[start, stop)`; the first and the last may reach beyond it."""
        return tuple(p for p in self.pieces if p.start < stop and p.stop > start)

    def accumulated(self, until: int | None = None) -> ChunkSums:
        """What every query before tape position `until` (default: `length`) has paid to each chunk so far.

        Raises SimulationError where `until` is no border of pieces.
        """
        stop = self.length if until is None else until
        return self._between(0, stop)

    def window(self, queries: int, until: int | None = None) -> ChunkSums:
        """What the last `queries` queries before `until` (default: `length`) paid. Raises SimulationError likewise."""
        stop = self.length if until is None else until
        return self._between(max(0, stop - queries), stop)

    def _between(self, start: int, stop: int) -> ChunkSums:
        borders = self.borders
        for at in (start, stop):
            if at not in borders:
                raise SimulationError(
                    f"session {self.session_id}: the attention of the queries before tape position {at} was not "
                    f"measured apart; record with --score-all --score-every 1"
                )
        pieces = [p for p in self.pieces if start <= p.start and p.stop <= stop]
        edges = _common_borders(pieces, stop)
        mass = np.zeros((len(self.layers), len(edges) - 1))
        peak = np.zeros_like(mass)
        for piece in pieces:
            firsts = np.searchsorted(piece.starts, edges[edges < piece.stop])
            mass[:, : len(firsts)] += np.add.reduceat(piece.mass.astype(np.float64), firsts, axis=1)
            peak[:, : len(firsts)] += np.add.reduceat(piece.peak.astype(np.float64), firsts, axis=1)
        return ChunkSums(edges[:-1], edges[1:], mass, peak, stop - start)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMap:
    """All pieces of one session in the order in which they were recorded. `layers`: model layers, ascending."""

    session_id: str
    layers: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        for piece in self.pieces:
            _check(self.session_id, len(self.layers), piece)

    def path(self, turn: int, length: int) -> AttentionPath:
        """What is in force when the session's tape has `length` tokens in the log's turn `turn` (1-based).

        Raises SimulationError where the turn took tokens back and went on with others: two paths of that length.
        """
        kept, forked = _fold([p for p in self.pieces if p.turn <= turn], turn)
        if forked is not None and length > forked:
            raise SimulationError(
                f"session {self.session_id} turn {turn}: from tape position {forked} on the turn went on twice, after "
                f"a restore inside it; which of the two is meant cannot be told"
            )
        return AttentionPath(self.session_id, self.layers, kept, length)

    def path_before(self, seq: int, length: int) -> AttentionPath:
        """What is in force of a tape of `length` tokens before the log's event `seq`: one path, whatever a turn did."""
        kept, _ = _fold([p for p in self.pieces if p.seq < seq])
        return AttentionPath(self.session_id, self.layers, kept, length)

    def complete(self, turn: int, length: int) -> bool:
        """Whether every query of the tape of `length` tokens with which the turn ended was measured."""
        kept, _ = _fold([p for p in self.pieces if p.turn <= turn])
        return AttentionPath(self.session_id, self.layers, kept, length).complete


def _fold(pieces: Sequence[Piece], turn: int | None = None) -> tuple[list[Piece], int | None]:
    """The pieces in force behind the last of them; and where `turn` first gave up queries that were its own."""
    kept: list[Piece] = []
    forked: int | None = None
    for piece in pieces:
        while kept and kept[-1].stop > piece.start:
            gone = kept.pop()
            if gone.turn == turn:
                forked = piece.start if forked is None else min(forked, piece.start)
        if (kept[-1].stop if kept else 0) == piece.start:
            kept.append(piece)
    return kept, forked


def _common_borders(pieces: Sequence[Piece], stop: int) -> Ints:
    """The finest borders from 0 to `stop` that no chunk of any of the pieces lies across. int64, ascending."""
    inside = np.zeros(stop + 1, np.int64)
    found = np.zeros(stop + 1, bool)
    found[[0, stop]] = True
    for piece in pieces:
        found[piece.stops] = True
        long = piece.stops - piece.starts > 1
        np.add.at(inside, piece.starts[long] + 1, 1)
        np.add.at(inside, piece.stops[long], -1)
    # Behind the last key of every piece there is nothing to lie across.
    return np.flatnonzero(found & (np.cumsum(inside) == 0)).astype(np.int64)


def _check(session_id: str, n_layers: int, piece: Piece) -> None:
    edges = np.append(piece.starts, piece.stop)
    shape = (n_layers, len(piece.starts))
    tiled = len(piece.starts) and edges[0] == 0 and (edges[:-1] < edges[1:]).all() and (piece.stops == edges[1:]).all()
    if not tiled or not 0 <= piece.start < piece.stop or piece.mass.shape != shape or piece.peak.shape != shape:
        raise SimulationError(
            f"session {session_id} seq {piece.seq}: the dense attention of queries [{piece.start}, {piece.stop}) does "
            f"not cover the tape before them; `kvtape verify` says whether the log is whole"
        )
