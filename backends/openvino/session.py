"""A session on OpenVINO: `protocol.Backend` over a request's KV states and the host copy of its rows.

Every operation that changes which rows there are, or where they stand, computes the new `Rows` from the host copy and
writes them whole into the engine's states: the state API knows no slices. New rows come out of the engine with every
call and are appended to the host copy. Between operations books, host copy and engine hold the same rows in the same
order, which is cache order; an operation that fails in an ordinary way takes the old `Rows` back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvtape.backends.errors import (
    Cancelled,
    ContextOverflow,
    EngineFault,
    FatalClass,
    InputRejected,
    SessionClosed,
    StateRejected,
    UnsupportedOperation,
)
from kvtape.backends.openvino import saved
from kvtape.backends.openvino.checks import check_positions, check_tape_free, check_tokens, shifted
from kvtape.backends.openvino.compiled import Compiled, round_to
from kvtape.backends.openvino.gates import Gate
from kvtape.backends.openvino.mirror import KvBuffer, Rows
from kvtape.backends.openvino.options import Resolved
from kvtape.backends.openvino.rope import F32, I64, Rotation
from kvtape.backends.openvino.runner import Runner, StateFailed, States, StepCancelled, StepFailed
from kvtape.backends.protocol import Choose, Computed, DecodeRun, KvRows, Logits, ModelFacts, Witness
from kvtape.planner.layout import Layout
from kvtape.planner.ranges import RangeSet

__all__ = ["OpenVinoBackend"]

_BYTES = {"f16": 2, "f32": 4}


class OpenVinoBackend:
    """Opened by `OpenVinoEngine.open`. `config` holds the effective values, `n_ctx` the effective context."""

    name = "openvino"

    def __init__(self, compiled: Compiled, facts: ModelFacts, asked: Resolved, gate: Gate, version: str) -> None:
        self.engine_version = version
        self.facts = facts
        self.config = asked.config
        self.n_ctx = asked.n_ctx
        self.capabilities = gate.capabilities
        self._gate = gate
        self._compiled = compiled
        self._shape = compiled.shape
        self._mirror = asked.mirror
        self._rotation = compiled.rotation if isinstance(compiled.rotation, Rotation) else None
        self._rows = self._no_rows()
        self._stop = threading.Event()
        self._fault: EngineFault | None = None
        self._closed = False
        self._abort_next = False
        self._runner: Runner | None = compiled.board(self)

    # --- computing -------------------------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int], tape_start: int) -> Computed:
        """See `protocol.Backend`; raises ContextOverflow beyond `n_ctx`."""
        self._enter()
        ids = check_tokens(tokens, self.facts.n_vocab)
        check_tape_free(self._rows, tape_start, len(ids))
        self._check_room(len(ids), "the prefill does not fit")
        with self._undoable():
            return self._compute(ids, tape_start + np.arange(len(ids)), self._rows.next_cache_position)

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        """See `protocol.Backend`. Whatever ends the run by an exception takes back all of its tokens."""
        self._enter()
        if n < 0:
            raise InputRejected(f"cannot decode {n} tokens")
        check_tape_free(self._rows, tape_start, n)
        done: list[int] = []
        with self._undoable():
            while True:
                if len(done) == n:
                    return DecodeRun(tuple(done), logits, len(done), "n")
                if len(self._rows) >= min(limit, self.n_ctx):
                    return DecodeRun(tuple(done), logits, len(done), "limit")
                token = choose(logits)
                if token is None:
                    return DecodeRun(tuple(done), logits, len(done), "chosen_none")
                ids = check_tokens([token], self.facts.n_vocab)
                at = self._rows.next_cache_position
                check_positions(at, 1)
                tape = np.array([tape_start + len(done)], np.int64)
                logits = self._step(ids, tape, np.array([at], np.int64), FatalClass.DECODE_FAILED)
                done.append(int(ids[0]))

    def refill(self, tokens: Sequence[int], start: int, cache_start: int) -> Computed:
        """See `protocol.Backend`. Without the host copy the place must be behind every row; else `rebuild`."""
        self._enter()
        ids = check_tokens(tokens, self.facts.n_vocab)
        check_tape_free(self._rows, start, len(ids))
        self._check_place(cache_start, len(ids))
        if self._rows.kv is None and cache_start < self._rows.next_cache_position:
            raise UnsupportedOperation("refill between rows", "mirror=off cannot reorder rows; rebuild instead")
        with self._undoable():
            computed = self._compute(ids, start + np.arange(len(ids)), cache_start)
            if not self._rows.in_cache_order:
                self._adopt(self._rows.sorted())
            return computed

    def rebuild(self, ranges: RangeSet, tokens: Sequence[int]) -> Computed:
        """See `protocol.Backend`. No ranges clear the cache; the logits are then empty, `[0]`."""
        self._enter()
        if len(tokens) != ranges.n_tokens:
            raise InputRejected(f"{len(tokens)} tokens for ranges of {ranges.n_tokens}")
        if ranges.n_tokens > self.n_ctx:
            raise ContextOverflow(ranges.n_tokens, self.n_ctx, "the survivors do not fit")
        ids = check_tokens(tokens, self.facts.n_vocab) if ranges else np.empty(0, np.int64)
        with self._undoable(destructive=True):
            self._clear()
            if not ranges:
                return Computed(np.empty(0, np.float32), 0, 0)
            return self._compute(ids, np.concatenate([np.arange(r.start, r.stop) for r in ranges]), 0)

    def _compute(self, ids: I64, tape: I64, cache_start: int) -> Computed:
        check_positions(cache_start, len(ids))
        cache = cache_start + np.arange(len(ids))
        logits = np.empty(0, np.float32)
        calls = 0
        for at in range(0, len(ids), self.config.chunk):
            part = slice(at, at + self.config.chunk)
            logits = self._step(ids[part], tape[part], cache[part], FatalClass.PREFILL_FAILED)
            calls += 1
        return Computed(logits, calls, len(ids))

    def _step(self, ids: I64, tape: I64, cache: I64, fatal: FatalClass) -> Logits:
        """One engine call; its rows enter books and host copy under the same lock."""
        self._check_stop()
        spoil, self._abort_next = self._abort_next, False
        with self._compiled.lock:
            try:
                step = self._engine().step(ids, cache, self._rows.cache, stop=self._stop.is_set, spoil=spoil)
                self._rows = self._rows.append(tape, cache, ids, step.keys, step.values)
            except StepFailed as err:
                cause = FatalClass.ALLOCATOR_EXHAUSTED if err.allocation else fatal
                raise self._die(cause, str(err), poisoned=True) from err
            except StepCancelled:
                self._compiled.revive()
                self._stop.clear()
                raise self._fault or Cancelled("cancelled; the session is as it was before this operation") from None
            except MemoryError as err:
                raise self._die(FatalClass.ALLOCATOR_EXHAUSTED, "no memory for the new rows", poisoned=True) from err
            except BaseException:
                # The call may have ended or not: a fresh request with the rows of the books is right either way.
                self._compiled.revive()
                raise
        return step.logits

    # --- rows out, rows elsewhere, rows back -----------------------------------------------------------------

    def truncate(self, tape_stop: int) -> None:
        self._enter("remove_tail", "truncate")
        keep = np.flatnonzero(self._rows.tape < tape_stop)
        if len(keep) < len(self._rows):
            self._adopt(self._rows.take(keep))

    def evict(self, start: int, stop: int) -> None:
        self._enter("remove_middle", "evict")
        self._adopt(self._rows.without(self._run(start, stop)))

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        self._enter("position_shift", "shift")
        cache = shifted(self._rows, cache_start, cache_stop, delta)
        self._adopt(self._rows.at_cache(cache))

    def export_block(self, start: int, stop: int) -> bytes:
        self._enter("cold_store", "export_block")
        at = self._run(start, stop)
        return saved.pack("block", self._identity(), self._rows.take(np.arange(at.start, at.stop)))

    def admit(self, block: bytes, start: int, cache_start: int) -> None:
        self._enter("cold_store", "admit")
        rows = saved.unpack("block", self._identity(), self._shape, block)
        if not len(rows) or not np.array_equal(rows.tape, start + np.arange(len(rows))):
            raise StateRejected(f"the block does not hold the tape positions from {start}")
        check_tape_free(self._rows, start, len(rows))
        self._check_place(cache_start, len(rows))
        cache = cache_start + np.arange(len(rows))
        if self._rotation is None and (cache != rows.origin).any():
            raise UnsupportedOperation("admit at another cache position", str(self.refusal("position_shift")))
        self._adopt(self._rows.merged(rows.at_cache(cache)))

    # --- whole state -----------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        self._enter()
        rows = self._rows
        if rows.kv is None:
            keys, values = _stacked(self._states(), len(rows))
            rows = Rows(KvBuffer(keys, values, len(rows)), rows.tape, rows.cache, rows.tokens, rows.cache)
        return saved.pack("snapshot", self._identity(), rows)

    def restore(self, snapshot: bytes) -> None:
        """See `protocol.Backend`; a failure once the engine was touched is EngineFault state_restore_failed."""
        self._enter()
        rows = saved.unpack("snapshot", self._identity(), self._shape, snapshot)
        if len(rows) > self.n_ctx:
            raise StateRejected(f"the snapshot holds {len(rows)} rows, this session's context is {self.n_ctx}")
        if self._rotation is None and (rows.cache != rows.origin).any():
            raise StateRejected("the snapshot holds moved rows, which this session cannot rotate")
        spoil, self._abort_next = self._abort_next, False
        self._adopt(rows, spoil=spoil)

    def books(self) -> Layout:
        self._check_usable()
        return self._rows.layout()

    def witness(self) -> Witness:
        """Reads every state tensor; positions are the books', only the keys' rotation can prove them."""
        self._check_usable()
        with self._compiled.lock:
            states = self._engine().states()
            rows = KvRows(tuple(map(_flat, states.keys)), tuple(map(_flat, states.values)))
            return Witness(self._rows.cache.copy(), "books", rows, self._mirror_rows())

    def kv_bytes(self) -> dict[str, int]:
        """`allocated` equals `resident`: the runtime tells of no other size. `mirror`: the host copy's rows."""
        self._check_usable()
        n, shape = len(self._rows), self._shape
        per_layer = shape.head_dim_k * _BYTES[self.config.kv_type_k] + shape.head_dim_v * _BYTES[self.config.kv_type_v]
        resident = n * shape.layers * shape.kv_heads * per_layer
        mirror = 4 * n * shape.layers * shape.kv_heads * (shape.head_dim_k + shape.head_dim_v)
        return {"resident": resident, "allocated": resident, "mirror": mirror if self._mirror else 0}

    def refusal(self, operation: str) -> str | None:
        return self._gate.refusal(operation)

    def cancel(self) -> None:
        self._stop.set()

    def abort_next(self) -> None:
        """Fault injection, by errors of the runtime itself.

        The next inference gets a mask of the wrong width; the next restore gives the last layer's values too many
        heads, after the layers before it were set. The runtime refuses both.
        """
        self._abort_next = True

    def close(self) -> None:
        self._closed = True
        self._drop()

    # --- carried by a compiled model (compiled.Passenger) ----------------------------------------------------

    def carry_over(self, runner: Runner) -> None:
        old, self._runner = self._engine(), runner
        try:
            keys, values = self._engine_rows(self._rows, old.states)
            runner.load(keys, values)
        except (StateFailed, RuntimeError, MemoryError) as err:
            self._die(FatalClass.STATE_RESTORE_FAILED, f"carrying the session to a fresh compiled model: {err}")

    def strand(self, reason: str) -> None:
        self._die(FatalClass.DEVICE_LOST, reason)

    # --- inside ----------------------------------------------------------------------------------------------

    def _enter(self, capability: str | None = None, operation: str = "") -> None:
        self._check_usable()
        why = None if capability is None else self._gate.refusal(capability)
        if why is not None:
            raise UnsupportedOperation(operation, f"{capability} is false: {why}")
        self._check_stop()

    def _check_usable(self) -> None:
        if self._fault is not None:
            raise self._fault
        if self._closed:
            raise SessionClosed("the session is closed")

    def _check_stop(self) -> None:
        if self._stop.is_set():
            self._stop.clear()
            raise Cancelled("cancelled; the session is as it was before this operation")

    def _check_room(self, n: int, why: str) -> None:
        if len(self._rows) + n > self.n_ctx:
            raise ContextOverflow(len(self._rows) + n, self.n_ctx, why)

    def _check_place(self, cache_start: int, n: int) -> None:
        """Raises InputRejected where rows stand already, ContextOverflow when there is no room."""
        check_positions(cache_start, n)
        taken = (self._rows.cache >= cache_start) & (self._rows.cache < cache_start + n)
        if taken.any():
            raise InputRejected(f"cache positions [{cache_start}, {cache_start + n}) are not free")
        self._check_room(n, "the rows do not fit")

    def _run(self, start: int, stop: int) -> slice:
        at = self._rows.run(start, stop)
        if at is None:
            raise InputRejected(f"tape positions [{start}, {stop}) are not one resident run")
        return at

    @contextmanager
    def _undoable(self, *, destructive: bool = False) -> Iterator[None]:
        """Take back the rows of an operation that did not end, unless the engine itself failed."""
        start = self._rows
        kept = self._states() if destructive and start.kv is None else None
        try:
            yield
        except EngineFault:
            raise
        except BaseException:
            if self._rows is not start:
                source: Callable[[], States] = self._states if kept is None else lambda: kept
                self._load(start, source)
            raise

    def _clear(self) -> None:
        self._load(self._no_rows(), self._states)

    def _adopt(self, rows: Rows, *, spoil: bool = False) -> None:
        """Make `rows`, which hold keys and values, the whole state."""
        self._load(rows, self._states, spoil=spoil)

    def _load(self, rows: Rows, source: Callable[[], States], *, spoil: bool = False) -> None:
        """Engine and books hold `rows` from now on; keys and values come from `source` where there is no host copy."""
        with self._compiled.lock:
            try:
                keys, values = self._engine_rows(rows, source)
                self._engine().load(keys, values, spoil=spoil)
            except (StateFailed, MemoryError) as err:
                raise self._die(FatalClass.STATE_RESTORE_FAILED, str(err)) from err
            self._rows = rows if self._mirror else Rows(None, rows.tape, rows.cache, rows.tokens, rows.origin)

    def _engine_rows(self, rows: Rows, source: Callable[[], States]) -> tuple[F32, F32]:
        if rows.kv is None:
            return _stacked(source(), len(rows))
        return rows.keys_in_place(self._rotation), rows.values

    def _states(self) -> States:
        with self._compiled.lock:
            return self._engine().states()

    def _mirror_rows(self) -> KvRows | None:
        if not self._mirror:
            return None
        keys = round_to(self._rows.keys_in_place(self._rotation), self.config.kv_type_k)
        values = round_to(self._rows.values, self.config.kv_type_v)
        return KvRows(tuple(map(_flat, keys)), tuple(map(_flat, values)))

    def _no_rows(self) -> Rows:
        shape = self._shape
        return Rows.empty(shape.layers, shape.kv_heads, shape.head_dim_k, shape.head_dim_v, mirror=self._mirror)

    def _identity(self) -> dict[str, object]:
        return {
            "engine": self.name,
            "engine_version": self.engine_version,
            "fingerprint": self.facts.fingerprint,
            "kv_type_k": self.config.kv_type_k,
            "kv_type_v": self.config.kv_type_v,
            "mirror": self._mirror,
        }

    def _engine(self) -> Runner:
        if self._runner is None:
            raise self._fault or SessionClosed("the session is closed")
        return self._runner

    def _die(self, fatal_class: FatalClass, message: str, *, poisoned: bool = False) -> EngineFault:
        """The first cause is kept; the native context is dropped; the others go on without this session."""
        self._fault = self._fault or EngineFault(fatal_class, message)
        self._drop()
        if poisoned:
            self._compiled.revive()
        return self._fault

    def _drop(self) -> None:
        self._compiled.leave(self)
        self._runner = None
        self._rows = self._no_rows()


def _flat(rows: F32) -> F32:
    """`[n, kv_heads, head_dim]` to `[n, kv_heads * head_dim]`."""
    return np.ascontiguousarray(rows).reshape(rows.shape[0], rows.shape[1] * rows.shape[2])


def _stacked(states: States, n: int) -> tuple[F32, F32]:
    """The first `n` rows of every layer; a stopped call leaves more in some layers."""
    return np.stack([k[:n] for k in states.keys]), np.stack([v[:n] for v in states.values])
