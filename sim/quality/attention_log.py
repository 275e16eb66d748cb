"""From a log to attention maps: the score events that `record --score-all` wrote, and whether any query lacks one."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from kvtape.planner.events import Event, Op
from kvtape.planner.ranges import RangeSet
from kvtape.planner.rows import RunRow, SessionRow
from kvtape.planner.scores import DENSE, is_dense
from kvtape.sim.errors import NoAttention
from kvtape.sim.quality.attention import AttentionMap, Piece

__all__ = ["ScoredLog", "read_attention"]

_REMEDY = "record it with `kvtape record --score-all`"


class ScoredLog(Protocol):
    """What is read of a log; `traces.reader.Log` has it."""

    def default_run(self) -> RunRow: ...

    def sessions(self, run_id: str) -> Sequence[SessionRow]: ...

    def events(self, run_id: str, session_id: str) -> Sequence[Event]: ...

    def arrow(self, table: str, where: str = "true", params: Sequence[Any] = ()) -> pa.Table: ...


def read_attention(
    log: ScoredLog, run_id: str | None = None, sessions: Collection[str] | None = None
) -> dict[str, AttentionMap]:
    """The attention map of every session of a run (default: the log's own), or of the `sessions` named, in log order.

    Raises NoAttention where a session has none, or has computed tokens that were not measured.
    """
    run = log.default_run().run_id if run_id is None else run_id
    names = [row.session_id for row in log.sessions(run)]
    return {name: _read(log, run, name) for name in names if sessions is None or name in sessions}


def _read(log: ScoredLog, run: str, session_id: str) -> AttentionMap:
    events = log.events(run, session_id)
    dense = {e.seq: e for e in events if is_dense(e)}
    if not dense:
        raise NoAttention(f"session {session_id} has no attention over its whole tape; {_REMEDY}")
    _refuse_gaps(session_id, events)
    first, last = min(dense), max(dense)
    rows = log.arrow("scores", "run_id = ? AND session_id = ? AND seq BETWEEN ? AND ?", [run, session_id, first, last])
    layers = tuple(json.loads(dense[first].detail or "{}")["layers"])
    return AttentionMap(session_id, layers, tuple(_pieces(rows, dense, len(layers))))


def _pieces(rows: pa.Table, dense: dict[int, Event], n_layers: int) -> list[Piece]:
    seqs, starts, stops = (rows.column(c).to_numpy().astype(np.int64) for c in ("seq", "start", "stop"))
    order = np.lexsort((starts, seqs))
    order = order[np.isin(seqs[order], list(dense))]
    seqs, starts, stops = seqs[order], starts[order], stops[order]
    taken = rows.take(pa.array(order))
    mass, peak = (_by_layer(taken.column(c), n_layers) for c in ("mass", "peak"))
    pieces = []
    for seq, event in dense.items():
        at = slice(*np.searchsorted(seqs, [seq, seq + 1]).tolist())
        pieces.append(
            Piece(
                start=event.start or 0,
                stop=event.stop or 0,
                turn=event.turn,
                seq=seq,
                starts=starts[at],
                stops=stops[at],
                mass=mass[:, at],
                peak=peak[:, at],
                repeated=bool(json.loads(event.detail or "{}").get("repeated", False)),
            )
        )
    return pieces


def _by_layer(column: pa.ChunkedArray, n_layers: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 `[n_layers, rows]` from a column of lists of n_layers."""
    flat = column.combine_chunks().flatten().to_numpy().astype(np.float32)
    return np.ascontiguousarray(flat.reshape(-1, n_layers).T)


def _refuse_gaps(session_id: str, events: Sequence[Event]) -> None:
    """Raises NoAttention unless every token that was computed and stayed was measured after that."""
    pending = RangeSet()
    for event in events:
        if event.op == Op.REFUSE and (event.reason or "").startswith(f"{DENSE}:"):
            raise NoAttention(f"session {session_id} seq {event.seq}: {event.reason}; {_REMEDY} again")
        if event.op in (Op.PREFILL, Op.DECODE):
            pending |= RangeSet([(event.start or 0, event.stop or 0)])
        elif event.op == Op.TRUNCATE:
            pending &= RangeSet([(0, event.start or 0)])
        elif is_dense(event):
            pending -= RangeSet([(event.start or 0, event.stop or 0)])
        elif event.op == Op.PROMPT and event.reason != "suffix":
            _refuse(session_id, event.turn - 1, pending)
    _refuse(session_id, events[-1].turn, pending)


def _refuse(session_id: str, turn: int, pending: RangeSet) -> None:
    if pending:
        raise NoAttention(
            f"session {session_id} turn {turn}: the attention of queries {', '.join(map(str, pending))} was not "
            f"measured (the recording was interrupted or failed there); {_REMEDY} again"
        )
