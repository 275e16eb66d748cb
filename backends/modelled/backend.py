"""`ModelledBackend`: `protocol.Backend` over books alone. It keeps positions, computes nothing, and takes time.

The Session, the planner and the events are those of a live run; what an operation costs comes from a `CostModel`,
and the time passes on a `Timeline`. Logits are empty: whoever decodes chooses the tokens. A decode costs one price
for all its tokens, however many there are. Attention scores come from an `Attention`, or there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

import numpy as np

from kvtape.backends.errors import (
    Cancelled,
    ContextOverflow,
    InputRejected,
    SessionClosed,
    StateRejected,
    UnsupportedOperation,
    UsageError,
)
from kvtape.backends.modelled.attention import Attention
from kvtape.backends.modelled.blob import pack, unpack
from kvtape.backends.modelled.shape import Shape
from kvtape.backends.modelled.work import CostModel, Timeline, Work, WorkKind
from kvtape.backends.protocol import AttentionMass, Choose, Computed, DecodeRun, Logits, Witness
from kvtape.backends.verifying import Keep, Verified, check_kept, check_one_call, no_verifying_reason
from kvtape.planner import layout as lay
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.layout import Layout, Segment
from kvtape.planner.ranges import RangeSet

__all__ = ["ModelledBackend"]

_NO_LOGITS: Final = np.empty(0, np.float32)


class ModelledBackend:
    """One modelled session. Everything is checked before any time passes, and a refused operation takes none."""

    name = "modelled"
    engine_version = "1"
    verify_margin = 0.0

    def __init__(self, shape: Shape, costs: CostModel, timeline: Timeline, attention: Attention | None = None) -> None:
        if shape.capabilities.attention_scores and attention is None:
            raise UsageError("a modelled engine computes no attention: it has attention_scores only from a recording")
        self.facts = shape.facts
        self.config = shape.config
        self.n_ctx = shape.n_ctx
        self.capabilities = shape.capabilities
        self._shape, self._costs, self._time, self._attention = shape, costs, timeline, attention
        self._layout: Layout = ()
        self._rows = 0
        self._turned = 0
        self._cancelled = self._closed = False

    def refusal(self, operation: str) -> str | None:
        """See `protocol.Backend`; raises UsageError for a name that is no capability."""
        if operation not in Capabilities.__dataclass_fields__:
            raise UsageError(f"{operation!r} is no capability")
        if getattr(self.capabilities, operation):
            return None
        return f"the session that is modelled ({self._shape.stands_for}) has no {operation}"

    # -- computing ------------------------------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int], tape_start: int) -> Computed:
        self._begin()
        n = len(tokens)
        self._check_computing(tokens, n)
        grown = self._with_rows(tape_start, n, lay.next_cache_position(self._layout))
        return self._compute("prefill", grown, n, RangeSet([(tape_start, tape_start + n)]))

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        """As the protocol says, with `choose` asked for all tokens first and their time taken at once."""
        self._begin()
        if n < 0:
            raise InputRejected(f"cannot decode {n} tokens")
        self._check_cancelled()
        room = max(0, min(limit, self.n_ctx) - self._rows)
        wanted = min(n, room)
        tokens = tuple(islice(iter(lambda: choose(logits), None), wanted))
        self._check_tokens(tokens)
        if tokens:
            at = lay.next_cache_position(self._layout)
            grown = self._with_rows(tape_start, len(tokens), at)
            self._pay("decode", len(tokens))
            self._attend(RangeSet([(tape_start, tape_start + len(tokens))]), self._layout)
            self._set(grown)
        if len(tokens) < wanted:
            return DecodeRun(tokens, _NO_LOGITS, len(tokens), "chosen_none")
        return DecodeRun(tokens, _NO_LOGITS, len(tokens), "limit" if wanted < n else "n")

    def verify_refusal(self) -> str | None:
        """See `verifying.Verifier`."""
        return no_verifying_reason(self.capabilities, self.refusal)

    def verify(self, tokens: Sequence[int], tape_start: int, keep: Keep) -> Verified:
        """As `verifying.Verifier` says, at the price of a prefill and a truncate. `keep` sees logits `[n, 0]`."""
        self._begin()
        if (why := self.verify_refusal()) is not None:
            raise UnsupportedOperation("verify", why)
        self._check_computing(tokens, len(tokens))
        check_one_call(len(tokens), self.config.chunk)
        at = lay.next_cache_position(self._layout)
        self._with_rows(tape_start, len(tokens), at)
        each = np.empty((len(tokens), 0), np.float32)
        kept = check_kept(keep(each), len(tokens))
        self._pay("prefill", len(tokens))
        if kept < len(tokens):
            self._pay("truncate", len(tokens) - kept)
        if kept:
            self._attend(RangeSet([(tape_start, tape_start + kept)]), self._layout)
            self._set(self._with_rows(tape_start, kept, at))
        return Verified(kept, _NO_LOGITS, 1)

    def refill(self, tokens: Sequence[int], start: int, cache_start: int) -> Computed:
        self._begin()
        self._need("refill", "recompute_range")
        self._check_computing(tokens, len(tokens))
        grown = self._with_rows(start, len(tokens), cache_start)
        computed = RangeSet([(start, start + len(tokens))])
        return self._compute("refill", grown, len(tokens), computed, self._behind(cache_start))

    def rebuild(self, ranges: RangeSet, tokens: Sequence[int]) -> Computed:
        self._begin()
        if ranges.n_tokens != len(tokens):
            raise InputRejected(f"{len(tokens)} tokens for ranges of {ranges.n_tokens}")
        if len(tokens) > self.n_ctx:
            raise ContextOverflow(len(tokens), self.n_ctx, "the survivors do not fit")
        self._check_tokens(tokens)
        self._check_cancelled()
        self._rows = self._turned = 0
        self._layout = ()
        if self._attention is not None:
            self._attention.cut(ranges.ranges[-1].stop if ranges else 0)
        return self._compute("rebuild", lay.rank_layout(ranges), len(tokens), ranges)

    def _compute(self, kind: WorkKind, grown: Layout, n: int, queries: RangeSet, behind: int = 0) -> Computed:
        if n:
            self._pay(kind, n, behind=behind)
        self._attend(queries, self._layout, again=kind != "prefill")
        self._set(grown)
        return Computed(_NO_LOGITS, -(-n // self.config.chunk), n)

    def _attend(self, queries: RangeSet, before: Layout, *, again: bool = False) -> None:
        if self._attention is not None:
            for r in queries:
                self._attention.computed(r.start, r.stop, before, again=again)
                before = lay.append(before, r.start, len(r), lay.next_cache_position(before))

    # -- surgery --------------------------------------------------------------------------------------------------

    def truncate(self, tape_stop: int) -> None:
        self._begin()
        if tape_stop < 0:
            raise InputRejected(f"cannot truncate at {tape_stop}")
        kept = lay.cut(self._layout, tape_stop)
        left = sum(s.length for s in kept)
        if left == self._rows:
            return
        gone = min(s.cache_start + max(0, tape_stop - s.tape_start) for s in self._layout if s.tape_stop > tape_stop)
        tail = lay.next_cache_position(kept) <= gone
        self._need("truncate", "remove_tail" if tail else "remove_middle")
        self._pay("truncate", self._rows - left)
        self._set(kept)
        if self._attention is not None:
            self._attention.cut(tape_stop)

    def evict(self, start: int, stop: int) -> None:
        self._begin()
        self._need("evict", "remove_middle")
        self._run(start, stop)
        self._pay("evict", stop - start)
        self._set(lay.remove(self._layout, start, stop))

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        self._begin()
        self._need("shift", "position_shift")
        try:
            moved = lay.shift(self._layout, cache_start, cache_stop, delta)
        except ValueError as err:
            raise InputRejected(f"rows at [{cache_start}, {cache_stop}) cannot move by {delta}: {err}") from None
        n = lay.rows_between(self._layout, cache_start, cache_stop)
        turned = self._turned
        self._turned = 0  # shifts add up: only what computes next rotates
        self._pay("shift", n)
        self._turned = min(self._rows, turned + n)
        self._set(moved)

    # -- saved states ---------------------------------------------------------------------------------------------

    def export_block(self, start: int, stop: int) -> bytes:
        self._begin()
        self._need("export_block", "cold_store")
        at = self._run(start, stop)
        blob = pack("block", (Segment(start, stop - start, at),), (stop - start) * self._shape.row_bytes)
        self._pay("export", stop - start, len(blob))
        return blob

    def admit(self, block: bytes, start: int, cache_start: int) -> None:
        self._begin()
        self._need("admit", "cold_store")
        (row,) = unpack("block", block)
        if row.tape_start != start:
            raise StateRejected(f"the block does not begin at tape position {start}")
        if cache_start != row.cache_start:
            self._need("admit at another cache position", "position_shift")
        grown = self._with_rows(start, row.length, cache_start)
        self._pay("admit", row.length, len(block), self._behind(cache_start))
        self._set(grown)

    def snapshot(self) -> bytes:
        self._begin()
        self._need("snapshot", "snapshot_state")
        blob = pack("snapshot", self._layout, self._rows * self._shape.row_bytes)
        self._pay("snapshot", self._rows, len(blob))
        return blob

    def restore(self, snapshot: bytes) -> None:
        self._begin()
        self._need("restore", "snapshot_state")
        layout = unpack("snapshot", snapshot)
        rows = sum(s.length for s in layout)
        if rows > self.n_ctx:
            raise StateRejected(f"the snapshot has {rows} rows, this session's context is {self.n_ctx}")
        self._pay("restore", rows, len(snapshot))
        self._turned = 0
        self._set(layout)

    # -- looking --------------------------------------------------------------------------------------------------

    def score(self, tokens: Sequence[int], tape_start: int, layers: Sequence[int] | None = None) -> AttentionMass:
        """As the protocol says, for the tape's last tokens; a probe is refused: nobody recorded what it looked at."""
        source = self._scores("score")
        self._check_computing(tokens, len(tokens))
        end = max((s.tape_stop for s in self._layout), default=0)
        if tape_start + len(tokens) != end:
            raise UnsupportedOperation("score", "a recording has the attention of what was on the tape, of no probe")
        measured = source.window(tape_start, end, layers, self._layout)
        self._pay("score", len(tokens))
        return measured

    def take_mass(self) -> AttentionMass:
        """As the protocol says."""
        measured = self._scores("take_mass").taken(self._layout)
        self._pay("score", 0)
        return measured

    def later_mass(self) -> AttentionMass:
        """See `protocol.Clairvoyant`. Takes no time: no engine could do it."""
        return self._scores("later_mass").later(self._layout)

    def witness(self) -> Witness:
        """Always refuses: there is no memory to read."""
        raise UnsupportedOperation("witness", "a modelled engine has no memory; replay on a real one")

    def books(self) -> Layout:
        self._begin()
        return self._layout

    def kv_bytes(self) -> dict[str, int]:
        self._begin()
        return {"resident": self._rows * self._shape.row_bytes, "allocated": self.n_ctx * self._shape.row_bytes}

    def cancel(self) -> None:
        self._cancelled = True

    def close(self) -> None:
        self._closed = True

    # -- the books ------------------------------------------------------------------------------------------------

    def _scores(self, operation: str) -> Attention:
        self._begin()
        self._need(operation, "attention_scores")
        assert self._attention is not None
        return self._attention

    def _begin(self) -> None:
        if self._closed:
            raise SessionClosed("this modelled session was closed; open another")

    def _behind(self, cache_start: int) -> int:
        return lay.rows_between(self._layout, cache_start, lay.next_cache_position(self._layout))

    def _pay(self, kind: WorkKind, tokens: int, n_bytes: int = 0, behind: int = 0) -> None:
        work = Work(kind, tokens, self._rows, n_bytes, self._turned, behind)
        ns = self._costs.cost_ns(work)
        if kind in ("export", "admit"):
            self._time.carry(ns, n_bytes)
        else:
            self._time.spend(ns)
        if kind not in ("truncate", "evict"):
            self._turned = 0

    def _set(self, layout: Layout) -> None:
        self._layout = layout
        self._rows = sum(s.length for s in layout)

    def _with_rows(self, tape_start: int, n: int, cache_start: int) -> Layout:
        if self._rows + n > self.n_ctx:
            raise ContextOverflow(self._rows + n, self.n_ctx, "the modelled context is full")
        try:
            return lay.append(self._layout, tape_start, n, cache_start)
        except ValueError as err:
            raise InputRejected(f"{n} rows from tape position {tape_start} at {cache_start}: {err}") from None

    def _run(self, start: int, stop: int) -> int:
        """Cache position of a resident run, contiguous in the cache."""
        at = lay.run_start(self._layout, start, stop)
        if at is None:
            raise InputRejected(f"[{start}, {stop}) is no run of resident rows")
        return at

    def _check_computing(self, tokens: Sequence[int], n: int) -> None:
        if not n:
            raise InputRejected("nothing to compute: give at least one token")
        self._check_tokens(tokens)
        self._check_cancelled()

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if tokens and (min(tokens) < 0 or max(tokens) >= self.facts.n_vocab):
            bad = next(t for t in tokens if not 0 <= t < self.facts.n_vocab)
            raise InputRejected(f"token {bad}: the vocabulary has ids 0 to {self.facts.n_vocab - 1}")

    def _check_cancelled(self) -> None:
        if self._cancelled:
            self._cancelled = False
            raise Cancelled("the modelled operation was cancelled")

    def _need(self, operation: str, capability: str) -> None:
        why = self.refusal(capability)
        if why is not None:
            raise UnsupportedOperation(operation, why)
