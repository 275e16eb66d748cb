"""Carrying one session's events out on one backend, tokens forced, logits kept where they are to be compared."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvtape.backends.protocol import Backend, Logits
from kvtape.planner.events import Event, Op
from kvtape.planner.ranges import RangeSet
from kvtape.planner.residency import ResidencyState
from kvtape.replay.checkpoints import Checkpoint
from kvtape.replay.findings import Finding, as_pairs
from kvtape.replay.lineage import LineageBuilder, rebuilds

__all__ = ["Performer"]


class Performer:
    """Executes events verbatim. `lineage` is stepped with each, so it always says what the backend should hold."""

    def __init__(
        self,
        backend: Backend,
        lineage: LineageBuilder,
        wanted: frozenset[Checkpoint],
        tokens: Mapping[int, tuple[int, ...]],
    ) -> None:
        self.logits: dict[Checkpoint, Logits] = {}
        self._backend, self._lineage, self._tokens = backend, lineage, tokens
        self._remove_tail = backend.capabilities.remove_tail
        self._cuts: dict[int, list[int]] = {}
        for seq, k in sorted(wanted):
            self._cuts.setdefault(seq, []).append(k)
        self._blobs: dict[int, bytes] = {}
        self._snapshots: dict[int, bytes] = {}
        self._last: Logits = np.zeros(backend.facts.n_vocab, np.float32)

    def perform(self, event: Event, before: ResidencyState, after: ResidencyState) -> list[Finding]:
        """Execute `event`. Raises what the backend raises; findings where it did other work than the event says."""
        self._export(event)
        self._lineage.step(event, after, self._tokens.get(event.seq))
        findings: list[Finding] = []
        if rebuilds(event, self._lineage.way, remove_tail=self._remove_tail):
            self._rebuild(after.resident)
        elif event.op == Op.PREFILL:
            self._prefill(event)
        elif event.op == Op.DECODE:
            findings = self._decode(event)
        else:
            self._move(event, before, after)
        alive = {b.block_id for b in after.cold}
        self._blobs = {i: blob for i, blob in self._blobs.items() if i in alive}
        return findings

    def _export(self, event: Event) -> None:
        if event.op == Op.EVICT and event.cold and self._lineage.way == "log":
            for ref in event.blocks or ():
                self._blobs[ref.block_id] = self._backend.export_block(ref.start, ref.stop)

    def _rebuild(self, resident: RangeSet) -> None:
        self._last = self._backend.rebuild(resident, self._lineage.tokens_of(resident)).logits

    def _prefill(self, event: Event) -> None:
        tokens = self._tokens[event.seq]
        done = 0
        for k in sorted({*self._cuts.get(event.seq, ()), len(tokens)}):
            self._last = self._backend.prefill(tokens[done:k], (event.start or 0) + done).logits
            self._keep(event, k, self._last)
            done = k

    def _decode(self, event: Event) -> list[Finding]:
        tokens = self._tokens[event.seq]
        done = 0

        def choose(logits: Logits) -> int | None:
            nonlocal done
            self._keep(event, done, logits)
            done += 1
            return tokens[done - 1]

        run = self._backend.decode_until(len(tokens), self._backend.n_ctx, event.start or 0, self._last, choose)
        self._keep(event, len(tokens), run.logits)
        self._last = run.logits
        if run.tokens == tokens:
            return []
        start = event.start or 0
        what = f"decode: {len(run.tokens)} tokens decoded ({run.stopped}), the log has {len(tokens)}"
        return [Finding(what, ((start, start + len(tokens)),), as_pairs(range(start, start + len(run.tokens))))]

    def _keep(self, event: Event, k: int, logits: Logits) -> None:
        if k in self._cuts.get(event.seq, ()):
            self.logits[event.seq, k] = np.array(logits, np.float32)

    def _move(self, event: Event, before: ResidencyState, after: ResidencyState) -> None:
        backend, start, stop = self._backend, event.start or 0, event.stop or 0
        native = self._lineage.way == "log"
        if event.op == Op.TRUNCATE and before.resident_tokens > after.resident_tokens:
            backend.truncate(start)
        elif event.op == Op.EVICT:
            backend.evict(start, stop)
        elif event.op == Op.SHIFT and native:
            backend.shift(start, stop, event.delta or 0)
        elif event.op == Op.ADMIT:
            backend.admit(self._blobs[event.block_id or 0], start, event.cache_start or 0)
        elif event.op == Op.RECOMPUTE:
            refilled = self._lineage.tokens_of(RangeSet([(start, stop)]))
            self._last = backend.refill(refilled, start, event.cache_start or 0).logits
        elif event.op == Op.SNAPSHOT:
            self._snapshots[event.snapshot_id or 0] = backend.snapshot()
        elif event.op == Op.RESTORE:
            backend.restore(self._snapshots[event.snapshot_id or 0])
