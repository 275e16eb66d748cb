"""Rows in the engine and rows in the books: the same, in the same order, whatever happens.

The only place that runs the engine and that knows what to do when it fails: an ordinary end takes the old rows back,
a failure of the engine is final for this session and costs its siblings a fresh request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvtape.backends.errors import Cancelled, EngineFault, FatalClass, SessionClosed
from kvtape.backends.openvino.compiled import Compiled
from kvtape.backends.openvino.mirror import KvBuffer, Rows
from kvtape.backends.openvino.rope import F32, I64, Rotation
from kvtape.backends.openvino.runner import Runner, StateFailed, States, StepCancelled, StepFailed

__all__ = ["EngineState"]


class EngineState:
    """`rows` are the books (and, with `mirror`, the host copy). A `compiled.Passenger`.

    `stop` is the request to cancel; whoever raises Cancelled clears it. After an EngineFault every use raises that
    first cause again, after `close` SessionClosed.
    """

    def __init__(self, compiled: Compiled, *, mirror: bool) -> None:
        self.compiled = compiled
        self.shape = compiled.shape
        self.mirror = mirror
        self.rotation = compiled.rotation if isinstance(compiled.rotation, Rotation) else None
        self.rows = self._no_rows()
        self.stop = threading.Event()
        self.spoil_next = False
        self._fault: EngineFault | None = None
        self._closed = False
        self._runner: Runner | None = compiled.board(self)

    def check_usable(self) -> None:
        if self._fault is not None:
            raise self._fault
        if self._closed:
            raise SessionClosed("the session is closed")

    def check_stop(self) -> None:
        if self.stop.is_set():
            self.stop.clear()
            raise Cancelled("cancelled; the session is as it was before this operation")

    def step(self, ids: I64, tape: I64, cache: I64, fatal: FatalClass) -> F32:
        """One engine call; its rows enter the books under the same lock. Logits `[n_vocab]` after the last token.

        Raises EngineFault of class `fatal` (or allocator_exhausted), Cancelled; rows stay as they were then.
        """
        self.check_stop()
        spoil, self.spoil_next = self.spoil_next, False
        with self.compiled.lock:
            try:
                step = self._engine().step(ids, cache, self.rows.cache, stop=self.stop.is_set, spoil=spoil)
                self.rows = self.rows.append(tape, cache, ids, step.keys, step.values)
            except StepFailed as err:
                cause = FatalClass.ALLOCATOR_EXHAUSTED if err.allocation else fatal
                raise self._die(cause, str(err), poisoned=True) from err
            except StepCancelled:
                self.compiled.revive()
                self.check_usable()
                self.check_stop()
                raise
            except MemoryError as err:
                raise self._die(FatalClass.ALLOCATOR_EXHAUSTED, "no memory for the new rows", poisoned=True) from err
            except BaseException:
                # The call may have ended or not: a fresh request with the rows of the books is right either way.
                self.compiled.revive()
                raise
        return step.logits

    def adopt(self, rows: Rows) -> None:
        """Make `rows`, which hold keys and values, the whole state. Raises EngineFault state_restore_failed."""
        self._load(rows, self.read)

    def clear(self) -> None:
        self._load(self._no_rows(), self.read)

    @contextmanager
    def undoable(self, *, destructive: bool = False) -> Iterator[None]:
        """Take back the rows of an operation that did not end, unless the engine itself failed.

        `destructive`: the operation does more than append, so that without a host copy the rows are kept aside.
        """
        start = self.rows
        kept = self.read() if destructive and start.kv is None else None
        try:
            yield
        except EngineFault:
            raise
        except BaseException:
            if self.rows is not start:
                self._load(start, self.read if kept is None else lambda: kept)
            raise

    def read(self) -> States:
        """What the engine holds."""
        with self.compiled.lock:
            return self._engine().states()

    def read_with_rows(self) -> tuple[States, Rows]:
        """What the engine holds, and the books of the same moment."""
        with self.compiled.lock:
            return self._engine().states(), self.rows

    def full_rows(self) -> Rows:
        """The rows with keys and values: of the host copy, else read from the engine, as they stand."""
        states, rows = self.read_with_rows() if self.rows.kv is None else (None, self.rows)
        if states is None:
            return rows
        keys, values = _first_rows(states, len(rows))
        return Rows(KvBuffer(keys, values, len(rows)), rows.tape, rows.cache, rows.tokens, rows.cache)

    def close(self) -> None:
        self._closed = True
        self._drop()

    def carry_over(self, runner: Runner) -> None:
        """See `compiled.Passenger`."""
        old, self._runner = self._engine(), runner
        try:
            runner.load(*self._engine_rows(self.rows, old.states))
        except (StateFailed, RuntimeError, MemoryError) as err:
            self._die(FatalClass.STATE_RESTORE_FAILED, f"carrying the session to a fresh compiled model: {err}")

    def strand(self, reason: str) -> None:
        """See `compiled.Passenger`."""
        self._die(FatalClass.DEVICE_LOST, reason)

    def _load(self, rows: Rows, source: Callable[[], States]) -> None:
        """Engine and books hold `rows` from now on; keys and values come from `source` where there is no host copy."""
        spoil = self.spoil_next and len(rows) > 0
        self.spoil_next = self.spoil_next and not spoil
        with self.compiled.lock:
            try:
                self._engine().load(*self._engine_rows(rows, source), spoil=spoil)
            except (StateFailed, MemoryError) as err:
                raise self._die(FatalClass.STATE_RESTORE_FAILED, str(err)) from err
            self.rows = rows if self.mirror else Rows(None, rows.tape, rows.cache, rows.tokens, rows.origin)

    def _engine_rows(self, rows: Rows, source: Callable[[], States]) -> tuple[F32, F32]:
        if rows.kv is None:
            return _first_rows(source(), len(rows))
        return rows.keys_in_place(self.rotation), rows.values

    def _no_rows(self) -> Rows:
        shape = self.shape
        return Rows.empty(shape.layers, shape.kv_heads, shape.head_dim_k, shape.head_dim_v, mirror=self.mirror)

    def _engine(self) -> Runner:
        self.check_usable()
        assert self._runner is not None
        return self._runner

    def _die(self, fatal_class: FatalClass, message: str, *, poisoned: bool = False) -> EngineFault:
        """The first cause is kept; the native context is dropped; the others go on without this session."""
        self._fault = self._fault or EngineFault(fatal_class, message)
        self._drop()
        if poisoned:
            self.compiled.revive()
        return self._fault

    def _drop(self) -> None:
        self.compiled.leave(self)
        self._runner = None
        self.rows = self._no_rows()


def _first_rows(states: States, n: int) -> tuple[F32, F32]:
    """The first `n` rows of every layer; a stopped call leaves more in some layers."""
    return np.stack([k[:n] for k in states.keys]), np.stack([v[:n] for v in states.values])
