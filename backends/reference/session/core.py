"""What every operation of a session on the reference goes through: refusals, failures, books that are checked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvtape.backends.books import Books
from kvtape.backends.errors import (
    Cancelled,
    ContextOverflow,
    EngineFault,
    FatalClass,
    SessionClosed,
)
from kvtape.backends.mass_ledger import MassLedger
from kvtape.backends.protocol import Computed, Logits, ModelFacts
from kvtape.backends.reference.errors import BackendFailure, BackendUnavailable, InvariantViolation, StateInvalidated
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.dispatch import served_logits
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.tokens import Ids
from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.reference.session.carrier import Carrier, WatchedFfn
from kvtape.backends.reference.session.engine_rows import EngineRows
from kvtape.backends.reference.session.gates import gates_of
from kvtape.backends.reference.session.mass import HeadSums, count
from kvtape.backends.reference.session.options import Resolved
from kvtape.backends.reference.session.resident_rows import ResidentRows
from kvtape.backends.reference.session.saved import StateCodec
from kvtape.planner.layout import next_cache_position

__all__ = ["SessionCore"]

_COMPUTING = frozenset({FatalClass.PREFILL_FAILED, FatalClass.DECODE_FAILED})


class SessionCore:
    """The carrier of the rows, the books, the attention that was counted, and the one failure that ends it all."""

    def __init__(self, weights: Weights, facts: ModelFacts, asked: Resolved, version: str) -> None:
        engine, arch = asked.options.engine, weights.architecture
        self.engine_version = version
        self.facts = facts
        self.config = asked.config
        self.n_ctx = asked.n_ctx
        self.closed = False
        self._gates = gates_of(
            arch, engine=engine.spec, cold_budget=asked.config.cold_budget_tokens, scores=asked.options.scores
        )
        self.capabilities = self._gates.capabilities
        self._weights = weights
        self._stop = threading.Event()
        self._router = WatchedFfn(LocalFfn(weights), arch.n_layer, self._raise_if_cancelled)
        self._carrier: Carrier | None = (
            ResidentRows(weights, self._router)
            if engine.spec == "standard"
            else EngineRows(engine, weights, self._router)
        )
        self._codec = StateCodec(facts.fingerprint, version, engine.spec, str(weights.dtype))
        self._books = Books()
        self._ledger = MassLedger(range(arch.n_layer)) if asked.options.scores else None
        self._fault: EngineFault | None = None

    def refusal(self, operation: str) -> str | None:
        """Why this capability is false; None where it is true. Raises UsageError for a name that is none."""
        return self._gates.refusal(operation)

    def cancel(self) -> None:
        self._stop.set()

    def abort_next(self) -> None:
        """Fault injection: the next pass fails in its last layer, with the rows of all layers already there."""
        self._router.fail_next = True

    def close(self) -> None:
        """Let the rows go. Idempotent, and the one thing allowed after a fault."""
        self.closed = True
        self._carrier = None

    # -- guards ---------------------------------------------------------------------------------------------------

    @property
    def _rows(self) -> Carrier:
        assert self._carrier is not None, "_require_usable comes first"
        return self._carrier

    @property
    def _surgery(self) -> ResidentRows:
        assert isinstance(self._carrier, ResidentRows), "Gates.require comes first"
        return self._carrier

    def _require_usable(self) -> None:
        if self._fault is not None:
            raise self._fault
        if self.closed:
            raise SessionClosed("the session was closed")

    @contextmanager
    def _operation(self, failure: FatalClass) -> Iterator[None]:
        """Refuse when closed or failed; what must not happen is of class `failure`, and final."""
        self._require_usable()
        try:
            yield
        except EngineFault as err:
            self._fail(err)
            raise
        except MemoryError as err:
            kind = FatalClass.ALLOCATOR_EXHAUSTED if failure in _COMPUTING else failure
            raise self._fail(EngineFault(kind, "no memory for the rows")) from err
        except (BackendFailure, BackendUnavailable, InvariantViolation, StateInvalidated) as err:
            raise self._fail(EngineFault(failure, str(err))) from err

    def _fail(self, fault: EngineFault) -> EngineFault:
        self._fault, self._carrier = fault, None
        return fault

    @contextmanager
    def _undone_on_error(self, start: int, stop: int) -> Iterator[None]:
        """Take the rows at `[start, stop)` back when the body raises what is no failure."""
        undo, books = self._rows.undo_point(start, stop), self._books
        try:
            yield
        except (EngineFault, BackendFailure, BackendUnavailable, InvariantViolation, MemoryError, StateInvalidated):
            raise
        except BaseException:
            undo()
            self._settle(books, FatalClass.STREAM_NOT_REVERSIBLE)
            raise

    def _raise_if_cancelled(self) -> None:
        """Raise Cancelled once for each request."""
        if self._stop.is_set():
            self._stop.clear()
            raise Cancelled("cancelled; the session is as it was before the operation")

    def _check_room(self, n_tokens: int) -> None:
        needed = self._books.n_rows + n_tokens
        if needed > self.n_ctx:
            raise ContextOverflow(needed, self.n_ctx, "evict first, or open the session with a larger n_ctx")

    def _settle(self, books: Books, failure: FatalClass) -> None:
        """Take the books over once every layer holds exactly their rows."""
        differs = self._rows.difference(books.cache_positions())
        if differs is not None:
            raise EngineFault(failure, differs)
        self._books = books
        if self._ledger is not None:
            self._ledger.retain(books.tape_positions())

    # -- computing ------------------------------------------------------------------------------------------------

    @property
    def _next_position(self) -> int:
        return next_cache_position(self._books.layout)

    def _computed(self, rows: Carrier, ids: Ids, at: int, sums: HeadSums | None) -> Computed:
        """`ids` in pieces of at most a chunk; logits of the last. Raises Cancelled, BackendFailure."""
        calls = 0
        hidden: Floats = np.empty((0, 0), self._weights.dtype)
        for start in range(0, len(ids), self.config.chunk):
            self._raise_if_cancelled()
            hidden, made = rows.compute(ids[start : start + self.config.chunk], at + start, sums)
            calls += made
        return Computed(self._logits(hidden), calls, len(ids))

    def _logits(self, hidden: Floats) -> Logits:
        return served_logits(self._weights, hidden).astype(np.float32)

    def _sums(self) -> HeadSums | None:
        if self._ledger is None:
            return None
        shape = self._weights.architecture.shape
        return HeadSums(shape.n_head, shape.n_head_kv, range(shape.n_layer))

    def _count(self, sums: HeadSums | None, n_queries: int) -> None:
        if self._ledger is not None and sums is not None:
            count(self._ledger, sums, self._books, n_queries)

    def _forget_attention(self) -> None:
        """Other rows took the place of all: they begin at zero. The queries were computed all the same."""
        if self._ledger is not None:
            self._ledger.retain(np.zeros(0, np.int64))
