"""One llama.cpp session: the `Backend` protocol over a native context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from kvtape.backends.books import Books
from kvtape.backends.errors import (
    ContextOverflow,
    FatalClass,
    InputRejected,
    StateRejected,
    UnsupportedOperation,
)
from kvtape.backends.llama.attention import CellSums
from kvtape.backends.llama.context import LIVE, SCRATCH
from kvtape.backends.llama.drafts import DraftCore
from kvtape.backends.llama.mass import mass_of
from kvtape.backends.protocol import AttentionMass, Choose, Computed, DecodeRun, Logits, Witness
from kvtape.backends.saved_states import SavedBlock, SavedState
from kvtape.backends.token_ids import check_token, check_tokens
from kvtape.planner.layout import Layout
from kvtape.planner.ranges import RangeSet

__all__ = ["LlamaBackend"]


class LlamaBackend(DraftCore):
    """See `protocol.Backend`. Sequence 0 holds the session; every export, import and refill passes the scratch one.

    After each operation the engine's own positions are read and must be those of the books.
    """

    name = "llama"

    # -- computing ------------------------------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int], tape_start: int) -> Computed:
        """Compute `tokens` behind the last row. Raises ContextOverflow, InputRejected, Cancelled, EngineFault."""
        with self._operation(FatalClass.PREFILL_FAILED):
            ids = check_tokens(tokens, self.facts.n_vocab)
            self._check_room(len(ids))
            at = self._memory.next_position
            books = self._books.append(tokens, tape_start, at)
            with self._undone_on_error(at), self._counting_attention():
                computed = self._decoder.run(ids, at, LIVE, FatalClass.PREFILL_FAILED)
                self._settle(books)
            return computed

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        """One engine call a token. Whatever is raised, by `choose` too, the state is that of the start."""
        with self._operation(FatalClass.DECODE_FAILED):
            if n < 0:
                raise InputRejected(f"cannot decode {n} tokens")
            room = min(limit, self.n_ctx) - self._books.n_rows
            at = self._memory.next_position
            done: list[int] = []
            with self._undone_on_error(at), self._counting_attention():
                while len(done) < min(n, room):
                    token = choose(logits)
                    if token is None:
                        break
                    ids = check_token(token, self.facts.n_vocab)
                    logits = self._decoder.run(ids, at + len(done), LIVE, FatalClass.DECODE_FAILED).logits
                    done.append(int(token))
                self._settle(self._books.append(done, tape_start, at) if done else self._books)
            stopped: Literal["n", "limit", "chosen_none"] = "n" if len(done) == n else "limit"
            if len(done) < min(n, room):
                stopped = "chosen_none"
            return DecodeRun(tuple(done), logits, len(done), stopped)

    def refill(self, tokens: Sequence[int], start: int, cache_start: int) -> Computed:
        """Compute evicted tokens in the scratch sequence, which shares the rows below `cache_start`, and adopt them.

        The row at `cache_start - 1` must be resident, unless none is below: the engine computes only at the position
        behind a sequence's last.
        """
        with self._operation(FatalClass.PREFILL_FAILED):
            self._gates.require("refill", "recompute_range")
            ids = check_tokens(tokens, self.facts.n_vocab)
            self._check_room(len(ids))
            books = self._books.append(tokens, start, cache_start)
            below = [s for s in self._books.layout if s.cache_start < cache_start]
            if below and below[-1].cache_stop != cache_start:
                why = f"the row at cache position {cache_start - 1} is not resident; refill a hole from its left end"
                raise UnsupportedOperation("refill", why)
            self._check_window("refill", cache_start)
            stop = cache_start + len(ids)
            self._fold_attention()
            self._memory.flush()
            self._memory.share(0, cache_start)
            with self._scratch_dropped_on_error(), self._counting_attention():
                computed = self._decoder.run(ids, cache_start, SCRATCH, FatalClass.PREFILL_FAILED)
            if self._attention is not None:
                self._attention.fold(books, SCRATCH)
            self._memory.adopt_staged(cache_start, stop)
            self._settle(books)
            return computed

    def rebuild(self, ranges: RangeSet, tokens: Sequence[int]) -> Computed:
        """Clear the cache and prefill the survivors, if any. When cancelled, the rows from before are put back."""
        with self._operation(FatalClass.PREFILL_FAILED):
            self._fold_attention()
            if not ranges and not tokens:
                self._memory.clear()
                self._settle(Books())
                return Computed(np.empty(0, np.float32), 0, 0)
            ids = check_tokens(tokens, self.facts.n_vocab)
            if len(ids) != ranges.n_tokens:
                raise InputRejected(f"{len(ids)} tokens for ranges of {ranges.n_tokens}")
            if len(ids) > self.n_ctx:
                raise ContextOverflow(len(ids), self.n_ctx, "a rebuild must fit the context")
            books = Books.ranked(ranges, tokens)
            with self._undone_on_error(0, keep=True):
                self._decoder.raise_if_cancelled()
                self._memory.clear()
                with self._counting_attention():
                    computed = self._decoder.run(ids, 0, LIVE, FatalClass.PREFILL_FAILED)
                    self._forget_attention()
                self._settle(books)
            return computed

    # -- surgery --------------------------------------------------------------------------------------------------

    def truncate(self, tape_stop: int) -> None:
        """Remove every row at or past `tape_stop`; removing all rows works on every memory."""
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

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        """Move rows; positions change now, keys are rotated before anything reads or uses them."""
        with self._operation(FatalClass.STREAM_NOT_REVERSIBLE):
            self._gates.require("shift", "position_shift")
            books = self._books.shift(cache_start, cache_stop, delta)
            if delta:
                self._fold_attention()
                self._memory.shift(cache_start, cache_stop, delta)
                self._settle(books)

    # -- saved states ---------------------------------------------------------------------------------------------

    def export_block(self, start: int, stop: int) -> bytes:
        """The rows of one run and their tokens in an envelope."""
        with self._operation(FatalClass.STREAM_NOT_REVERSIBLE):
            self._gates.require("export_block", "cold_store")
            at = self._books.cache_start_of(start, stop)
            payload = self._memory.export(at, at + stop - start)
            return self._codec.pack_block(SavedBlock(start, at, self._books.tokens_of(start, stop), payload))

    def admit(self, block: bytes, start: int, cache_start: int) -> None:
        """Import into the scratch sequence, check, move, and only then give the rows to the session."""
        with self._operation(FatalClass.STATE_RESTORE_FAILED):
            self._gates.require("admit", "cold_store")
            saved = self._codec.open_block(block)
            if saved.start != start:
                raise StateRejected(f"saved block begins at tape position {saved.start}, not {start}")
            delta = cache_start - saved.cache_start
            if delta:
                self._gates.require("admit at another cache position", "position_shift")
            n = len(saved.tokens)
            self._check_room(n)
            books = self._books.append(saved.tokens, start, cache_start)
            self._fold_attention()
            self._memory.stage(saved.payload, saved.cache_start, saved.cache_start + n)
            self._memory.move_staged(saved.cache_start, saved.cache_start + n, delta)
            self._memory.adopt_staged(cache_start, cache_start + n)
            self._settle(books)

    def snapshot(self) -> bytes:
        """The whole state. The live cache is first put into the form a restore gives, so that both go on alike."""
        with self._operation(FatalClass.STATE_RESTORE_FAILED):
            self._gates.require("snapshot", "snapshot_state")
            payload = b""
            self._fold_attention()
            if self._books.n_rows:
                payload = self._memory.in_position_order(self._memory.save())
            self._memory.load(payload)
            self._settle(self._books)
            return self._codec.pack_state(SavedState(self._books, payload))

    def restore(self, snapshot: bytes) -> None:
        """Replace everything by a snapshot. A refusal by the engine, with the cache already cleared, is fatal."""
        with self._operation(FatalClass.STATE_RESTORE_FAILED):
            self._gates.require("restore", "snapshot_state")
            saved = self._codec.open_state(snapshot)
            self._memory.load(saved.payload)
            self._forget_attention()
            self._settle(saved.books)

    # -- attention ------------------------------------------------------------------------------------------------

    def score(self, tokens: Sequence[int], tape_start: int, layers: Sequence[int] | None = None) -> AttentionMass:
        """Compute `tokens` in the scratch sequence, which shares the rows before `tape_start`, and empty it again.

        They stand where the row of `tape_start` does, or behind the last of the rows before it: the engine computes
        only at the position behind a sequence's last. Where a hole lies between those two, the queries cannot stand
        where they stood: UnsupportedOperation.
        """
        with self._operation(FatalClass.PREFILL_FAILED):
            self._gates.require("score", "attention_scores")
            record = self._attention
            assert record is not None
            ids = check_tokens(tokens, self.facts.n_vocab)
            if tape_start < 0:
                raise InputRejected(f"cannot score at tape position {tape_start}")
            sums = CellSums(record.n_cells, _chosen(layers, record.layers))
            if self._books.n_rows + len(ids) > record.n_cells:
                why = "a probe needs places beside the resident rows; use a shorter one"
                raise ContextOverflow(self._books.n_rows + len(ids), record.n_cells, why)
            before = self._books.cut(tape_start)
            at = self._books.place_behind(tape_start)
            books = before.append(tokens, tape_start, at)
            self._memory.flush()
            with self._scratch_dropped_on_error():
                for s in before.layout:
                    self._memory.share(s.cache_start, s.cache_stop)
                with record.tap.collect(sums):
                    self._decoder.run(ids, at, SCRATCH, FatalClass.PREFILL_FAILED)
                mass = mass_of(sums, books, before.tape_positions(), self._memory, SCRATCH)
            self._memory.drop_scratch()
            self._settle(self._books)
            return mass

    def take_mass(self) -> AttentionMass:
        """Every query that was computed counts, those of refills and rebuilds too, but not those of probes and of
        operations that were cancelled.

        A row that leaves loses its mass for good: one that is admitted or refilled begins at zero, and after a rebuild
        or a restore all do. A shift changes nothing.
        """
        with self._operation(FatalClass.STREAM_NOT_REVERSIBLE):
            self._gates.require("take_mass", "attention_scores")
            assert self._attention is not None
            return self._attention.take(self._books)

    # -- looking --------------------------------------------------------------------------------------------------

    def books(self) -> Layout:
        """The backend's own account."""
        self._require_usable()
        return self._books.layout

    def witness(self) -> Witness:
        """Positions and rows from the engine's memory; of a windowed model the layers with full attention.

        f16 rows are given as float16, all others as float32, packed ones as the numbers they stand for. Raises
        UnsupportedOperation for recurrent and hybrid memories.
        """
        with self._operation(FatalClass.STREAM_NOT_REVERSIBLE):
            if self._memory_facts.kind in ("recurrent", "hybrid"):
                why = f"a {self._memory_facts.kind} memory has no row for each token"
                raise UnsupportedOperation("witness", why)
            if not self._books.n_rows:
                self._memory.confirm(self._books.cache_positions())
                return Witness(np.zeros(0, np.int64), "engine", self._no_rows())
            cache = self._memory.read()
            return Witness(cache.positions.astype(np.int64), "engine", self._rows.read(cache))

    def kv_bytes(self) -> dict[str, int]:
        """`resident`: of the rows in use, windowed layers' last window, the recurrent state.

        `allocated`: of the caches as created, scratch room included.
        """
        self._require_usable()
        return {"resident": self._bytes.resident(self._books), "allocated": self._bytes.allocated}

    def cancel(self) -> None:
        """Stop the running computation, or the next one before it begins. From any thread."""
        self._decoder.cancel()

    def abort_next(self) -> None:
        """Fault injection: the engine's own abort callback fires in the next decode, with no cancel asked for.

        That decode really fails inside the engine, and the session must treat it as any other failure.
        """
        self._require_usable()
        self._decoder.abort_next()


def _chosen(layers: Sequence[int] | None, known: frozenset[int]) -> frozenset[int]:
    """The layers asked for. Raises InputRejected for none, or one that the model does not have."""
    chosen = known if layers is None else frozenset(layers)
    if not chosen or not chosen <= known:
        raise InputRejected(f"layers {sorted(chosen)}: choose from 0 to {max(known)}")
    return chosen
