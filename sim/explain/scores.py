"""The scores that blocks bore when a plan was made, from the attention that the log has of them.

A log has attention by block, a session ranks by token: where a block was cut since it was measured, or tokens of one
block count differently (`norm=mean`), the score is known within bounds. Where it was pooled over tokens it is not
known at all. Nothing is put in the place of what is not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvtape.planner.blocks import Block
from kvtape.planner.events import Event, Op
from kvtape.planner.rows import ScoreRow
from kvtape.planner.scores import DENSE, ScoreRequest
from kvtape.planner.specs import PolicySpec
from kvtape.planner.table import Floats, Ints

__all__ = ["BlockScores", "RecordedScores"]


@dataclass(frozen=True, slots=True)
class BlockScores:
    """`low`, `high` by block: the score lies between them, both ends included; None where the block had none.

    `missing`: why scores that the policy ranks by are not known; None when they are, or when it ranks by none.
    """

    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    missing: str | None = None

    @property
    def exact(self) -> bool:
        return self.missing is None and self.low == self.high

    def on(self, blocks: Sequence[Block]) -> list[Block]:
        """The blocks with their scores, the lower bound where there are two."""
        return [replace(b, score=score) for b, score in zip(blocks, self.low, strict=True)]


@dataclass(frozen=True, slots=True)
class _Piece:
    """What `[start, stop)` received in one measurement; `cut`: the row reached further, over tokens that are gone."""

    start: int
    stop: int
    row: ScoreRow
    cut: bool = False


@dataclass(frozen=True, slots=True)
class _Measured:
    """One score event. Its queries were the last `queries` of `tape_length` tokens, or a probe behind them.

    `scored_to`: what was resident below this tape position was measured. `whole`: and nothing else.
    """

    kind: str
    pieces: tuple[_Piece, ...]
    layers: tuple[int, ...]
    queries: int
    tape_length: int
    scored_to: int
    whole: bool


class RecordedScores:
    """The attention that was on record after the events that were told, in order."""

    def __init__(self, rows: Iterable[ScoreRow]) -> None:
        self._rows: dict[int, list[ScoreRow]] = {}
        for row in rows:
            self._rows.setdefault(row.seq, []).append(row)
        self._fresh: _Measured | None = None
        self._probe: _Measured | None = None
        self._history: tuple[_Measured, ...] = ()
        self._saved: dict[int, tuple[_Measured, ...]] = {}

    def apply(self, event: Event, tape_length: int) -> None:
        """One event more; `tape_length` before it."""
        op = event.op
        if op == Op.SCORE:
            self._measure(event, tape_length)
            return
        self._fresh = None
        if op in (Op.PREFILL, Op.DECODE, Op.TRUNCATE, Op.RESTORE):
            self._probe = None
        if op == Op.TRUNCATE:
            self._history = tuple(_cut(m, event.start or 0) for m in self._history)
        elif op == Op.SNAPSHOT:
            self._saved[event.snapshot_id or 0] = self._history
        elif op == Op.RESTORE:
            self._history = self._saved.get(event.snapshot_id or 0, ())

    def _measure(self, event: Event, tape_length: int) -> None:
        if event.reason is None or event.reason == DENSE:
            return  # measured for others than the policy
        detail = json.loads(event.detail or "{}")
        queries = int(detail.get("queries", 0))
        scored_to = tape_length - queries if event.reason == "window" else tape_length
        pieces = tuple(_Piece(r.start, r.stop, r) for r in self._rows.get(event.seq, ()))
        found = _Measured(
            kind=event.reason,
            pieces=pieces,
            layers=tuple(detail.get("layers", ())),
            queries=queries,
            tape_length=tape_length,
            scored_to=scored_to,
            whole=sum(max(0, min(p.stop, scored_to) - p.start) for p in pieces) == event.n_tokens,
        )
        if event.reason == "probe":
            self._probe = found
            return
        self._fresh = found
        if event.reason == "accumulated":
            self._history = (*self._history, found)

    def of(self, policy: PolicySpec, blocks: Sequence[Block], *, own: bool = False) -> BlockScores:
        """What `policy` would rank `blocks` by now; nothing where the log has not measured it.

        `own`: the policy that ruled, so that nothing measured means that it planned without scores.
        """
        none: tuple[float | None, ...] = (None,) * len(blocks)
        request = policy.score_request
        if request is None:
            return BlockScores(none, none)
        last = self._probe if request.kind == "probe" else self._fresh
        if own and last is None:
            return BlockScores(none, none)
        why = _unfit(policy, request, last)
        if why is not None or last is None:
            return BlockScores(none, none, why)
        measured = self._history if request.kind == "accumulated" else (last,)
        if not all(m.whole for m in measured):
            return BlockScores(none, none, "some tokens of a block were not measured, and the log does not say which")
        by_queries = policy.norm == "mean" and request.kind == "accumulated"
        low, high = _bounds(blocks, measured, request, by_queries=by_queries)
        known = [b.start < last.scored_to for b in blocks]
        return BlockScores(
            tuple(v if k else None for v, k in zip(low.tolist(), known, strict=True)),
            tuple(v if k else None for v, k in zip(high.tolist(), known, strict=True)),
        )


def _unfit(policy: PolicySpec, request: ScoreRequest, last: _Measured | None) -> str | None:
    """Why the last measurement is not what `policy` ranks by; None when it is."""
    if last is None:
        return f"no {request.kind} attention was measured for this plan"
    if request.kind != last.kind:
        return f"it ranks by {request.kind} attention; what was measured for this plan is {last.kind} attention"
    asked = min(request.queries or 0, last.tape_length - 1)
    # Behind a hole the window begins one token later.
    if request.kind == "window" and last.queries not in (asked, asked - 1):
        return f"it asks the last {asked} tokens, measured were the last {last.queries}"
    lacking = sorted(set(request.wanted(last.layers) or ()) - set(last.layers))
    if lacking:
        return f"layers {', '.join(map(str, lacking))} were not measured"
    if policy.pool > 1:
        return f"pool={policy.pool} averages over tokens, and the log has attention by block"
    return None


def _cut(measured: _Measured, tape_stop: int) -> _Measured:
    kept = tuple(p for p in measured.pieces if p.start < tape_stop)
    return replace(
        measured, pieces=tuple(replace(p, stop=tape_stop, cut=True) if p.stop > tape_stop else p for p in kept)
    )


def _bounds(
    blocks: Sequence[Block], measured: Sequence[_Measured], request: ScoreRequest, *, by_queries: bool
) -> tuple[Floats, Floats]:
    """Float64 `[blocks]` each: the mean over a block's measured tokens lies between the two."""
    starts = np.array([b.start for b in blocks], dtype=np.int64)
    stops = np.array([b.stop for b in blocks], dtype=np.int64)
    low, high = np.zeros(len(blocks)), np.zeros(len(blocks))
    for m in measured:
        wanted = request.wanted(m.layers)
        use = [i for i, layer in enumerate(m.layers) if wanted is None or layer in wanted]
        for p in m.pieces:
            values = p.row.peak if request.heads == "max" else p.row.mass
            total = sum(values[i] for i in use)
            touched = (starts < p.stop) & (p.start < stops)
            # What lies across a block's border counts for it not at all, or in full.
            inside = touched & (starts <= p.start) & (p.stop <= stops) & (not p.cut)
            low[inside] += total
            high[touched] += total
    n_tokens = np.maximum(1, np.minimum(stops, measured[-1].scored_to) - starts)
    low, high = low / n_tokens, high / n_tokens
    if not by_queries:
        return low, high
    least, most = _seen(measured, starts, stops)
    return np.divide(low, most, out=np.zeros_like(low), where=most > 0), np.divide(
        high, least, out=high.copy(), where=least > 0
    )


def _seen(measured: Sequence[_Measured], starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """Int64 `[blocks]` each: how many queries could see a token of the block, at least and at most."""
    seen = np.zeros(int(stops.max(initial=0)), dtype=np.int64)
    for m in measured:
        for p in m.pieces:
            at = np.arange(p.start, min(p.stop, seen.size))
            seen[at] += np.minimum(m.queries, m.tape_length - at)
    pairs = [seen[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
    return np.array([p.min() for p in pairs]), np.array([p.max() for p in pairs])
