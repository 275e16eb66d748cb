"""A backend of your own, complete: pytest --kvtape-backend backend:open_backend (in this folder)

The least that conforms: this engine computes, and clears its cache. It says so in its capabilities, refuses the rest
with a reason, and kvtape evicts by recompute. `kvtape.testing.toy` is the next step: a backend with every ability.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvtape.backends.errors import Cancelled, ContextOverflow, InputRejected, SessionClosed, UnsupportedOperation
from kvtape.backends.protocol import Choose, Computed, DecodeRun, KvRows, Logits, ModelFacts, SessionConfig, Witness
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.layout import Layout, Segment, normalise
from kvtape.planner.ranges import RangeSet

N_VOCAB = 32
EMBEDDING = np.random.default_rng(1).standard_normal((N_VOCAB, 8))
WHY = "this engine can only compute and clear its cache"


class Row(NamedTuple):
    cache: int
    tape: int
    token: int
    key: Any
    value: Any


class Backend:
    name = "mine"
    engine_version = "1"
    facts = ModelFacts("mine", "mine/1", "mine", N_VOCAB, 4096, frozenset())
    capabilities = Capabilities(recompute_range=True)

    def __init__(self, config: SessionConfig) -> None:
        self.config, self.n_ctx = config, config.n_ctx
        self.rows: list[Row] = []
        self.cancelled = self.closed = False

    def refusal(self, operation: str) -> str | None:
        return None if getattr(self.capabilities, operation) else WHY

    def prefill(self, tokens: Sequence[int], tape_start: int) -> Computed:
        return self._compute(self.rows, tokens, range(tape_start, tape_start + len(tokens)), self._next())

    def refill(self, tokens: Sequence[int], start: int, cache_start: int) -> Computed:
        return self._compute(self.rows, tokens, range(start, start + len(tokens)), cache_start)

    def rebuild(self, ranges: RangeSet, tokens: Sequence[int]) -> Computed:
        tape = [p for r in ranges for p in range(r.start, r.stop)]
        if len(tape) != len(tokens):
            raise InputRejected(f"{len(tokens)} tokens for {len(tape)} positions")
        if not tape:
            self.rows = []
            return Computed(np.empty(0, np.float32), 0, 0)
        return self._compute([], tokens, tape, 0)

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        if n < 0:
            raise InputRejected(f"cannot decode {n} tokens")
        before, out = self.rows, list[int]()
        try:
            while len(out) < n and len(self.rows) < min(limit, self.n_ctx):
                token = choose(logits)
                if token is None:
                    return DecodeRun(tuple(out), logits, len(out), "chosen_none")
                logits = self.prefill([token], tape_start + len(out)).logits
                out.append(token)
        except BaseException:
            self.rows = before  # all or nothing, whatever went wrong
            raise
        return DecodeRun(tuple(out), logits, len(out), "n" if len(out) == n else "limit")

    def _compute(self, rows: list[Row], tokens: Sequence[int], tape: Sequence[int], cache_start: int) -> Computed:
        """Check everything, compute into a new list, and only then put it in place."""
        if self.closed:
            raise SessionClosed("the session was closed")
        if not len(tokens) or not all(0 <= t < N_VOCAB for t in tokens):
            raise InputRejected(f"tokens must be some, from 0 to {N_VOCAB - 1}")
        at = range(cache_start, cache_start + len(tokens))
        if cache_start < 0 or any(r.tape in tape or r.cache in at for r in rows):
            raise InputRejected("these positions are not free")
        if len(rows) + len(tokens) > self.n_ctx:
            raise ContextOverflow(len(rows) + len(tokens), self.n_ctx, "evict first")
        if self.cancelled:
            self.cancelled = False
            raise Cancelled("cancelled")
        rows = list(rows)
        for token, position, cache in zip(tokens, tape, at, strict=True):
            seen = [r.value for r in rows if r.cache < cache]
            value = np.tanh(EMBEDDING[token] + (np.mean(seen, axis=0) if seen else 0))
            key = EMBEDDING[token] * np.exp(1j * cache * np.arange(1, 9))  # turned by its position, as RoPE does
            rows.append(Row(cache, position, token, np.concatenate([key.real, key.imag]), value))
        self.rows = rows
        logits = (EMBEDDING @ rows[-1].value).astype(np.float32)
        return Computed(logits, -(-len(tokens) // (self.config.chunk or len(tokens))), len(tokens))

    def _next(self) -> int:
        return max((r.cache for r in self.rows), default=-1) + 1

    def books(self) -> Layout:
        return normalise(Segment(r.tape, 1, r.cache) for r in self.rows)

    def witness(self) -> Witness:
        """A real engine reads its own memory here, never its books."""
        keys = np.array([r.key for r in self.rows], np.float32).reshape(-1, 16)
        values = np.array([r.value for r in self.rows], np.float32).reshape(-1, 8)
        return Witness(np.array([r.cache for r in self.rows], np.int64), "engine", KvRows((keys,), (values,)))

    def kv_bytes(self) -> dict[str, int]:
        return {"resident": 96 * len(self.rows), "allocated": 96 * self.n_ctx}

    def cancel(self) -> None:
        self.cancelled = True

    def close(self) -> None:
        self.closed = True

    # -- what this engine cannot do ---------------------------------------------------------------------------------

    def _cannot(self, operation: str) -> Any:
        raise UnsupportedOperation(operation, WHY)

    def truncate(self, tape_stop: int) -> None:
        self._cannot("truncate")

    def evict(self, start: int, stop: int) -> None:
        self._cannot("evict")

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        self._cannot("shift")

    def export_block(self, start: int, stop: int) -> bytes:
        return bytes(self._cannot("export_block"))

    def admit(self, block: bytes, start: int, cache_start: int) -> None:
        self._cannot("admit")

    def snapshot(self) -> bytes:
        return bytes(self._cannot("snapshot"))

    def restore(self, snapshot: bytes) -> None:
        self._cannot("restore")

    def score(self, tokens: Sequence[int], tape_start: int, layers: Sequence[int] | None = None) -> Any:
        return self._cannot("score")

    def take_mass(self) -> Any:
        return self._cannot("take_mass")


def open_backend(config: SessionConfig) -> Backend:
    """What `--kvtape-backend` is given: a function from a configuration to an open session."""
    return Backend(config)
