"""A session on OpenVINO: `protocol.Backend` over a request's KV states and the host copy of its rows.

Every operation that changes which rows there are, or where they stand, computes the new `Rows` from the host copy and
writes them whole into the engine's states: the state API knows no slices. New rows come out of the engine with every
call and are appended to the host copy. Between operations books, host copy and engine hold the same rows in the same
order, which is cache order; an operation that fails in an ordinary way takes the old `Rows` back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtape.backends.asked import check_layers
from kvtape.backends.errors import (
    ContextOverflow,
    FatalClass,
    InputRejected,
    StateRejected,
    UnsupportedOperation,
)
from kvtape.backends.openvino import saved
from kvtape.backends.openvino.checks import check_positions, check_tape_free, check_tokens, shifted
from kvtape.backends.openvino.compiled import Compiled
from kvtape.backends.openvino.gates import Gate
from kvtape.backends.openvino.mirror import Rows
from kvtape.backends.openvino.options import Resolved
from kvtape.backends.openvino.rope import F32, I64
from kvtape.backends.openvino.scores import as_attention_mass
from kvtape.backends.openvino.state import EngineState
from kvtape.backends.protocol import AttentionMass, Choose, Computed, DecodeRun, KvRows, Logits, ModelFacts, Witness
from kvtape.backends.verifying import Keep, Verified, check_kept, check_one_call, no_verifying_reason
from kvtape.capacity.openvino_rules import state_row_bytes
from kvtape.planner.layout import Layout
from kvtape.planner.ranges import RangeSet

__all__ = ["OpenVinoBackend"]


class OpenVinoBackend:
    """Opened by `OpenVinoEngine.open`. `config` holds the effective values, `n_ctx` the effective context."""

    name = "openvino"
    verify_margin = 0.01  # a hundred times what logits of one call and of several were seen to differ by

    def __init__(self, compiled: Compiled, facts: ModelFacts, asked: Resolved, gate: Gate, version: str) -> None:
        self.engine_version = version
        self.facts = facts
        self.config = asked.config
        self.n_ctx = asked.n_ctx
        self.capabilities = gate.capabilities
        self._gate = gate
        self._shape = compiled.shape
        self._state = EngineState(compiled, mirror=asked.mirror)

    # --- computing -------------------------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int], tape_start: int) -> Computed:
        """See `protocol.Backend`; raises ContextOverflow beyond `n_ctx`."""
        self._enter()
        ids = check_tokens(tokens, self.facts.n_vocab)
        check_tape_free(self._state.rows, tape_start, len(ids))
        self._check_room(len(ids), "the prefill does not fit")
        with self._state.undoable():
            return self._compute(ids, tape_start + np.arange(len(ids)), self._state.rows.next_cache_position)

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        """See `protocol.Backend`. Whatever ends the run by an exception takes back all of its tokens."""
        self._enter()
        if n < 0:
            raise InputRejected(f"cannot decode {n} tokens")
        check_tape_free(self._state.rows, tape_start, n)
        done: list[int] = []
        with self._state.undoable():
            while True:
                if len(done) == n:
                    return DecodeRun(tuple(done), logits, len(done), "n")
                if len(self._state.rows) >= min(limit, self.n_ctx):
                    return DecodeRun(tuple(done), logits, len(done), "limit")
                token = choose(logits)
                if token is None:
                    return DecodeRun(tuple(done), logits, len(done), "chosen_none")
                ids = check_tokens([token], self.facts.n_vocab)
                at = self._state.rows.next_cache_position
                check_positions(at, 1)
                tape = np.array([tape_start + len(done)], np.int64)
                logits = self._state.step(ids, tape, np.array([at], np.int64), FatalClass.DECODE_FAILED)
                done.append(int(ids[0]))

    def verify_refusal(self) -> str | None:
        """See `verifying.Verifier`."""
        profile = self._state.compiled.profile
        if {profile.kv_type_k, profile.kv_type_v, profile.inference} != {"f32"}:
            return "rows that are rounded when they are stored come out otherwise of a call for several; use f32"
        return no_verifying_reason(self.capabilities, self.refusal)

    def verify(self, tokens: Sequence[int], tape_start: int, keep: Keep) -> Verified:
        """One inference with the logits of every token; rows given up leave all states at once."""
        self._enter()
        if (why := self.verify_refusal()) is not None:
            raise UnsupportedOperation("verify", why)
        ids = check_tokens(tokens, self.facts.n_vocab)
        check_one_call(len(ids), self.config.chunk)
        check_tape_free(self._state.rows, tape_start, len(ids))
        self._check_room(len(ids), "the drafted tokens do not fit")
        at = self._state.rows.next_cache_position
        check_positions(at, len(ids))
        with self._state.undoable():
            before, new = len(self._state.rows), np.arange(len(ids))
            each = self._state.step(ids, tape_start + new, at + new, FatalClass.DECODE_FAILED, each=True)
            kept = check_kept(keep(each), len(ids))
            if kept < len(ids):
                self._state.adopt(self._state.rows.take(np.arange(before + kept)))
            return Verified.of(kept, each, 1)

    def refill(self, tokens: Sequence[int], start: int, cache_start: int) -> Computed:
        """See `protocol.Backend`. Without the host copy the place must be behind every row; else `rebuild`."""
        self._enter()
        ids = check_tokens(tokens, self.facts.n_vocab)
        check_tape_free(self._state.rows, start, len(ids))
        self._check_place(cache_start, len(ids))
        if self._state.rows.kv is None and cache_start < self._state.rows.next_cache_position:
            raise UnsupportedOperation("refill between rows", "mirror=off cannot reorder rows; rebuild instead")
        with self._state.undoable():
            computed = self._compute(ids, start + np.arange(len(ids)), cache_start)
            if not self._state.rows.in_cache_order:
                self._state.adopt(self._state.rows.sorted())
            return computed

    def rebuild(self, ranges: RangeSet, tokens: Sequence[int]) -> Computed:
        """See `protocol.Backend`. No ranges clear the cache; the logits are then empty, `[0]`."""
        self._enter()
        if len(tokens) != ranges.n_tokens:
            raise InputRejected(f"{len(tokens)} tokens for ranges of {ranges.n_tokens}")
        if ranges.n_tokens > self.n_ctx:
            raise ContextOverflow(ranges.n_tokens, self.n_ctx, "the survivors do not fit")
        ids = check_tokens(tokens, self.facts.n_vocab) if ranges else np.empty(0, np.int64)
        with self._state.undoable(destructive=True):
            self._state.clear()
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
            logits = self._state.step(ids[part], tape[part], cache[part], FatalClass.PREFILL_FAILED)
            calls += 1
        return Computed(logits, calls, len(ids))

    # --- rows out, rows elsewhere, rows back -----------------------------------------------------------------

    def truncate(self, tape_stop: int) -> None:
        self._enter("remove_tail", "truncate")
        if tape_stop < 0:
            raise InputRejected(f"cannot truncate at {tape_stop}")
        keep = np.flatnonzero(self._state.rows.tape < tape_stop)
        if len(keep) < len(self._state.rows):
            self._state.adopt(self._state.rows.take(keep))

    def evict(self, start: int, stop: int) -> None:
        self._enter("remove_middle", "evict")
        self._state.adopt(self._state.rows.without(self._run(start, stop)))

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        self._enter("position_shift", "shift")
        cache = shifted(self._state.rows, cache_start, cache_stop, delta)
        self._state.adopt(self._state.rows.at_cache(cache))

    def export_block(self, start: int, stop: int) -> bytes:
        self._enter("cold_store", "export_block")
        at = self._run(start, stop)
        return saved.pack("block", self._identity(), self._state.rows.take(np.arange(at.start, at.stop)))

    def admit(self, block: bytes, start: int, cache_start: int) -> None:
        self._enter("cold_store", "admit")
        rows = saved.unpack("block", self._identity(), self._shape, block)
        if not len(rows) or not np.array_equal(rows.tape, start + np.arange(len(rows))):
            raise StateRejected(f"the block does not hold the tape positions from {start}")
        check_tape_free(self._state.rows, start, len(rows))
        self._check_place(cache_start, len(rows))
        cache = cache_start + np.arange(len(rows))
        if self._state.rotation is None and (cache != rows.origin).any():
            raise UnsupportedOperation("admit at another cache position", str(self.refusal("position_shift")))
        self._state.adopt(self._state.rows.merged(rows.at_cache(cache)))

    # --- attention -------------------------------------------------------------------------------------------

    def score(self, tokens: Sequence[int], tape_start: int, layers: Sequence[int] | None = None) -> AttentionMass:
        """See `protocol.Backend`. The tokens stand where `tape_start` stands if it is resident, else behind the rows
        before it.

        Raises ContextOverflow where those rows and the tokens are more than `n_ctx`.
        """
        self._enter("attention_scores", "score")
        ids = check_tokens(tokens, self.facts.n_vocab)
        chosen = check_layers(layers, self._shape.layers)
        if tape_start < 0:
            raise InputRejected(f"tape position {tape_start} is negative")
        rows = self._state.rows
        before = rows.tape < tape_start
        kept = rows if before.all() else rows.take(np.flatnonzero(before))
        if len(kept) + len(ids) > self.n_ctx:
            raise ContextOverflow(len(kept) + len(ids), self.n_ctx, "the scored tokens do not fit")
        at = max(kept.next_cache_position, *rows.cache[rows.tape == tape_start].tolist(), 0)
        check_positions(at, len(ids))
        by_head = self._state.probe(ids, kept, at, chosen, self.config.chunk)
        return as_attention_mass(kept.tape, chosen, len(ids), by_head)

    def take_mass(self) -> AttentionMass:
        """See `protocol.Backend`. A row's mass leaves with it: admitted, refilled, restored rows begin at zero."""
        self._enter("attention_scores", "take_mass")
        return self._state.take_mass()

    # --- whole state -----------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        self._enter()
        return saved.pack("snapshot", self._identity(), self._state.full_rows())

    def restore(self, snapshot: bytes) -> None:
        """See `protocol.Backend`; a failure once the engine was touched is EngineFault state_restore_failed."""
        self._enter()
        rows = saved.unpack("snapshot", self._identity(), self._shape, snapshot)
        if len(rows) > self.n_ctx:
            raise StateRejected(f"the snapshot holds {len(rows)} rows, this session's context is {self.n_ctx}")
        if self._state.rotation is None and (rows.cache != rows.origin).any():
            raise StateRejected("the snapshot holds moved rows, which this session cannot rotate")
        self._state.replace(rows)

    def books(self) -> Layout:
        self._state.check_usable()
        return self._state.rows.layout()

    def witness(self) -> Witness:
        """Reads every state tensor; positions are the books', only the keys' rotation can prove them."""
        self._state.check_usable()
        states, rows = self._state.read_with_rows()
        found = KvRows(tuple(map(_flat, states.keys)), tuple(map(_flat, states.values)))
        return Witness(rows.cache.copy(), "books", found, self._mirror_rows(rows))

    def kv_bytes(self) -> dict[str, int]:
        """`allocated` equals `resident`: the runtime tells of no other size. `mirror`: the host copy's rows."""
        self._state.check_usable()
        n, shape = len(self._state.rows), self._shape

        def rows(kv_type: str, head_dim: int) -> int:
            return n * shape.layers * state_row_bytes(kv_type, shape.kv_heads * head_dim, shape.kv_heads)

        resident = rows(self.config.kv_type_k, shape.head_dim_k) + rows(self.config.kv_type_v, shape.head_dim_v)
        mirror = rows("f32", shape.head_dim_k) + rows("f32", shape.head_dim_v)
        return {"resident": resident, "allocated": resident, "mirror": mirror if self._state.mirror else 0}

    def refusal(self, operation: str) -> str | None:
        return self._gate.refusal(operation)

    def cancel(self) -> None:
        self._state.stop.set()

    def abort_next(self) -> None:
        """Fault injection, by errors of the runtime itself.

        The next inference gets a mask of the wrong width; where the next write of states comes first (a restore, an
        evict), it gives the last layer's values too many heads, after the layers before were set. The runtime refuses
        both.
        """
        self._state.spoil_next = True

    def close(self) -> None:
        self._state.close()

    # --- inside ----------------------------------------------------------------------------------------------

    def _enter(self, capability: str | None = None, operation: str = "") -> None:
        self._state.check_usable()
        why = None if capability is None else self._gate.refusal(capability)
        if why is not None:
            raise UnsupportedOperation(operation, f"{capability} is false: {why}")
        self._state.check_stop()

    def _check_room(self, n: int, why: str) -> None:
        if len(self._state.rows) + n > self.n_ctx:
            raise ContextOverflow(len(self._state.rows) + n, self.n_ctx, why)

    def _check_place(self, cache_start: int, n: int) -> None:
        """Raises InputRejected where rows stand already, ContextOverflow when there is no room."""
        check_positions(cache_start, n)
        taken = (self._state.rows.cache >= cache_start) & (self._state.rows.cache < cache_start + n)
        if taken.any():
            raise InputRejected(f"cache positions [{cache_start}, {cache_start + n}) are not free")
        self._check_room(n, "the rows do not fit")

    def _run(self, start: int, stop: int) -> slice:
        at = self._state.rows.run(start, stop)
        if at is None:
            raise InputRejected(f"tape positions [{start}, {stop}) are not one resident run")
        return at

    def _mirror_rows(self, rows: Rows) -> KvRows | None:
        if rows.kv is None:
            return None
        profile = self._state.compiled.profile
        keys = profile.keys.stored(rows.keys_in_place(self._state.rotation))
        values = profile.values.stored(rows.values)
        return KvRows(tuple(map(_flat, keys)), tuple(map(_flat, values)))

    def _identity(self) -> dict[str, object]:
        return {
            "engine": self.name,
            "engine_version": self.engine_version,
            "fingerprint": self.facts.fingerprint,
            "kv_type_k": self.config.kv_type_k,
            "kv_type_v": self.config.kv_type_v,
            "inference": self._state.compiled.profile.inference,
            "mirror": self._state.mirror,
        }


def _flat(rows: F32) -> F32:
    """`[n, kv_heads, head_dim]` to `[n, kv_heads * head_dim]`."""
    return np.ascontiguousarray(rows).reshape(rows.shape[0], rows.shape[1] * rows.shape[2])
