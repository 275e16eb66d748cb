"""One slot of llama-server as a session: its log lines become events that the residency fold accepts.

What the log shows to be in the cache without having shown how it came there (a log that begins in the middle, a
prompt loaded from the host) is a prefill with the reason `before_log`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtape.planner import layout as lay
from kvtape.planner.events import Event, Op, Placement, Way
from kvtape.planner.residency import IllegalEvent, ResidencyState, apply
from kvtape.traces.importers.llama_lines import Said
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Step
from kvtape.traces.importers.source import Source

__all__ = ["Slot"]

_CONTRADICTS = "the line does not fit what the lines before it say of the cache; its event was left out"
_CHECKPOINT = ("pos_min", "pos_max", "n_tokens", "n_past", "n_swa", "size")


_MOST_HELD = 4096
"""Steps of a request that may wait for its last numbers; beyond, its generate event goes without them."""
_LONG = "a request with so many events that its generate event was written before its numbers were known"


class Slot:
    """Collects its steps; `take` gives those that no later line changes. The others wait for numbers."""

    def __init__(self, name: str, source: Source, notes: Notes) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        self.busy = False
        self._source, self._notes = source, notes
        self._out: list[Step] = []
        self._state = ResidencyState()
        self._prompt: int | None = None
        self._tape_before = 0
        self._generate: int | None = None
        self._reason = "diverged"
        self._checkpoints: dict[tuple[int | None, int | None], int] = {}
        self._next_snapshot = 0
        self._prompt_tokens: int | None = None
        self._evaluated: int | None = None
        self._said: int | None = None
        self._eval_ms: float | None = None
        self._reused: int | None = None
        self._launched: Said | None = None
        self._released: tuple[int, Said] | None = None
        self._late: tuple[int, Said] | None = None
        self._written = False

    def take(self) -> list[Step]:
        """The steps that are as they will be, once each, in their order."""
        waiting = [i for i in (self._prompt, self._generate) if i is not None]
        if waiting and len(self._out) > _MOST_HELD:
            self._notes.warn("request_long", self._source.name, self._source.line, _LONG)
            self._written = self._written or self._generate is not None
            self._prompt = self._generate = None
            waiting = []
        n = min(waiting, default=len(self._out))
        done, self._out = self._out[:n], self._out[n:]
        self._prompt = None if self._prompt is None else self._prompt - n
        self._generate = None if self._generate is None else self._generate - n
        return done

    @property
    def _generating(self) -> bool:
        return self._generate is not None or self._written

    def settle(self) -> None:
        """End a request that was released without a line about the cache, before such lines come."""
        if self._released is not None:
            self.finish()

    # -- what a request goes through

    def context(self, said: Said) -> None:
        """The slot's context, as far as a line names it."""
        n_ctx = said.number("n_ctx_slot", "n_ctx")
        if n_ctx:
            self.facts["n_ctx"] = n_ctx

    def launch(self, said: Said) -> None:
        self.finish()
        self.busy, self._launched = True, said

    def prompt(self, said: Said) -> None:
        self.context(said)
        n = said.number("prompt_tokens")
        if n is None:
            return
        self.busy, self._prompt_tokens, self._reason = True, n, "diverged"
        self._tape_before = self._state.tape_length
        columns = {"start": 0, "n_tokens": n, "prompt_tokens": n}
        if self._emit(Op.PROMPT, said, columns, {"task": said.task}):
            self._prompt = len(self._out) - 1

    def forced(self, said: Said) -> None:
        self._reason = "window_pruned"

    def cached(self, said: Said) -> None:
        """How many tokens the slot had before this prompt."""
        self._grow(Op.PREFILL, said.number("cached") or 0, said)

    def logits(self, said: Said) -> None:
        self._reason = "logits"

    def rm(self, said: Said) -> None:
        """Everything from cache position p0 on goes; the first of a prompt says how much of it was there."""
        p0 = said.number("p0") or 0
        if self._prompt is not None and self._prompt_tokens is not None and p0 <= self._prompt_tokens:
            start = min(p0, self._tape_before)
            self._set(self._prompt, start=start, reused=p0, prefilled=self._prompt_tokens - p0)
        elif self._prompt_tokens is None and self._reused is None:
            self._reused = p0
        self._prompt = None
        self._cache_to(p0, said, self._reason)

    def progress(self, said: Said) -> None:
        n = said.number("n_past", "n_tokens")
        if n is not None:
            self._grow(Op.PREFILL, n, said, computed=True)

    def done(self, said: Said) -> None:
        self.progress(said)
        self._begin_generate(said)

    def release(self, said: Said) -> None:
        """The end of a request; what was not shown of its prompt is computed by now, the rest was generated."""
        total = said.number("n_past", "n_tokens", "n_cache_tokens")
        self.busy = False
        if total is None:
            return
        if self._prompt_tokens is None and not self._generating:
            self._late = (self._source.line, said)
            return
        if not self._generating:
            self._grow(Op.PREFILL, min(total, self._prompt_tokens or 0), said, computed=True)
            self._begin_generate(said)
        self._grow(Op.DECODE, total, said)

    def release_without_memory(self, said: Said) -> None:
        """The same in a log that says nothing of the cache: its numbers are put together in `finish`."""
        self.busy = False
        self._released = (self._source.line, said)

    def prompt_timing(self, said: Said) -> None:
        self._evaluated = said.number("tokens")

    def eval_timing(self, said: Said) -> None:
        self._said, self._eval_ms = said.number("tokens"), said.numbers.get("ms")

    def finish(self) -> None:
        """The request is over: its timing lines, which may come before or after its release, are all there."""
        held = self._released or self._late
        if held is not None:
            at, self._source.line = self._source.line, held[0]
            self._request_only(held[1]) if self._released else self._whole_request(held[1])
            self._source.line = at
        elif self._generate is not None:
            self._set(self._generate, **self._generated())
        self._generate = self._prompt = self._prompt_tokens = self._evaluated = self._said = None
        self._eval_ms = self._released = self._late = self._reused = self._launched = None
        self._written = False

    def _request_only(self, said: Said) -> None:
        """total = prompt + generated - 1: the last token is not fed to the model."""
        total = said.number("n_past", "n_tokens", "n_cache_tokens")
        known = {"task": said.task, "memory_lines": False}
        if total is not None and self._said is not None and total >= self._said:
            n = total - self._said + 1
            columns: dict[str, Any] = {"start": 0, "n_tokens": n, "prompt_tokens": n}
            if self._evaluated is not None and self._evaluated <= n:
                columns |= {"reused": n - self._evaluated, "prefilled": self._evaluated}
            self._emit(Op.PROMPT, self._launched or said, columns, known)
        self._emit(Op.GENERATE, said, self._generated(), known)

    def _whole_request(self, said: Said) -> None:
        """A build that never says how long the prompt is: its length follows from the total and what was generated."""
        total = said.number("n_past", "n_tokens", "n_cache_tokens") or 0
        n = None if self._said is None or total < self._said else total - self._said + 1
        if n is None or (self._reused or 0) > n:
            self._grow(Op.PREFILL, total, said)
            return
        columns: dict[str, Any] = {"start": min(self._reused or 0, self._state.tape_length), "n_tokens": n}
        columns["prompt_tokens"] = n
        if self._reused is not None:
            columns |= {"reused": self._reused, "prefilled": n - self._reused}
        self._emit(Op.PROMPT, said, columns, {"task": said.task})
        self._grow(Op.PREFILL, n, said, computed=True)
        self._emit(Op.GENERATE, said, self._generated())
        self._grow(Op.DECODE, total, said)

    def _generated(self) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        if self._said is not None:
            columns |= {"n_tokens": self._said, "completion_tokens": self._said}
        if self._eval_ms is not None:
            columns["elapsed_ns"] = round(self._eval_ms * 1_000_000)
        return columns

    def _begin_generate(self, said: Said) -> None:
        if not self._generating and self._emit(Op.GENERATE, said, {}):
            self._generate = len(self._out) - 1

    # -- what happens to the cache

    def shift(self, said: Said) -> None:
        """Context shift: rows [n_keep, n_keep + n_discard) go, the rest moves down."""
        keep, left, discard = (said.number(n) for n in ("n_keep", "n_left", "n_discard"))
        if keep is None or left is None or discard is None:
            return
        if not 0 < discard <= left:
            self._contradiction()
            return
        end = keep + left
        self._grow(Op.DECODE if self._generating else Op.PREFILL, end, said)
        asked = {"n_keep": keep, "n_left": left, "n_discard": discard}
        self._remove(keep, keep + discard, Way.REBASED, "context_shift", said, asked)
        self._move(keep + discard, end, -discard, said)

    def chunk(self, said: Said) -> None:
        """Cache reuse: the chunk [from, from_stop) moves down to `to`, and what was between them goes."""
        start, stop, to = (said.number(n) for n in ("from", "from_stop", "to"))
        if start is None or stop is None or to is None or not to < start < stop:
            self._contradiction()
            return
        if stop > self._state.next_cache_position:
            self._grow(Op.PREFILL, stop, said)
        self._remove(to, start, Way.REBASED, "chunk_reuse", said, {})
        self._move(start, stop, to - start, said)

    def clear(self, said: Said, reason: str) -> None:
        if self._state.tape_length:
            self._emit(Op.TRUNCATE, said, {"start": 0, "reason": reason})

    def kv_full(self, said: Said) -> None:
        self._emit(Op.REFUSE, said, {"reason": "kv_full", "error_class": "allocator_exhausted"}, {"text": said.text})

    def refused(self, said: Said) -> None:
        self._emit(Op.REFUSE, said, {"reason": "prompt_exceeds_context", "error_class": "ContextOverflow"})

    # -- saved states

    def created(self, said: Said, reason: str | None = None) -> int | None:
        snapshot = self._next_snapshot
        columns: dict[str, Any] = {"snapshot_id": snapshot}
        if reason:
            columns["reason"] = reason
        if not self._emit(Op.SNAPSHOT, said, columns, self._checkpoint(said)):
            return None
        self._next_snapshot += 1
        self._checkpoints[self._positions(said)] = snapshot
        return snapshot

    def restored(self, said: Said) -> None:
        snapshot = self._checkpoints.get(self._positions(said))
        if snapshot is None:
            last = said.number("pos_max")
            self._cache_to(said.number("n_tokens") or (0 if last is None else last + 1), said, "checkpoint_restored")
            snapshot = self.created(said, "before_log")
        if snapshot is not None:
            self._emit(Op.RESTORE, said, {"snapshot_id": snapshot}, self._checkpoint(said))

    def erased(self, said: Said, reason: str) -> None:
        """Dropping a checkpoint is the server's decision, and changes nothing that is resident."""
        self._checkpoints.pop(self._positions(said), None)
        self._emit(Op.PLAN, said, {"reason": reason}, self._checkpoint(said))

    def failed(self, said: Said) -> None:
        columns = {"reason": "checkpoint_not_restored", "error_class": "StateRejected"}
        self._emit(Op.REFUSE, said, columns, self._checkpoint(said))

    def _positions(self, said: Said) -> tuple[int | None, int | None]:
        return said.number("pos_min"), said.number("pos_max")

    def _checkpoint(self, said: Said) -> dict[str, Any]:
        found = {name: said.numbers[name] for name in _CHECKPOINT if name in said.numbers}
        return {k: v if k == "size" else int(v) for k, v in found.items()}

    # -- the fold

    def _cache_to(self, n: int, said: Said, reason: str) -> None:
        """Make the cache end at position `n`."""
        if n < self._state.next_cache_position:
            self._emit(Op.TRUNCATE, said, {"start": self._tape_at(n), "reason": reason})
        else:
            self._grow(Op.PREFILL, n, said)

    def _grow(self, op: Op, n: int, said: Said, *, computed: bool = False) -> None:
        """Rows up to cache position `n`; of a prefill that was not shown the reason is `before_log`."""
        at, start = self._state.next_cache_position, self._state.tape_length
        if n <= at:
            return
        more = n - at
        columns: dict[str, Any] = {"start": start, "stop": start + more, "n_tokens": more, "cache_start": at}
        if computed:
            columns["physical_prefill_tokens"] = more
        elif op is Op.PREFILL:
            columns["reason"] = "before_log"
        self._emit(op, said, columns)

    def _tape_at(self, cache_position: int) -> int:
        """The tape position of the first row at or behind a cache position."""
        for s in self._state.layout:
            if cache_position < s.cache_stop:
                return s.tape_start + max(0, cache_position - s.cache_start)
        return self._state.tape_length

    def _remove(self, start: int, stop: int, way: Way, reason: str, said: Said, detail: Mapping[str, Any]) -> None:
        """Evict the rows at cache positions [start, stop), one run at a time, from the back."""
        for s in reversed(self._state.layout):
            a, b = max(start, s.cache_start), min(stop, s.cache_stop)
            if a < b:
                first = s.tape_start + a - s.cache_start
                columns = {"start": first, "stop": first + b - a, "n_tokens": b - a, "cache_start": a}
                self._emit(Op.EVICT, said, {**columns, "way": way.value, "cold": False, "reason": reason}, detail)

    def _move(self, start: int, stop: int, delta: int, said: Said) -> None:
        moved = lay.rows_between(self._state.layout, start, stop)
        if moved:
            columns = {"start": start, "stop": stop, "delta": delta, "n_tokens": moved}
            self._emit(Op.SHIFT, said, columns)

    def _emit(self, op: Op, said: Said, columns: dict[str, Any], detail: Mapping[str, Any] | None = None) -> bool:
        """Fold the event and add it; one that cannot have happened is noted and left out."""
        if not self._state.opened:
            self._fold(Op.OPEN, {"n_tokens": self.facts["n_ctx"]} if "n_ctx" in self.facts else {})
            self._add(Op.OPEN, said, dict(self.facts), {})
        try:
            self._fold(op, columns)
        except IllegalEvent:
            self._contradiction()
            return False
        if op in (Op.PREFILL, Op.DECODE, Op.EVICT, Op.SHIFT, Op.TRUNCATE, Op.RESTORE):
            state = self._state
            columns = {
                **columns,
                "resident_tokens": state.resident_tokens,
                "resident_digest": state.resident.digest(),
                "layout_digest": lay.layout_digest(state.layout),
            }
        self._add(op, said, columns, {"line": self._source.line, **(detail or {})})
        return True

    def _fold(self, op: Op, columns: Mapping[str, Any]) -> None:
        typed = dict(columns)
        for name, kind in (("way", Way), ("placement", Placement)):
            if name in typed:
                typed[name] = kind(typed[name])
        state = self._state
        event = Event(
            run_id="",
            session_id=self.name,
            seq=state.next_seq,
            at_ns=0,
            op=op,
            turn=state.turn + (op is Op.PROMPT),
            generation=state.generation + (op in (Op.TRUNCATE, Op.RESTORE)),
            **typed,
        )
        self._state = apply(state, event)

    def _add(self, op: Op, said: Said, columns: Mapping[str, Any], detail: Mapping[str, Any]) -> None:
        known = {k: v for k, v in detail.items() if v is not None}
        self._out.append(
            Step(line=self._source.line, at_ns=said.at_ns or 0, session=self.name, op=op, columns=columns, detail=known)
        )

    def _set(self, index: int, **columns: Any) -> None:
        """Fill in columns of an event that waited for them; none of them is one the fold depends on."""
        step = self._out[index]
        self._out[index] = Step(
            line=step.line,
            at_ns=step.at_ns,
            session=step.session,
            op=step.op,
            columns={**step.columns, **columns},
            detail=step.detail,
        )

    def _contradiction(self) -> None:
        self._notes.warn("contradiction", self._source.name, self._source.line, _CONTRADICTS)
