"""Attention maps made from weights that are known: every query's weight on every key, drawn from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kvtape.planner.events import Event
from kvtape.planner.rows import RunRow, SessionRow
from kvtape.planner.scores import is_dense
from kvtape.sim.quality.attention import AttentionMap, Piece
from kvtape.sim.quality.attention_log import read_attention
from kvtape.testing.sink import ListSink
from kvtape.traces.codec import to_arrow
from kvtape.traces.schema import SCORES
from support.logs import run_row

__all__ = ["SinkLog", "attention_map", "causal_weights", "edges_of", "map_of", "piece", "pieces", "without_dense"]

Weights = npt.NDArray[np.float64]


def causal_weights(
    n_tokens: int, *, n_layers: int = 2, n_heads: int = 3, seed: int = 0, spread: float = 2.0
) -> Weights:
    """`[n_layers, n_heads, n_tokens, n_tokens]`: soft-max rows over the keys up to the query itself."""
    logits = np.random.default_rng(seed).normal(0, spread, (n_layers, n_heads, n_tokens, n_tokens))
    weights = np.exp(logits) * np.tri(n_tokens)
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def edges_of(n_tokens: int, block: int) -> list[int]:
    """Borders of blocks of `block` tokens, the last one shorter: `[0, block, ..., n_tokens]`."""
    return [*range(0, n_tokens, block), n_tokens]


def piece(
    weights: Weights,
    start: int,
    stop: int,
    edges: Sequence[int],
    *,
    turn: int = 1,
    seq: int = 0,
    repeated: bool = False,
) -> Piece:
    """What a shadow pass would measure of queries `[start, stop)`, the keys in chunks between `edges`."""
    borders = np.array([*(e for e in edges if e < stop), stop], np.int64)
    by_token = weights[:, :, start:stop, :stop].sum(axis=2)
    mass = np.add.reduceat(by_token.sum(axis=1), borders[:-1], axis=-1)
    peak = np.add.reduceat(by_token.max(axis=1), borders[:-1], axis=-1)
    return Piece(
        start=start,
        stop=stop,
        turn=turn,
        seq=seq,
        starts=borders[:-1],
        stops=borders[1:],
        mass=mass.astype(np.float32),
        peak=peak.astype(np.float32),
        repeated=repeated,
    )


def pieces(
    weights: Weights, start: int, stop: int, *, every: int = 4, block: int = 4, turn: int = 1, seq: int = 0
) -> list[Piece]:
    """Pieces of at most `every` queries from `start` on, chunks of `block` tokens, events from `seq` on."""
    starts = range(start, stop, every)
    edges = edges_of(stop, block)
    return [piece(weights, at, min(at + every, stop), edges, turn=turn, seq=seq + i) for i, at in enumerate(starts)]


def attention_map(
    weights: Weights, *, every: int = 4, block: int = 4, session_id: str = "s0", turns: Sequence[int] = ()
) -> AttentionMap:
    """Of one tape that only grows: turn k ends at `turns[k - 1]` tokens (default: one turn over all of them)."""
    n_layers, _, n_tokens, _ = weights.shape
    found: list[Piece] = []
    start = 0
    for turn, stop in enumerate(turns or [n_tokens], 1):
        found += pieces(weights, start, stop, every=every, block=block, turn=turn, seq=len(found))
        start = stop
    return AttentionMap(session_id, tuple(range(n_layers)), tuple(found))


@dataclass(frozen=True)
class SinkLog:
    """One recorded session in memory, as `read_attention` wants a log."""

    sink: ListSink

    def default_run(self) -> RunRow:
        return run_row(self.sink.sessions[0].run_id)

    def sessions(self, run_id: str) -> Sequence[SessionRow]:
        return self.sink.sessions

    def events(self, run_id: str, session_id: str) -> Sequence[Event]:
        return self.sink.events

    def arrow(self, table: str, where: str = "true", params: Sequence[Any] = ()) -> pa.Table:
        first, last = params[2:]
        assert table == SCORES.name
        return to_arrow(SCORES, [row for row in self.sink.scores if first <= row.seq <= last])


def map_of(sink: ListSink) -> AttentionMap:
    """The attention map of the one session that the sink has."""
    (found,) = read_attention(SinkLog(sink)).values()
    return found


def without_dense(sink: ListSink) -> ListSink:
    """What a session recorded, as if no dense pass had run beside it: its scores taken out, what is left renumbered."""
    kept = [e for e in sink.events if not is_dense(e)]
    number = {e.seq: i for i, e in enumerate(kept)}
    return ListSink(
        sessions=sink.sessions,
        events=[replace(e, seq=number[e.seq]) for e in kept],
        tokens={number[seq]: tokens for seq, tokens in sink.tokens.items()},
        plans=[replace(row, seq=number[row.seq]) for row in sink.plans],
        blocks=[replace(row, seq=number[row.seq]) for row in sink.blocks],
        scores=[replace(row, seq=number[row.seq]) for row in sink.scores if row.seq in number],
    )
