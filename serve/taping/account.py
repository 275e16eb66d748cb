"""The session that a captured engine amounts to: tape, fold, blocks, and the events on their way to the log.

Told what an engine did, in cache positions; what a `Session` would have recorded is what comes out. Pure but for its
sink and clock: no engine is asked here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.backends.catalog import BlockCatalog, CatalogState, SegmentKind
from kvtape.backends.journal import Journal
from kvtape.backends.protocol import Clock, EventSink
from kvtape.planner.blocks import DEFAULT_BLOCK, Block, default_class
from kvtape.planner.events import Op, Way
from kvtape.planner.layout import Layout, cut, next_cache_position, resident_ranges, rows_between
from kvtape.planner.opening import Opening
from kvtape.planner.ranges import RangeSet
from kvtape.planner.rows import SessionRow
from kvtape.serve.taping.errors import LostTrack

__all__ = ["FAR", "Account", "Took"]

FAR = 2**31
"""Past every cache position."""

_USER = SegmentKind("user", default_class("user"))
_ASSISTANT = SegmentKind("assistant", default_class("assistant"))


@dataclass(frozen=True, slots=True)
class Took:
    """When a call of the engine began, and how long it took; None where several events share one call."""

    began_ns: int
    elapsed_ns: int | None = None


class Account:
    """One session. Methods raise IllegalEvent or LostTrack where the events cannot say what is told, and what the sink
    raises; nothing is recorded then.
    """

    def __init__(
        self,
        sink: EventSink,
        clock: Clock,
        row: SessionRow,
        n_ctx: int,
        *,
        speculation: str | None = None,
        said: dict[str, Any] | None = None,
    ) -> None:
        self.clock = clock
        self.tape: list[int] = []
        self._catalog = BlockCatalog(DEFAULT_BLOCK)
        self._counters: dict[str, int] = {}
        self._fresh = True
        self._saved: list[tuple[tuple[int, ...], CatalogState]] = []
        sink.open_session(row)
        self._journal = Journal(sink, clock, row.run_id, row.session_id)
        opening = json.loads(Opening(speculation=speculation).detail() or "{}") | (said or {})
        detail = json.dumps(opening, sort_keys=True) if opening else None
        self._journal.emit(Op.OPEN, clock.now_ns(), n_tokens=n_ctx, reason=row.policy, detail=detail)

    @property
    def layout(self) -> Layout:
        return self._journal.state.layout

    @property
    def end(self) -> int:
        """The cache position of the next token."""
        return next_cache_position(self.layout)

    @property
    def turn(self) -> int:
        return self._journal.state.turn

    def cache_positions(self) -> npt.NDArray[np.int64]:
        """Where rows should stand, ascending."""
        parts = [np.arange(s.cache_start, s.cache_stop, dtype=np.int64) for s in self.layout]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def tape_at(self, position: int) -> int:
        """The length of a tape that keeps the rows before cache position `position` and no later one."""
        gone = [s.tape_start + max(0, position - s.cache_start) for s in self.layout if s.cache_stop > position]
        return min(gone, default=len(self.tape))

    def prompt(self, keep: int, more: int, *, suffix: bool) -> None:
        """A prompt whose first `keep` tape tokens stay, with `more` behind them; or `more` behind the whole tape."""
        began = self.clock.now_ns()
        self._fresh = True
        if suffix:
            self._counters = {"suffix": more, "prompt_tokens": more}
            self._journal.emit(Op.PROMPT, began, start=len(self.tape), n_tokens=more, reason="suffix")
            return
        reused = resident_ranges(cut(self.layout, keep)).n_tokens
        dropped = self._journal.state.resident_tokens - reused
        counters = {"reused": reused, "forgotten": keep - reused, "prefilled": more, "dropped": dropped}
        counters["prompt_tokens"] = keep + more
        self._counters = counters if more else {}
        borne: dict[str, Any] = {} if more else dict(counters)  # by the first prefill, where there is one
        self._journal.emit(Op.PROMPT, began, start=keep, n_tokens=keep + more, **borne)
        self._catalog.touch(0, keep, self.turn)

    def generate(self, most: int | None) -> None:
        """Generation begins. `most` is a limit of the caller's on what he gives out, not on what is computed."""
        detail = None if most is None else json.dumps({"max_tokens": most})
        self._fresh = True
        self._journal.emit(Op.GENERATE, self.clock.now_ns(), reason="given:caller", detail=detail)

    def prefill(self, tokens: Sequence[int], took: Took, **columns: Any) -> None:
        """Tokens that were computed behind the last row in one engine call, but for what `columns` say else."""
        blocks = self._grow(len(tokens), _USER)
        counters = self._counters
        said = {"physical_prefill_calls": 1, "physical_prefill_tokens": len(tokens), "token_count_source": "engine"}
        self._append(Op.PREFILL, took, tokens, blocks, **{**said, **counters, **columns})
        self._counters = {}

    def decode(self, tokens: Sequence[int], took: Took, calls: int, **drafts: int) -> None:
        blocks = self._grow(len(tokens), _ASSISTANT)
        said = {"completion_tokens": len(tokens), "token_count_source": "engine", "decode_calls": calls}
        self._append(Op.DECODE, took, tokens, blocks, **said, **drafts)

    def found(self, tokens: Sequence[int], reason: str) -> None:
        """The engine, empty till now, has rows that were not computed here: a prompt that no call computed."""
        if tokens:
            self.prompt(0, len(tokens), suffix=False)
            self._uncounted(tokens, reason, way=Way.IMPORT)

    def left_over(self, tokens: Sequence[int], reason: str) -> None:
        """Rows behind what was generated that nobody generated, of calls that were counted."""
        self.prompt(len(self.tape), len(tokens), suffix=True)
        self._uncounted(tokens, reason)

    def _uncounted(self, tokens: Sequence[int], reason: str, **columns: Any) -> None:
        nobody = {"physical_prefill_calls": None, "physical_prefill_tokens": None, "token_count_source": None}
        self.prefill(tokens, Took(self.clock.now_ns()), reason=reason, **nobody, **columns)

    def remove(self, start: int, stop: int, reason: str, took: Took) -> None:
        """The rows at cache positions `[start, stop)` are gone."""
        runs = [
            RangeSet(
                [(s.tape_start + max(0, start - s.cache_start), s.tape_start + min(s.length, stop - s.cache_start))]
            )
            for s in self.layout
            if s.cache_start < stop and s.cache_stop > start
        ]
        if runs and stop >= self.end:
            self.truncate(self.tape_at(start), reason, took)
        elif runs:
            fragments = self._catalog.split((r.start, r.stop) for run in runs for r in run)
            for run in reversed(runs):
                self._evict(run.ranges[0].start, run.ranges[0].stop, fragments, reason, took)
                fragments, took = [], Took(took.began_ns)

    def truncate(self, keep: int, reason: str, took: Took, detail: str | None = None) -> None:
        """The tape ends at `keep`."""
        removed = len(self.tape) - keep
        del self.tape[keep:]
        rows = self._journal.block_rows(self._catalog.truncate(keep), truncated=True)
        span: dict[str, Any] = {"start": keep, "stop": keep + removed, "n_tokens": removed}
        span["elapsed_ns"] = took.elapsed_ns
        self._journal.emit(Op.TRUNCATE, took.began_ns, block_rows=rows, reason=reason, detail=detail, **span)
        self._fresh = True

    def _evict(self, start: int, stop: int, fragments: Sequence[Block], reason: str, took: Took) -> None:
        self._journal.emit(
            Op.EVICT,
            took.began_ns,
            block_rows=self._journal.block_rows(fragments),
            start=start,
            stop=stop,
            n_tokens=stop - start,
            way=Way.GAP,
            cold=False,
            blocks=self._catalog.refs(start, stop),
            reason=reason,
            elapsed_ns=took.elapsed_ns,
        )

    def shift(self, start: int, stop: int, delta: int, took: Took) -> None:
        """The rows at cache positions `[start, stop)` were moved by `delta`; nothing where there are none."""
        stop = min(stop, self.end)
        if delta and (moved := rows_between(self.layout, start, stop)):
            span: dict[str, Any] = {"start": start, "stop": stop, "delta": delta, "n_tokens": moved}
            self._journal.emit(Op.SHIFT, took.began_ns, **span, reason="asked", elapsed_ns=took.elapsed_ns)

    def snapshot(self, n_bytes: int, took: Took) -> int:
        """The whole state was saved; its number."""
        number = len(self._saved)
        self._saved.append((tuple(self.tape), self._catalog.copy_blocks()))
        self._journal.emit(
            Op.SNAPSHOT,
            took.began_ns,
            snapshot_id=number,
            n_tokens=self._journal.state.resident_tokens,
            elapsed_ns=took.elapsed_ns,
            detail=json.dumps({"bytes": n_bytes}),
        )
        return number

    def restore(self, number: int, took: Took) -> None:
        """A saved state replaced everything."""
        tape, blocks = self._saved[number]
        held = dict(self._journal.state.snapshots)[number].layout
        self._journal.emit(
            Op.RESTORE,
            took.began_ns,
            snapshot_id=number,
            n_tokens=sum(s.length for s in held),
            way=Way.IMPORT,
            elapsed_ns=took.elapsed_ns,
        )
        self.tape[:] = tape
        self._catalog.restore_blocks(blocks)
        self._fresh = True

    def refuse(self, reason: str, error_class: str) -> None:
        """Something was asked and not done."""
        self._journal.emit(Op.REFUSE, self.clock.now_ns(), reason=reason, error_class=error_class)

    def lost(self, cause: Exception) -> None:
        """From here on nothing is known. Of the cause only its class is written: its text may quote what was said."""
        text = str(cause) if isinstance(cause, LostTrack) else None
        detail = {"cause": type(cause).__name__} | ({} if text is None else {"why": text})
        self._journal.emit(Op.LOST, self.clock.now_ns(), reason="capture_stopped", detail=json.dumps(detail))

    def close(self) -> None:
        if not self._journal.state.lost:
            self._journal.emit(Op.CLOSE, self.clock.now_ns())

    def _grow(self, n: int, kind: SegmentKind) -> list[Block]:
        # A block that was evicted does not grow: its new tokens are resident, the old ones are not.
        gap = bool(self.tape) and len(self.tape) - 1 not in resident_ranges(self.layout)
        fresh = gap or (self._fresh and kind is _USER)
        self._fresh = False
        return self._catalog.extend(n, kind, new_segment=fresh, clock=self.turn)

    def _append(self, op: Op, took: Took, tokens: Sequence[int], blocks: Sequence[Block], **columns: Any) -> None:
        start, at = len(self.tape), self.end
        ids = [int(t) for t in tokens]
        span: dict[str, Any] = {"start": start, "stop": start + len(ids), "n_tokens": len(ids), "cache_start": at}
        span["elapsed_ns"] = took.elapsed_ns
        self._journal.emit(
            op, took.began_ns, tokens=ids, block_rows=self._journal.block_rows(blocks), **span, **columns
        )
        self.tape.extend(ids)
