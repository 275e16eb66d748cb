"""A complete backend in plain Python: the smallest example of `protocol.Backend`, and what the Session is tested on.

Its rows are real: keys and values of a tiny decoder (`toy_model`), rotated, removed, moved and read back like an
engine's, so that its witness says which token stands where, without a word from its books.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvtape.backends.envelope import unwrap, wrap
from kvtape.backends.errors import (
    Cancelled,
    ContextOverflow,
    EngineFault,
    FatalClass,
    InputRejected,
    SessionClosed,
    StateRejected,
    UnsupportedOperation,
    UsageError,
)
from kvtape.backends.protocol import (
    AttentionMass,
    Choose,
    Computed,
    DecodeRun,
    KvRows,
    Logits,
    ModelFacts,
    SessionConfig,
    Witness,
)
from kvtape.backends.verifying import Keep, Verified, check_kept, check_one_call, no_verifying_reason
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.layout import Layout, Segment, normalise
from kvtape.planner.ranges import RangeSet
from kvtape.testing.toy_model import N_LAYERS, N_VOCAB, ROW_BYTES, ToyMemory, compute
from kvtape.testing.toy_scores import MassAccount, probe

__all__ = ["TOY_CAPABILITIES", "ToyBackend", "ToyRow", "open_toy"]

TOY_CAPABILITIES = Capabilities(
    remove_tail=True,
    remove_middle=True,
    position_shift=True,
    cold_store=True,
    recompute_range=True,
    snapshot_state=True,
)
"""All that the toy can do; `attention_scores` comes with the option `scores=on`."""


@dataclass(frozen=True, slots=True, order=True)
class ToyRow:
    """One row in the books: its cache and tape position, and the token it was computed for."""

    cache: int
    tape: int
    token: int


def open_toy(config: SessionConfig) -> ToyBackend:
    """A session as an engine opens it: cold store and scores only where `config` asks for them."""
    unknown = sorted(set(config.options) - {"scores"})
    if unknown or config.options.get("scores", "off") not in ("on", "off"):
        raise UsageError(f"toy option {config.options}: allowed is scores=on|off")
    flags = {"cold_store": config.cold_budget_tokens > 0, "attention_scores": config.options.get("scores") == "on"}
    known = {f: getattr(TOY_CAPABILITIES, f) for f in TOY_CAPABILITIES.__dataclass_fields__}
    return ToyBackend(config, Capabilities(**known | flags))


class ToyBackend:
    """One session of the toy model. Every capability is a plain switch, so that any combination can be tried.

    Hooks for tests: `faults` names operations that fail in the engine when they are next called, `abort_next` makes
    the next computation fail, `cancel_after` cancels when so many prefills have been done, `operations` lists what was
    called, `closed` counts calls of `close`.
    """

    name = "toy"
    engine_version = "1"
    verify_margin = 0.0

    def __init__(
        self, config: SessionConfig, capabilities: Capabilities = TOY_CAPABILITIES, *, n_ctx_train: int = 1 << 20
    ) -> None:
        self.facts = ModelFacts("toy", "toy/1", "toy", N_VOCAB, n_ctx_train, frozenset())
        self.config = config
        self.n_ctx = config.n_ctx
        self.capabilities = capabilities
        self.faults: set[str] = set()
        self.cancel_after: int | None = None
        self.operations: list[str] = []
        self.closed = 0
        self._memory = ToyMemory.empty()
        self._books: tuple[ToyRow, ...] = ()
        self._mass = MassAccount()
        self._fault: EngineFault | None = None
        self._abort = False

    @property
    def rows(self) -> tuple[ToyRow, ...]:
        """The books row by row, in cache order."""
        return self._books

    def refusal(self, operation: str) -> str | None:
        """See `protocol.Backend`; raises UsageError for a name that is no capability."""
        if operation not in Capabilities.__dataclass_fields__:
            raise UsageError(f"{operation!r} is no capability")
        return None if getattr(self.capabilities, operation) else f"this toy was opened without {operation}"

    # -- computing ------------------------------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int], tape_start: int) -> Computed:
        with self._operation("prefill"):
            self._check_new(tokens, range(tape_start, tape_start + len(tokens)))
            self._check_cancelled()
            return self._compute(tokens, range(tape_start, tape_start + len(tokens)), self._next())

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        with self._operation("decode"):
            if n < 0:
                raise InputRejected(f"cannot decode {n} tokens")
            self._check_tape(range(tape_start, tape_start + n))
            self._check_cancelled()
            out: list[int] = []
            while len(out) < n:
                if len(self._books) >= min(limit, self.n_ctx):
                    return DecodeRun(tuple(out), logits, len(out), "limit")
                token = choose(logits)
                if token is None:
                    return DecodeRun(tuple(out), logits, len(out), "chosen_none")
                at = tape_start + len(out)
                self._check_new([token], range(at, at + 1))
                logits = self._compute([token], range(at, at + 1), self._next()).logits
                out.append(token)
            return DecodeRun(tuple(out), logits, len(out), "n")

    def verify_refusal(self) -> str | None:
        """See `verifying.Verifier`."""
        return no_verifying_reason(self.capabilities, self.refusal)

    def verify(self, tokens: Sequence[int], tape_start: int, keep: Keep) -> Verified:
        """See `verifying.Verifier`."""
        with self._operation("verify"):
            if (why := self.verify_refusal()) is not None:
                raise UnsupportedOperation("verify", why)
            tape = range(tape_start, tape_start + len(tokens))
            self._check_new(tokens, tape)
            check_one_call(len(tokens), self.config.chunk)
            self._check_cancelled()
            each = [self._compute([token], [tape[i]], self._next()).logits for i, token in enumerate(tokens)]
            kept = check_kept(keep(np.stack(each)), len(tokens))
            for row in [r for r in self._books if r.tape >= tape_start + kept and r.tape in tape]:
                self._remove(row.cache, row.cache + 1)
            return Verified.of(kept, np.stack(each), 1)

    def refill(self, tokens: Sequence[int], start: int, cache_start: int) -> Computed:
        with self._operation("refill"):
            self._need("refill", "recompute_range")
            self._check_new(tokens, range(start, start + len(tokens)))
            self._check_free(cache_start, len(tokens))
            self._check_cancelled()
            return self._compute(tokens, range(start, start + len(tokens)), cache_start)

    def rebuild(self, ranges: RangeSet, tokens: Sequence[int]) -> Computed:
        with self._operation("rebuild"):
            tape = [p for r in ranges for p in range(r.start, r.stop)]
            if len(tape) != len(tokens):
                raise InputRejected(f"{len(tokens)} tokens for ranges of {len(tape)}")
            if len(tape) > self.n_ctx:
                raise ContextOverflow(len(tape), self.n_ctx, "the survivors do not fit")
            self._check_tokens(tokens)
            self._check_cancelled()
            self._memory, self._books = ToyMemory.empty(), ()
            return self._compute(tokens, tape, 0)

    def _compute(self, tokens: Sequence[int], tape: Sequence[int], cache_start: int) -> Computed:
        logits = np.empty(0, np.float32)
        for i, token in enumerate(tokens):
            if self._abort:
                raise EngineFault(FatalClass.PREFILL_FAILED, "the computation was aborted")
            step = compute(self._memory, token, cache_start + i)
            self._memory, logits = step.memory, step.logits
            self._note(ToyRow(cache_start + i, tape[i], token))
            if self.capabilities.attention_scores:
                self._mass = self._mass.pay(step, {r.cache: r.tape for r in self._books})
        piece = self.config.chunk or len(tokens)
        return Computed(logits, -(-len(tokens) // piece) if piece else 0, len(tokens))

    # -- surgery --------------------------------------------------------------------------------------------------

    def truncate(self, tape_stop: int) -> None:
        with self._operation("truncate"):
            if tape_stop < 0:
                raise InputRejected(f"cannot truncate at {tape_stop}")
            gone = [r for r in self._books if r.tape >= tape_stop]
            if gone:
                tail = self._books[-len(gone) :] == tuple(gone)
                self._need("truncate", "remove_tail" if tail else "remove_middle")
            for row in gone:
                self._remove(row.cache, row.cache + 1)
            self._mass = self._mass.cut(tape_stop)

    def evict(self, start: int, stop: int) -> None:
        with self._operation("evict"):
            self._need("evict", "remove_middle")
            at = self._run(start, stop)
            self._remove(at, at + stop - start)

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        with self._operation("shift"):
            self._need("shift", "position_shift")
            books = [r if not cache_start <= r.cache < cache_stop else _moved(r, delta) for r in self._books]
            where = [r.cache for r in books]
            if min(where, default=0) < 0 or len(set(where)) < len(where):
                raise InputRejected(f"rows at [{cache_start}, {cache_stop}) cannot move by {delta}")
            self._books = tuple(sorted(books))
            self._memory = self._memory.moved(cache_start, cache_stop, delta)

    def _remove(self, cache_start: int, cache_stop: int) -> None:
        self._books = tuple(r for r in self._books if not cache_start <= r.cache < cache_stop)
        self._memory = self._memory.without(cache_start, cache_stop)

    # -- saved states ---------------------------------------------------------------------------------------------

    def export_block(self, start: int, stop: int) -> bytes:
        with self._operation("export"):
            self._need("export_block", "cold_store")
            at = self._run(start, stop)
            rows = [r for r in self._books if start <= r.tape < stop]
            return self._wrap("block", rows, self._memory.at(at, at + stop - start))

    def admit(self, block: bytes, start: int, cache_start: int) -> None:
        with self._operation("admit"):
            self._need("admit", "cold_store")
            rows, memory = self._unwrap("block", block)
            if not rows or rows[0].tape != start:
                raise StateRejected(f"the block does not begin at tape position {start}")
            self._check_new([r.token for r in rows], [r.tape for r in rows])
            self._check_free(cache_start, len(rows))
            delta = cache_start - rows[0].cache
            if delta:
                self._need("admit at another cache position", "position_shift")
                memory = memory.moved(rows[0].cache, rows[-1].cache + 1, delta)
            self._memory = self._memory.joined(memory)
            for row in rows:
                self._note(_moved(row, delta))

    def snapshot(self) -> bytes:
        with self._operation("snapshot"):
            self._need("snapshot", "snapshot_state")
            return self._wrap("snapshot", self._books, self._memory)

    def restore(self, snapshot: bytes) -> None:
        with self._operation("restore"):
            self._need("restore", "snapshot_state")
            rows, memory = self._unwrap("snapshot", snapshot)
            if len(rows) > self.n_ctx:
                raise StateRejected(f"the snapshot has {len(rows)} rows, this session's context is {self.n_ctx}")
            self._books, self._memory, self._mass = rows, memory, MassAccount()

    def _wrap(self, kind: str, rows: Sequence[ToyRow], memory: ToyMemory) -> bytes:
        books = [[r.cache, r.tape, r.token] for r in rows]
        return wrap(self._identity(kind) | {"rows": books}, memory.tobytes())

    def _unwrap(self, kind: str, blob: bytes) -> tuple[tuple[ToyRow, ...], ToyMemory]:
        header, payload = unwrap(blob, self._identity(kind))
        return tuple(ToyRow(*row) for row in header["rows"]), ToyMemory.frombytes(payload)

    def _identity(self, kind: str) -> dict[str, object]:
        return {"kind": kind, "engine": self.name, "fingerprint": self.facts.fingerprint}

    # -- looking --------------------------------------------------------------------------------------------------

    def score(self, tokens: Sequence[int], tape_start: int, layers: Sequence[int] | None = None) -> AttentionMass:
        with self._operation("score"):
            self._need("score", "attention_scores")
            self._check_tokens(tokens)
            asked = tuple(range(N_LAYERS)) if layers is None else tuple(sorted(set(layers)))
            if not asked or asked[0] < 0 or asked[-1] >= N_LAYERS:
                raise InputRejected(f"layers {layers}: the model has {N_LAYERS}")
            before = {r.cache: r.tape for r in self._books if r.tape < tape_start}
            window = [r.cache for r in self._books if tape_start <= r.tape < tape_start + len(tokens)]
            if len(window) not in (0, len(tokens)):
                raise InputRejected(f"tape positions from {tape_start} on are resident in part")
            at = sorted(window) or range(self._next(), self._next() + len(tokens))
            memory = self._memory.take(np.isin(self._memory.positions, list(before)))
            return probe(memory, tokens, at, before, asked)

    def take_mass(self) -> AttentionMass:
        with self._operation("take_mass"):
            self._need("take_mass", "attention_scores")
            taken, self._mass = self._mass.of([r.tape for r in self._books]), MassAccount()
            return taken

    def books(self) -> Layout:
        self._check_usable()
        return normalise(Segment(r.tape, 1, r.cache) for r in self._books)

    def witness(self) -> Witness:
        """Copies of the rows, in the order in which they came."""
        self._check_usable()
        m = self._memory
        rows = KvRows(tuple(k.copy() for k in m.keys), tuple(v.copy() for v in m.values))
        return Witness(m.positions.copy(), "engine", rows)

    def kv_bytes(self) -> dict[str, int]:
        self._check_usable()
        return {"resident": len(self._books) * ROW_BYTES, "allocated": self.n_ctx * ROW_BYTES}

    def cancel(self) -> None:
        self.cancel_after = 0

    def abort_next(self) -> None:
        self._abort = True

    def close(self) -> None:
        self.closed += 1

    # -- guards ---------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self.closed:
            raise SessionClosed("this toy was closed; open another")
        if self._fault is not None:
            raise self._fault

    @contextmanager
    def _operation(self, name: str) -> Iterator[None]:
        """All or nothing: an operation that raises leaves books and memory as they were, a fault ends the session."""
        self._check_usable()
        self.operations.append(name)
        before = self._books, self._memory, self._mass
        try:
            if name in self.faults:
                fault = FatalClass.DECODE_FAILED if name in ("decode", "verify") else FatalClass.PREFILL_FAILED
                raise EngineFault(fault, f"planted in {name}")
            yield
        except EngineFault as fault:
            self._fault = fault
            raise
        except BaseException:
            self._books, self._memory, self._mass = before
            raise

    def _check_cancelled(self) -> None:
        if self.cancel_after is None:
            return
        if self.cancel_after <= 0:
            self.cancel_after = None
            raise Cancelled("cancelled; nothing was computed")
        self.cancel_after -= 1

    def _need(self, operation: str, capability: str) -> None:
        why = self.refusal(capability)
        if why is not None:
            raise UnsupportedOperation(operation, why)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not isinstance(token, int | np.integer) or not 0 <= token < N_VOCAB:
                raise InputRejected(f"token {token!r} is not in the vocabulary of {N_VOCAB}")

    def _check_tape(self, tape: Sequence[int]) -> None:
        taken = {r.tape for r in self._books} & set(tape)
        if taken or (len(tape) and tape[0] < 0):
            raise InputRejected(f"tape positions from {tape[0]} on are not free")

    def _check_new(self, tokens: Sequence[int], tape: Sequence[int]) -> None:
        if not len(tokens):
            raise InputRejected("no tokens")
        self._check_tokens(tokens)
        self._check_tape(tape)
        needed = len(self._books) + len(tokens)
        if needed > self.n_ctx:
            raise ContextOverflow(needed, self.n_ctx, "evict first")

    def _check_free(self, cache_start: int, n: int) -> None:
        if cache_start < 0 or any(cache_start <= r.cache < cache_start + n for r in self._books):
            raise InputRejected(f"cache positions [{cache_start}, {cache_start + n}) are not free")

    def _run(self, start: int, stop: int) -> int:
        """Where `[start, stop)`, one run in tape and cache, begins in the cache."""
        rows = [r for r in self._books if start <= r.tape < stop]
        if start >= stop or [r.tape for r in rows] != list(range(start, stop)):
            raise InputRejected(f"tape positions [{start}, {stop}) are not one resident run")
        if rows[-1].cache - rows[0].cache != len(rows) - 1:
            raise InputRejected(f"tape positions [{start}, {stop}) are not contiguous in the cache")
        return rows[0].cache

    def _next(self) -> int:
        return self._books[-1].cache + 1 if self._books else 0

    def _note(self, row: ToyRow) -> None:
        self._books = tuple(sorted((*self._books, row)))


def _moved(row: ToyRow, delta: int) -> ToyRow:
    return ToyRow(row.cache + delta, row.tape, row.token)
