"""The terms that the cost of each operation is a sum of: what is counted, and in which unit.

A query over r rows that computes n tokens looks at n*r + n(n+1)/2 of them, so that is the count of the attention
term, for a prefill as for a decode of n tokens; a decode jumps over its tokens for that reason.

Taking rows out, or putting rows between others, is bookkeeping on an engine whose cache is made of cells (llama.cpp);
one whose state can only be written whole (OpenVINO) writes all rows that are there then: `kept_row`, `insert_row` and
`later_row`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvtape.backends.modelled.work import Work, WorkKind

__all__ = ["TERMS", "Term", "counts"]


@dataclass(frozen=True, slots=True)
class Term:
    """One summand: nanoseconds per `unit`, times `count(work)`. `sized`: it grows with what there is to do."""

    name: str
    unit: str
    count: Callable[[Work], float]
    sized: bool = True


def _attended(work: Work) -> float:
    return work.tokens * work.resident + work.tokens * (work.tokens + 1) / 2


SMALL_BATCH: Final = 32
"""Tokens of a call up to which an engine's small-batch kernels may be in use."""

_CALL = Term("call", "ns/call", lambda w: 1.0, sized=False)
_TOKEN = Term("token", "ns/token", lambda w: float(w.tokens))
_SMALL = Term("small_batch_token", f"ns/token of the first {SMALL_BATCH}", lambda w: float(min(w.tokens, SMALL_BATCH)))
_ATTENDED = Term("attended_row", "ns/(token*row)", _attended)
_ROW = Term("resident_row", "ns/row", lambda w: float(w.resident))
_KEPT = Term("kept", "ns/call that leaves rows", lambda w: 1.0 if w.resident > w.tokens else 0.0, sized=False)
_KEPT_ROW = Term("kept_row", "ns/row that stays", lambda w: float(max(0, w.resident - w.tokens)))
_INSERT = Term("insert", "ns/call with rows behind", lambda w: 1.0 if w.behind else 0.0, sized=False)
_INSERT_ROW = Term("insert_row", "ns/row then there", lambda w: float(w.resident + w.tokens) if w.behind else 0.0)
_LATER_ROW = Term("later_row", "ns/row then there", lambda w: float(w.resident + w.tokens))
_BYTE = Term("byte", "ns/byte", lambda w: float(w.n_bytes))
_TURN = Term("pending_shift", "ns/shift", lambda w: 1.0 if w.turned else 0.0, sized=False)
_TURNED = Term("turned_row", "ns/row", lambda w: float(w.turned))
_SCANNED = Term("query_row", "ns/(query*row)", lambda w: float(w.tokens * w.resident))

_COMPUTE = (_CALL, _TOKEN, _SMALL, _ATTENDED, _TURN, _TURNED)
_MOVE = (_CALL, _TOKEN, _KEPT, _KEPT_ROW)
_CARRY = (_CALL, _BYTE, _TURN, _TURNED)

TERMS: Final[dict[WorkKind, tuple[Term, ...]]] = {
    "prefill": _COMPUTE,
    "decode": (_CALL, _TOKEN, _ATTENDED, _TURN, _TURNED),
    "truncate": _MOVE,
    "evict": _MOVE,
    "shift": (_CALL, _TOKEN, _ROW),
    "export": _CARRY,
    "admit": (*_CARRY, _LATER_ROW),
    "refill": (*_COMPUTE, _INSERT, _INSERT_ROW),
    "rebuild": (_CALL, _TOKEN, _SMALL, _ATTENDED),
    "score": (_CALL, _TOKEN, _ROW, _SCANNED),
    "snapshot": _CARRY,
    "restore": _CARRY,
    "plan": (_CALL, _ROW),
    "session": (_CALL,),
}
"""By kind of work, the terms that may take part; a calibration gives those that do not a rate of 0."""


def counts(work: Work) -> tuple[float, ...]:
    """The counts of `work`, in the order of `TERMS[work.kind]`."""
    return tuple(term.count(work) for term in TERMS[work.kind])
