"""The fault matrix: each class of failure, on each engine, in each operation: provoked, injected, or why it cannot be.

`docs/contract.md` is written from this table, and `test_fault_matrix.py` runs every cell that can happen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvtape.backends.envelope import unwrap, wrap
from kvtape.backends.errors import FatalClass
from kvtape.backends.llama.context import LIVE
from kvtape.backends.openvino.runner import Runner, StateFailed
from kvtape.backends.openvino.scores import MassAccount
from kvtape.backends.reference.model.pages import PageStore
from kvtape.backends.session import Session
from support.fault_plays import PLAYS
from support.injector import Injector

__all__ = ["CELLS", "ENGINE_NAMES", "OPERATIONS", "Cell", "Fault", "Key", "Provocation", "cells_of"]

ENGINE_NAMES = ("llama", "openvino", "reference")
OPERATIONS = ("open", *PLAYS)
Key = tuple[FatalClass, str, str]
"""Class, engine, operation."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What a provocation works on: the session, its real backend, a seed, and pytest's way to undo a patch."""

    session: Session
    backend: Any
    operation: str
    seed: int
    patch: pytest.MonkeyPatch


Provocation = Callable[[Fault], object]


@dataclass(frozen=True, slots=True)
class Cell:
    """`how`: provoked, injected or cannot happen; `what` happens to the engine, or why it cannot; `cause`: of the text
    of the recorded cause."""

    how: str
    what: str
    provoke: Provocation | None = None
    cause: str = ""


ALLOC, PREFILL, DECODE = FatalClass.ALLOCATOR_EXHAUSTED, FatalClass.PREFILL_FAILED, FatalClass.DECODE_FAILED
STATE, LOST, STREAM = FatalClass.STATE_RESTORE_FAILED, FatalClass.DEVICE_LOST, FatalClass.STREAM_NOT_REVERSIBLE

# -- what is done to a real engine -----------------------------------------------------------------------------------


def _abort(f: Fault) -> None:
    f.backend.abort_next()


def _fill_cells(f: Fault) -> None:
    """Rows that the books do not know of take every cell that is left."""
    context = f.backend._context
    left = context.n_ctx - f.session.resident.n_tokens
    while left:
        n = min(left, f.backend.config.chunk)
        assert context.decode(np.full(n, 5, np.int32), context.position_max(LIVE) + 1, LIVE, want_logits=False) == 0
        left -= n


def _lose_a_row(f: Fault) -> None:
    """A row goes behind the backend's back: one that the operation reads, where it reads some."""
    row = 5 if f.operation == "export_block" else 10
    assert f.backend._context.remove(LIVE, row, row + 1)


def _lose_a_row_of_one_layer(f: Fault) -> None:
    """A row of the last layer alone; one that the operation reads, where it reads some."""
    row = 5 if f.operation == "export_block" else 10
    f.backend._surgery.layers[-1].remove(row, row + 1)


def _no_memory_for_a_row(f: Fault) -> None:
    """In the last layer, with the rows of the others already there."""
    real, layers = PageStore.put, [0]

    def put(self: PageStore, *rows: Any) -> None:
        layers[0] += 1
        if layers[0] == f.backend._weights.architecture.n_layer:
            raise MemoryError
        real(self, *rows)

    f.patch.setattr(PageStore, "put", put)


def _truncate_the_state(f: Fault) -> None:
    """Half a state in a whole envelope: only the engine finds out, with its cache already cleared."""
    saved = f.session._snapshots[0]
    header, payload = unwrap(saved.blob, {})
    f.session._snapshots[0] = dataclasses.replace(saved, blob=wrap(header, payload[: len(payload) // 2]))


def _no_memory_in_inference(f: Fault) -> None:
    def run(*_: Any) -> None:
        raise MemoryError

    f.patch.setattr(Runner, "_run", run)


def _state_write_refused(f: Fault) -> None:
    real = Runner.load

    def load(*_: Any, **__: Any) -> None:
        f.patch.setattr(Runner, "load", real)  # siblings are carried over after this
        raise StateFailed("injected: the runtime refuses the state")

    f.patch.setattr(Runner, "load", load)


def _no_memory_for_scores(f: Fault) -> None:
    def settled(*_: Any) -> None:
        raise MemoryError

    f.patch.setattr(MassAccount, "settled", settled)


def _unforeseen(f: Fault) -> None:
    Injector(f.backend, f.seed).arm(f.operation, RuntimeError("injected: nobody foresaw this"))


def _sibling_takes_the_model_along(f: Fault) -> None:
    """Another session of the compiled model fails, and the model cannot be made again."""
    compiled = f.backend._state.compiled
    f.patch.setattr(compiled, "_blob", b"no blob")
    compiled.revive()


ABORTED = Cell("provoked", "the engine's own abort callback fires inside the call", _abort, "llama_decode returned 2")
FULL = Cell("provoked", "every native cell is taken", _fill_cells, "llama_decode returned 1")
ROW_LOST = Cell("provoked", "the engine lost a row behind the backend's back", _lose_a_row, "rows|differ")
TRUNCATED = Cell("provoked", "a truncated state in a whole envelope", _truncate_the_state, "does not accept")
MASK = Cell("provoked", "the runtime refuses the call (a mask of another width)", _abort, "attention_mask|Check|shape")
SPOILED = Cell("provoked", "the runtime refuses the last layer's state after the others were set", _abort, "")
STRANDED = Cell(
    "provoked",
    "a sibling failed and the compiled model cannot be made again",
    _sibling_takes_the_model_along,
    "could not be made again",
)
NO_MEMORY = Cell("injected", "the inference raises MemoryError", _no_memory_in_inference, "")
NO_STATE = Cell("injected", "the runtime refuses a state write", _state_write_refused, "refuses the state")
NO_SCORES = Cell("injected", "no memory for the attention scores", _no_memory_for_scores, "attention scores")
NO_ANSWER = Cell("provoked", "the feed-forward of the last layer gives no answer", _abort, "gave no answer")
LAYER_LOST = Cell(
    "provoked", "the last layer lost a row behind the books' back", _lose_a_row_of_one_layer, "differ from"
)
NO_ROW = Cell("injected", "no memory for the rows of the last layer", _no_memory_for_a_row, "no memory for the rows")
UNFORESEEN = Cell("injected", "an exception that the backend did not foresee", _unforeseen, "nobody foresaw this")

HAPPENS: dict[str, dict[str, dict[FatalClass, Cell]]] = {
    "llama": {
        "prefill": {PREFILL: ABORTED, ALLOC: FULL},
        "decode_until": {DECODE: ABORTED, ALLOC: FULL},
        "refill": {PREFILL: ABORTED, ALLOC: FULL},
        "rebuild": {PREFILL: ABORTED, STREAM: UNFORESEEN},
        "score": {PREFILL: ABORTED, ALLOC: FULL, STREAM: UNFORESEEN},
        "truncate": {STREAM: ROW_LOST, PREFILL: UNFORESEEN},
        "evict": {STREAM: ROW_LOST},
        "shift": {STREAM: ROW_LOST},
        "export_block": {STREAM: ROW_LOST},
        "take_mass": {STREAM: UNFORESEEN},
        "admit": {STATE: ROW_LOST, STREAM: UNFORESEEN},
        "snapshot": {STATE: ROW_LOST, STREAM: UNFORESEEN},
        "restore": {STATE: TRUNCATED},
    },
    "openvino": {
        "prefill": {PREFILL: MASK, ALLOC: NO_MEMORY},
        "decode_until": {DECODE: MASK, ALLOC: NO_MEMORY},
        "refill": {PREFILL: MASK, ALLOC: NO_MEMORY, STATE: NO_STATE},
        "rebuild": {PREFILL: MASK, ALLOC: NO_MEMORY, STATE: NO_STATE, STREAM: UNFORESEEN},
        "score": {PREFILL: MASK, ALLOC: NO_MEMORY, STATE: NO_STATE, STREAM: UNFORESEEN},
        "truncate": {STATE: SPOILED, PREFILL: UNFORESEEN},
        "evict": {STATE: SPOILED, STREAM: UNFORESEEN},
        "shift": {STATE: SPOILED, STREAM: UNFORESEEN},
        "export_block": {STREAM: UNFORESEEN},
        "take_mass": {ALLOC: NO_SCORES, STREAM: UNFORESEEN},
        "admit": {STATE: SPOILED, STREAM: UNFORESEEN},
        "snapshot": {STREAM: UNFORESEEN},
        "restore": {STATE: SPOILED},
    },
    "reference": {
        "prefill": {PREFILL: NO_ANSWER, ALLOC: NO_ROW},
        "decode_until": {DECODE: NO_ANSWER, ALLOC: NO_ROW},
        "refill": {PREFILL: NO_ANSWER, ALLOC: NO_ROW},
        "rebuild": {PREFILL: NO_ANSWER, ALLOC: NO_ROW, STREAM: UNFORESEEN},
        "score": {PREFILL: NO_ANSWER, ALLOC: NO_ROW, STREAM: UNFORESEEN},
        "truncate": {STREAM: LAYER_LOST, PREFILL: UNFORESEEN},
        "evict": {STREAM: LAYER_LOST},
        "shift": {STREAM: LAYER_LOST},
        "export_block": {STREAM: LAYER_LOST},
        "take_mass": {STREAM: UNFORESEEN},
        "admit": {STATE: LAYER_LOST, STREAM: UNFORESEEN},
        "snapshot": {STATE: LAYER_LOST, STREAM: UNFORESEEN},
        "restore": {STATE: NO_ROW},
    },
}
"""What can happen; everything else cannot, for the reason that `_cannot` gives."""
for _operation in PLAYS:
    HAPPENS["openvino"][_operation][LOST] = STRANDED


def _cannot(fatal: FatalClass, engine: str, operation: str) -> str:
    if operation == "open":
        return "there is no session yet that could be poisoned: refused with a typed error, see below"
    if fatal is LOST:
        return "the device is this process: its death takes the session along; in a host it can happen, see below"
    if fatal is ALLOC and (engine, operation) == ("llama", "rebuild"):
        return "every cell is freed before, and the survivors are fewer than the cells"
    if fatal is ALLOC and operation not in ("prefill", "decode_until", "refill", "rebuild", "score"):
        return "it computes no row, and memory that a copy needs is part of its own class"
    names = ", ".join(sorted(c for c in HAPPENS[engine][operation]))
    return f"a failure here is one of: {names}"


def cells_of(fatal: FatalClass, engine: str, operation: str) -> Cell:
    """The cell, whatever it is."""
    found = HAPPENS[engine].get(operation, {}).get(fatal)
    return found or Cell("cannot happen", _cannot(fatal, engine, operation))


CELLS: dict[Key, Cell] = {
    (fatal, engine, operation): cells_of(fatal, engine, operation)
    for fatal in FatalClass
    for engine in ENGINE_NAMES
    for operation in OPERATIONS
}
