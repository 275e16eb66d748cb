"""What every operation of a session needs: the context, the guards, the books that the engine must agree with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvtape.backends.asked import CONTEXT_PADDING
from kvtape.backends.books import Books
from kvtape.backends.errors import (
    ContextOverflow,
    EngineFault,
    FatalClass,
    SessionClosed,
    UnsupportedOperation,
)
from kvtape.backends.llama.attention import AttentionTap, TapError
from kvtape.backends.llama.context import NativeContext
from kvtape.backends.llama.decoder import Decoder
from kvtape.backends.llama.gates import NO_SCORES, KeyStore, gates_of, memory_facts, no_scores_reason
from kvtape.backends.llama.mass import AttentionRecord
from kvtape.backends.llama.memory import LiveMemory, MemoryFault
from kvtape.backends.llama.native import NativeModel
from kvtape.backends.llama.options import context_params, parse_llama_options
from kvtape.backends.llama.proof import prove
from kvtape.backends.llama.sizes import CacheBytes
from kvtape.backends.llama.spread import RowReader
from kvtape.backends.llama.states import StateCodec
from kvtape.backends.protocol import KvRows, ModelFacts, SessionConfig
from kvtape.backends.rounding import ROUNDING
from kvtape.capacity.model import ModelShape

__all__ = ["SessionCore"]


class SessionCore:
    """Opens the context, proves its abilities, and guards every operation of `LlamaBackend`."""

    def __init__(
        self, model: NativeModel, shape: ModelShape, facts: ModelFacts, config: SessionConfig, engine_version: str
    ) -> None:
        options = parse_llama_options(config.options)
        params = context_params(config, options, shape)
        self.engine_version = engine_version
        self.facts = facts
        self._shape = shape
        self._memory_facts = memory_facts(model)
        tap, no_scores = self._open_tap() if options.scores else (None, NO_SCORES)
        self._context = NativeContext(model, params, tap)
        self.config = config = replace(config, flash_attention=self._context.flash_attention)
        self.n_ctx = self._context.n_ctx - CONTEXT_PADDING
        words = self._context.words
        self._bytes = CacheBytes(shape, params, words.allocated_bytes)
        self._memory = LiveMemory(self._context, self._memory_facts)
        self._rows = RowReader(words, shape)
        self._decoder = Decoder(self._context, config.chunk)
        self._codec = StateCodec(facts.fingerprint, engine_version, config, self.n_ctx, swa_full=options.swa_full)
        self._books = Books()
        self._attention: AttentionRecord | None = None
        if tap is not None:
            self._attention = AttentionRecord(tap, self._memory, self._context.n_ctx, shape.n_layer)
        self._fault: EngineFault | None = None
        self.closed = False
        gates = gates_of(
            self._memory_facts,
            keys=KeyStore(
                config.kv_type_k,
                spread=bool(words.spread_keys) and all(words.spread_keys),
                whole_heads=shape.rope_dims == shape.head_dim_k,
                shift_narrow=options.shift_quantised,
            ),
            cold_budget=config.cold_budget_tokens,
            can_shift=self._context.can_shift,
            no_scores=no_scores,
        )
        try:
            self._gates = prove(
                gates,
                self._memory_facts,
                self._memory,
                self._decoder,
                facts.n_vocab,
                self._attention,
                rounding=max(ROUNDING[config.kv_type_k], ROUNDING[config.kv_type_v]),
            )
        except BaseException:
            self.close()
            raise
        self.capabilities = self._gates.capabilities
        if not self.capabilities.attention_scores:
            self._attention = None

    def refusal(self, operation: str) -> str | None:
        """Why this capability is false; None where it is true. Raises UsageError for a name that is none."""
        return self._gates.refusal(operation)

    def close(self) -> None:
        """Free the native context. Idempotent, and the one thing allowed after a fault."""
        self.closed = True
        self._context.close()

    def _open_tap(self) -> tuple[AttentionTap | None, str | None]:
        """A tap, or None and why there is none."""
        reason = no_scores_reason(self._memory_facts)
        if reason is not None:
            return None, reason
        try:
            return AttentionTap(), None
        except TapError as err:
            return None, str(err)

    def _require_usable(self) -> None:
        if self.closed:
            raise SessionClosed("the session's native context was closed")
        if self._fault is not None:
            raise self._fault

    @contextmanager
    def _operation(self, failure: FatalClass) -> Iterator[None]:
        """Refuse when closed or failed; remember the first failure, whatever found it."""
        self._require_usable()
        try:
            yield
        except MemoryFault as err:
            self._fault = EngineFault(failure, str(err))
            raise self._fault from err
        except EngineFault as err:
            self._fault = err
            raise

    @contextmanager
    def _undone_on_error(self, at: int, *, keep: bool = False) -> Iterator[None]:
        """Bring back the rows of now when the body raises anything but a failure of the engine.

        In one plain cache the rows from `at` on are removed, unless `keep` asks for a copy of all; other memories lose
        rows while they compute and always need the copy. Pending shifts are applied first: what may be stopped must not
        rotate keys.
        """
        self._memory.flush()
        before = self._books
        copy: bytes | None = None
        if keep or self._memory_facts.kind != "plain":
            copy = self._memory.save() if self._books.n_rows else b""
        try:
            yield
        except (EngineFault, MemoryFault):
            raise
        except BaseException:
            if copy is None:
                self._memory.remove(at, -1)
            else:
                self._memory.load(copy)
            self._settle(before)
            raise

    @contextmanager
    def _scratch_dropped_on_error(self) -> Iterator[None]:
        """Empty the scratch sequence when the body raises anything but a failure of the engine."""
        try:
            yield
        except (EngineFault, MemoryFault):
            raise
        except BaseException:
            self._memory.drop_scratch()
            raise

    def _settle(self, books: Books) -> None:
        """Take the books over once the engine's memory agrees with them."""
        self._memory.confirm(books.cache_positions())
        self._books = books
        if self._attention is not None:
            self._attention.retain(books)

    def _fold_attention(self) -> None:
        """Before cells move or become free: attention counted by cell is put down by tape position."""
        if self._attention is not None:
            self._attention.fold(self._books)

    def _forget_attention(self) -> None:
        """All rows were replaced."""
        if self._attention is not None:
            self._attention.forget()

    @contextmanager
    def _counting_attention(self) -> Iterator[None]:
        if self._attention is None:
            yield
            return
        with self._attention.counting():
            yield

    def _check_room(self, n_tokens: int) -> None:
        needed = self._books.n_rows + n_tokens
        if needed > self.n_ctx:
            raise ContextOverflow(needed, self.n_ctx, "evict first, or open the session with a larger n_ctx")

    def _remove(self, operation: str, books: Books) -> None:
        """Take out the rows that `books` no longer has."""
        kept = books.cache_positions()
        gone = np.setdiff1d(self._books.cache_positions(), kept)
        if not len(gone):
            return
        self._fold_attention()
        if not len(kept):
            self._memory.clear()
            self._settle(books)
            return
        if gone[-1] > kept[-1]:
            self._gates.require(operation, "remove_tail")
            self._check_window(operation, int(kept[-1]) + 1)
        if gone[0] < kept[-1]:
            self._gates.require(operation, "remove_middle")
        for start, stop in _runs(gone):
            self._memory.remove(start, stop)
        self._settle(books)

    def _check_window(self, operation: str, next_position: int) -> None:
        """Raise UnsupportedOperation when a token at `next_position` would miss rows in a windowed layer.

        A windowed cache may use the place of a row that has left the window, even where it keeps all it can.
        """
        if self._memory_facts.kind != "windowed":
            return
        rows = self._books.cache_positions()
        seen = rows[(rows < next_position) & (rows > next_position - self._memory_facts.window)]
        if missing := len(np.setdiff1d(seen, self._memory.windowed_positions())):
            why = f"{missing} rows in the window before cache position {next_position} were overwritten"
            raise UnsupportedOperation(operation, f"{why}; rebuild instead")

    def _no_rows(self) -> KvRows:
        if self._memory_facts.kind == "windowed":
            return KvRows((), ())
        shape = self._shape
        dtypes = {"f16": np.float16}
        keys, values = (
            np.zeros((0, shape.n_head_kv * width), dtypes.get(kv_type, np.float32))
            for width, kv_type in ((shape.head_dim_k, self.config.kv_type_k), (shape.head_dim_v, self.config.kv_type_v))
        )
        return KvRows((keys,) * shape.n_layer, () if self._memory_facts.latent else (values,) * shape.n_layer)


def _runs(positions: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Half-open runs of ascending positions, the last run first."""
    parts = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in reversed(parts)]
