"""One session on the reference: the `Backend` protocol over rows that are plain arrays.

Surgery keeps the survivors' rows as they were computed and turns the keys that move; a rebuild computes them anew from
nothing but their tokens. Both are what the formulas say, with no storage type, kernel or scheduler in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtape.backends.asked import check_layers
from kvtape.backends.books import Books
from kvtape.backends.errors import (
    ContextOverflow,
    FatalClass,
    InputRejected,
    StateRejected,
    UnsupportedOperation,
)
from kvtape.backends.mass_ledger import MassLedger
from kvtape.backends.protocol import AttentionMass, Choose, Computed, DecodeRun, Logits, Witness
from kvtape.backends.reference.session.core import SessionCore
from kvtape.backends.reference.session.mass import HeadSums, count
from kvtape.backends.saved_states import SavedBlock, SavedState
from kvtape.backends.token_ids import check_token, check_tokens
from kvtape.backends.verifying import Keep, Verified, check_kept, check_one_call, no_verifying_reason
from kvtape.planner.layout import Layout
from kvtape.planner.ranges import RangeSet

__all__ = ["ReferenceBackend"]


class ReferenceBackend(SessionCore):
    """See `protocol.Backend`. After each operation every layer's rows must be those of the books."""

    name = "reference"
    verify_margin = 0.0  # no row of a product depends on its company (`model.blas`)

    # -- computing ------------------------------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int], tape_start: int) -> Computed:
        """Compute `tokens` behind the last row. Raises ContextOverflow, InputRejected, Cancelled, EngineFault."""
        with self._operation(FatalClass.PREFILL_FAILED):
            ids = check_tokens(tokens, self.facts.n_vocab)
            self._check_room(len(ids))
            at = self._next_position
            books, sums = self._books.append(tokens, tape_start, at), self._sums()
            with self._undone_on_error(at, at + len(ids)):
                computed = self._computed(self._rows, ids, at, sums)
                self._settle(books, FatalClass.PREFILL_FAILED)
            self._count(sums, len(ids))
            return computed

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        """One forward a token. Whatever is raised, by `choose` too, the state is that of the start."""
        with self._operation(FatalClass.DECODE_FAILED):
            if n < 0:
                raise InputRejected(f"cannot decode {n} tokens")
            room = min(limit, self.n_ctx) - self._books.n_rows
            at, sums = self._next_position, self._sums()
            done: list[int] = []
            with self._undone_on_error(at, at + n):
                while len(done) < min(n, room):
                    token = choose(logits)
                    if token is None:
                        break
                    ids = check_token(token, self.facts.n_vocab)
                    logits = self._computed(self._rows, ids, at + len(done), sums).logits
                    done.append(int(token))
                books = self._books.append(done, tape_start, at) if done else self._books
                self._settle(books, FatalClass.DECODE_FAILED)
            self._count(sums, len(done))
            stopped: Literal["n", "limit", "chosen_none"] = "n" if len(done) == n else "limit"
            if len(done) < min(n, room):
                stopped = "chosen_none"
            return DecodeRun(tuple(done), logits, len(done), stopped)

    def verify_refusal(self) -> str | None:
        """See `verifying.Verifier`."""
        return no_verifying_reason(self.capabilities, self.refusal)

    def verify(self, tokens: Sequence[int], tape_start: int, keep: Keep) -> Verified:
        """All of `tokens` in one forward, their logits from its rows; the rows of those that `keep` gives up go."""
        with self._operation(FatalClass.DECODE_FAILED):
            if (why := self.verify_refusal()) is not None:
                raise UnsupportedOperation("verify", why)
            ids = check_tokens(tokens, self.facts.n_vocab)
            check_one_call(len(ids), self.config.chunk)
            self._check_room(len(ids))
            at = self._next_position
            self._books.append(tokens, tape_start, at)
            with self._undone_on_error(at, at + len(ids)):
                self._raise_if_cancelled()
                each = np.stack([self._logits(row[None]) for row in self._surgery.compute_each(ids, at)])
                kept = check_kept(keep(each), len(ids))
                if kept < len(ids):
                    self._surgery.remove(at + kept, at + len(ids))
                books = self._books.append(tokens[:kept], tape_start, at) if kept else self._books
                self._settle(books, FatalClass.DECODE_FAILED)
            return Verified.of(kept, each, 1)

    def refill(self, tokens: Sequence[int], start: int, cache_start: int) -> Computed:
        """Compute evicted tokens into their place: they see the rows before it, wherever those came from."""
        with self._operation(FatalClass.PREFILL_FAILED):
            self._gates.require("refill", "recompute_range")
            ids = check_tokens(tokens, self.facts.n_vocab)
            self._check_room(len(ids))
            books, sums = self._books.append(tokens, start, cache_start), self._sums()
            with self._undone_on_error(cache_start, cache_start + len(ids)):
                computed = self._computed(self._rows, ids, cache_start, sums)
                self._settle(books, FatalClass.PREFILL_FAILED)
            self._count(sums, len(ids))
            return computed

    def rebuild(self, ranges: RangeSet, tokens: Sequence[int]) -> Computed:
        """The survivors computed anew beside the rows of now, which go once that is done."""
        with self._operation(FatalClass.PREFILL_FAILED):
            rows, books, sums = self._rows.fresh(), Books(), self._sums()
            computed = Computed(np.empty(0, np.float32), 0, 0)
            if ranges or tokens:
                ids = check_tokens(tokens, self.facts.n_vocab)
                if len(ids) != ranges.n_tokens:
                    raise InputRejected(f"{len(ids)} tokens for ranges of {ranges.n_tokens}")
                if len(ids) > self.n_ctx:
                    raise ContextOverflow(len(ids), self.n_ctx, "a rebuild must fit the context")
                books = Books.ranked(ranges, tokens)
                computed = self._computed(rows, ids, 0, sums)
            self._carrier = rows
            self._settle(books, FatalClass.PREFILL_FAILED)
            self._forget_attention()
            self._count(sums, computed.tokens)
            return computed

    # -- surgery --------------------------------------------------------------------------------------------------

    def truncate(self, tape_stop: int) -> None:
        """Remove every row at or past `tape_stop`; all rows can be removed whatever carries them."""
        with self._operation(FatalClass.STREAM_NOT_REVERSIBLE):
            if tape_stop < 0:
                raise InputRejected(f"cannot truncate at {tape_stop}")
            self._remove("truncate", self._books.cut(tape_stop))

    def evict(self, start: int, stop: int) -> None:
        """Remove one run of rows; the others keep their positions, their bytes are not touched."""
        with self._operation(FatalClass.STREAM_NOT_REVERSIBLE):
            self._gates.require("evict", "remove_middle")
            self._books.cache_start_of(start, stop)
            self._remove("evict", self._books.remove(start, stop))

    def _remove(self, operation: str, books: Books) -> None:
        """Take out the rows that `books` no longer has."""
        kept = books.cache_positions()
        gone = np.setdiff1d(self._books.cache_positions(), kept)
        if not len(gone):
            return
        if not len(kept):
            self._carrier = self._rows.fresh()
        else:
            self._gates.require(operation, "remove_tail" if gone[0] > kept[-1] else "remove_middle")
            for run in np.split(gone, np.flatnonzero(np.diff(gone) > 1) + 1):
                self._surgery.remove(int(run[0]), int(run[-1]) + 1)
        self._settle(books, FatalClass.STREAM_NOT_REVERSIBLE)

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        """Move rows, their keys turned, under any rotation that a model may have."""
        with self._operation(FatalClass.STREAM_NOT_REVERSIBLE):
            self._gates.require("shift", "position_shift")
            books = self._books.shift(cache_start, cache_stop, delta)
            if delta:
                self._surgery.move(cache_start, cache_stop, delta)
                self._settle(books, FatalClass.STREAM_NOT_REVERSIBLE)

    # -- saved states ---------------------------------------------------------------------------------------------

    def export_block(self, start: int, stop: int) -> bytes:
        """The rows of one run and their tokens in an envelope."""
        with self._operation(FatalClass.STREAM_NOT_REVERSIBLE):
            self._gates.require("export_block", "cold_store")
            at = self._books.cache_start_of(start, stop)
            self._settle(self._books, FatalClass.STREAM_NOT_REVERSIBLE)
            payload = self._surgery.export(at, at + stop - start)
            return self._codec.pack_block(SavedBlock(start, at, self._books.tokens_of(start, stop), payload))

    def admit(self, block: bytes, start: int, cache_start: int) -> None:
        with self._operation(FatalClass.STATE_RESTORE_FAILED):
            self._gates.require("admit", "cold_store")
            saved = self._codec.open_block(block)
            if saved.start != start:
                raise StateRejected(f"saved block begins at tape position {saved.start}, not {start}")
            self._check_room(len(saved.tokens))
            books = self._books.append(saved.tokens, start, cache_start)
            self._surgery.admit(saved.payload, saved.cache_start, len(saved.tokens), cache_start)
            self._settle(books, FatalClass.STATE_RESTORE_FAILED)

    def snapshot(self) -> bytes:
        with self._operation(FatalClass.STATE_RESTORE_FAILED):
            self._settle(self._books, FatalClass.STATE_RESTORE_FAILED)
            return self._codec.pack_state(SavedState(self._books, self._rows.save()))

    def restore(self, snapshot: bytes) -> None:
        """Everything by the snapshot's, at once: a saved state that is refused changes nothing."""
        with self._operation(FatalClass.STATE_RESTORE_FAILED):
            saved = self._codec.open_state(snapshot)
            if saved.books.n_rows > self.n_ctx:
                raise StateRejected(f"the snapshot holds {saved.books.n_rows} rows, the context {self.n_ctx}")
            self._carrier = self._rows.loaded(saved.payload, saved.books.cache_positions())
            self._settle(saved.books, FatalClass.STATE_RESTORE_FAILED)
            self._forget_attention()

    # -- attention ------------------------------------------------------------------------------------------------

    def score(self, tokens: Sequence[int], tape_start: int, layers: Sequence[int] | None = None) -> AttentionMass:
        """The tokens stand where `tape_start` stands if it is resident, else behind the rows before it."""
        with self._operation(FatalClass.PREFILL_FAILED):
            self._gates.require("score", "attention_scores")
            ids = check_tokens(tokens, self.facts.n_vocab)
            shape = self._weights.architecture.shape
            chosen = check_layers(layers, shape.n_layer)
            if tape_start < 0:
                raise InputRejected(f"cannot score at tape position {tape_start}")
            before = self._books.cut(tape_start)
            if before.n_rows + len(ids) > self.n_ctx:
                raise ContextOverflow(before.n_rows + len(ids), self.n_ctx, "the scored tokens do not fit")
            sums = HeadSums(shape.n_head, shape.n_head_kv, chosen)
            self._raise_if_cancelled()
            self._surgery.probe(ids, self._books.place_of(tape_start), before.cache_positions(), sums)
            ledger = MassLedger(chosen)
            count(ledger, sums, before, len(ids))
            return ledger.mass(before.tape_positions())

    def take_mass(self) -> AttentionMass:
        """Queries of refills and rebuilds count too, those of probes and of what was cancelled do not.

        A row that leaves loses its mass for good: one that is admitted or refilled begins at zero, and in a rebuild or
        a restore all do. A shift changes nothing.
        """
        with self._operation(FatalClass.STREAM_NOT_REVERSIBLE):
            self._gates.require("take_mass", "attention_scores")
            assert self._ledger is not None
            taken = self._ledger.mass(self._books.tape_positions())
            self._ledger.clear()
            return taken

    # -- looking --------------------------------------------------------------------------------------------------

    def books(self) -> Layout:
        """The backend's own account."""
        self._require_usable()
        return self._books.layout

    def witness(self) -> Witness:
        """Copies of what attention reads. Raises UnsupportedOperation where a KV engine keeps no rows."""
        self._require_usable()
        positions: npt.NDArray[np.int64]
        positions, rows = self._rows.witness(self._books.cache_positions())
        return Witness(positions, "engine" if self.capabilities.remove_middle else "books", rows)

    def kv_bytes(self) -> dict[str, int]:
        self._require_usable()
        return {"resident": self._rows.resident_bytes, "allocated": self._rows.allocated_bytes}
