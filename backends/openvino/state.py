"""Rows in the engine and rows in the books: the same, in the same order, whatever happens.

The only place that runs the engine and that knows what to do when it fails: an ordinary end takes the old rows back,
a failure of the engine is final for this session and costs its siblings a fresh request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvtape.backends.errors import Cancelled, EngineFault, FatalClass, SessionClosed
from kvtape.backends.openvino.attention import head_mass
from kvtape.backends.openvino.compiled import Compiled
from kvtape.backends.openvino.mirror import KvBuffer, Rows
from kvtape.backends.openvino.rope import F32, I64, Rotation
from kvtape.backends.openvino.runner import Runner, StateFailed, States, Step, StepCancelled, StepFailed
from kvtape.backends.openvino.scores import F64, EngineKeys, MassAccount
from kvtape.backends.protocol import AttentionMass

__all__ = ["EngineState"]

_WAITING_QUERIES = 32
"""So many at once, or more: of a run of single tokens each then costs a sixth."""


class EngineState:
    """`rows` are the books (and, with `mirror`, the host copy). A `compiled.Passenger`.

    `mass`: what the rows received, where the compiled model shows its queries. It goes with the rows, undone too.

    `stop` is the request to cancel; whoever raises Cancelled clears it. After an EngineFault every use raises that
    first cause again, after `close` SessionClosed.
    """

    def __init__(self, compiled: Compiled, *, mirror: bool) -> None:
        self.compiled = compiled
        self.shape = compiled.shape
        self.mirror = mirror
        self.rotation = compiled.rotation if isinstance(compiled.rotation, Rotation) else None
        self.rows = self._no_rows()
        scored = compiled.profile.queries
        self.mass = MassAccount.empty(self.shape.layers, self.shape.heads) if scored else None
        self._keys = EngineKeys(self.rotation, compiled.profile.keys)
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

    def step(self, ids: I64, tape: I64, cache: I64, fatal: FatalClass, *, each: bool = False) -> F32:
        """One engine call; its rows enter the books under the same lock. Logits `[n_vocab]` after the last token, or
        `[T, n_vocab]` after each.

        Raises EngineFault of class `fatal` (or allocator_exhausted), Cancelled; rows stay as they were then, or are
        for `undoable` to take back.
        """
        self.check_stop()
        if self.mass is not None and cache.min() <= self.mass.furthest_waiting:
            self._settle()  # the new rows would be in sight of queries that never saw them
        spoil, self.spoil_next = self.spoil_next, False
        with self._engine_call(fatal):
            step = self._engine().step(ids, cache, self.rows.cache, stop=self.stop.is_set, spoil=spoil, each=each)
            self.rows = self.rows.append(tape, cache, ids, step.keys, step.values)
        if self.mass is not None and step.queries is not None:
            self.mass = self.mass.with_queries(step.queries, cache)
            if self.mass.n_waiting >= _WAITING_QUERIES:
                self._settle()
        return step.logits

    def probe(self, ids: I64, kept: Rows, cache_start: int, layers: Sequence[int], chunk: int) -> F64:
        """What `ids`, computed over `kept` from `cache_start` on, pay to those rows: `[len(layers), heads, n]`.

        In a request of its own, which is then let go: the session's is not touched. Raises as `step` does.
        """
        self.check_stop()
        spoil, self.spoil_next = self.spoil_next, False
        in_place = kept.keys_in_place(self.rotation)
        at = cache_start + np.arange(len(ids))
        steps: list[Step] = []
        with self._engine_call(FatalClass.PREFILL_FAILED):
            self._engine()
            runner = self.compiled.spare()
            profile = self.compiled.profile
            runner.load(profile.keys.written(in_place), profile.values.written(kept.values))
            for start in range(0, len(ids), chunk):
                part = slice(start, start + chunk)
                before = np.concatenate([kept.cache, at[:start]])
                steps.append(runner.step(ids[part], at[part], before, stop=self.stop.is_set, spoil=spoil))
        positions = np.concatenate([kept.cache, at])
        stored = self.compiled.profile.keys.stored(in_place)
        found = np.zeros((len(layers), self.shape.heads, len(kept)))
        for out, layer in zip(found, layers, strict=True):
            self.check_stop()
            queries = np.concatenate([step.queries[layer] for step in steps if step.queries is not None])
            keys = np.concatenate([stored[layer], *(step.keys[layer] for step in steps)])
            out[:] = head_mass(queries, keys, at, positions)[:, : len(kept)]
        return found

    def take_mass(self) -> AttentionMass:
        """What the resident rows received since the last call. Needs a compiled model that shows its queries."""
        self._settle()
        assert self.mass is not None
        taken = self.mass.taken()
        self.mass = MassAccount.empty(self.shape.layers, self.shape.heads).following(self.rows.tape)
        return taken

    def _settle(self) -> None:
        """Before rows leave or move: nothing waits for its attention to be worked out. Raises Cancelled."""
        if self.mass is None or not self.mass.waiting:
            return
        try:
            self.mass = self.mass.settled(self.rows, self._keys.of(self.rows), self.check_stop)
        except MemoryError as err:
            raise self._die(FatalClass.ALLOCATOR_EXHAUSTED, "no memory for the attention scores") from err

    @contextmanager
    def _engine_call(self, fatal: FatalClass) -> Iterator[None]:
        """Whatever ends an engine call badly leaves a compiled model that no session may go on with."""
        with self.compiled.lock:
            try:
                yield
            except StepFailed as err:
                cause = FatalClass.ALLOCATOR_EXHAUSTED if err.allocation else fatal
                raise self._die(cause, str(err), poisoned=True) from err
            except StateFailed as err:
                raise self._die(FatalClass.STATE_RESTORE_FAILED, str(err), poisoned=True) from err
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

    def adopt(self, rows: Rows) -> None:
        """Make `rows`, which hold keys and values, the whole state. Raises EngineFault state_restore_failed.

        A row at the tape position of an old one is that row; for others there is `replace`.
        """
        self._settle()
        self._load(rows, self.read)
        if self.mass is not None:
            self.mass = self.mass.following(rows.tape)

    def replace(self, rows: Rows) -> None:
        """As `adopt`, but none of `rows` is one that stands there now: they begin without attention received."""
        self._load(rows, self.read)
        if self.mass is not None:
            self.mass = self.mass.without_rows().following(rows.tape)

    def clear(self) -> None:
        self.replace(self._no_rows())

    @contextmanager
    def undoable(self, *, destructive: bool = False) -> Iterator[None]:
        """Take back the rows of an operation that did not end, unless the engine itself failed.

        `destructive`: the operation does more than append, so that without a host copy the rows are kept aside.
        """
        start = self.rows
        mass = self.mass
        kept = self.read() if destructive and start.kv is None else None
        try:
            yield
        except EngineFault:
            raise
        except BaseException:
            if self._fault is None and self.rows is not start:
                self._load(start, self.read if kept is None else lambda: kept)
            self.mass = mass
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
        self._keys.forget()

    def _engine_rows(self, rows: Rows, source: Callable[[], States]) -> tuple[F32, F32]:
        if rows.kv is None:
            return _first_rows(source(), len(rows))
        profile = self.compiled.profile
        return profile.keys.written(rows.keys_in_place(self.rotation)), profile.values.written(rows.values)

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
        self._keys.forget()


def _first_rows(states: States, n: int) -> tuple[F32, F32]:
    """The first `n` rows of every layer; a stopped call leaves more in some layers."""
    return np.stack([k[:n] for k in states.keys]), np.stack([v[:n] for v in states.values])
