"""One session's events as the columns that `planner.fold_columns` reads, straight from the tables of a log.

No event is made of a row unless the fold asks for it: those that are never folded as columns are fetched together, and
when another one is needed (the fold refuses it, or a run does not fit its state) it and some after it are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvtape.planner.event_columns import NULL, OP_CODES, UNFIT, EventColumns
from kvtape.planner.events import Event, Op
from kvtape.planner.residency_rules import RULES, Effect
from kvtape.planner.table import Ints
from kvtape.traces.schema import quoted

__all__ = ["SINGLY", "session_columns"]

Fetch = Callable[[str], list[Event]]
"""Events of the session, in seq order, for which an SQL condition holds."""

_OTHER = ", ".join(f"'{op}'" for op in Op if RULES[op].effect is Effect.OTHER)
_PLAIN = "way IN ('gap', 'rebased') AND cold IS NOT TRUE"
SINGLY = f"(op IN ({_OTHER}) OR (op = 'evict' AND ({_PLAIN}) IS NOT TRUE))"
"""SQL: an event that is never folded as a column."""

_NUMBERS = ("seq", "turn", "generation", "start", "stop", "n_tokens", "cache_start")


def _number(name: str) -> str:
    column = quoted(name)
    return f"CASE WHEN {column} IS NULL THEN {NULL} WHEN {column} < {2**62} THEN {column}::BIGINT ELSE {UNFIT} END"


_QUERY = f"""
    SELECT op::VARCHAR AS op, {", ".join(f"{_number(name)} AS {quoted(name)}" for name in _NUMBERS)},
        CASE WHEN abs(delta::HUGEINT) < {2**31} THEN delta ELSE 0 END AS delta,
        coalesce(reason = 'suffix', false) AS suffix, coalesce({_PLAIN}, false) AS plain, {SINGLY} AS singly
    FROM events WHERE run_id = ? AND session_id = ?"""


def session_columns(
    connection: duckdb.DuckDBPyConnection, run_id: str, session_id: str, last_seq: int | None, fetch: Fetch
) -> EventColumns:
    """The session's events up to and with `last_seq` (None: all). Raises duckdb.Error."""
    bound, params = ("", []) if last_seq is None else (" AND seq <= ?", [last_seq])
    rows = connection.sql(_QUERY + bound, params=[run_id, session_id, *params]).to_arrow_table()
    values = {name: _plain(rows.column(name)) for name in rows.column_names if name != "op"}
    seqs = values["seq"]
    values["op"] = _op_codes(rows.column("op"))
    if not (seqs[1:] >= seqs[:-1]).all():  # rows lie in this order as they were written
        order = np.argsort(seqs, kind="stable")
        values = {name: found[order] for name, found in values.items()}
    singly = np.flatnonzero(values.pop("singly"))
    return EventColumns(event=_Rows(values["seq"], singly, bound.replace("?", str(last_seq)), fetch), **values)


class _Rows:
    """Row number -> event."""

    def __init__(self, seqs: Ints, singly: npt.NDArray[np.intp], bound: str, fetch: Fetch) -> None:
        self._seqs, self._singly, self._bound, self._fetch = seqs, singly, bound, fetch
        self._found: dict[int, Event] | None = None
        self._window = 32

    def __call__(self, row: int) -> Event:
        if self._found is None:
            self._found = dict(zip(self._singly.tolist(), self._fetch(SINGLY + self._bound), strict=True))
        if row not in self._found:
            self._found.update(self._near(row))
        return self._found[row]

    def _near(self, row: int) -> Iterator[tuple[int, Event]]:
        """The row and those after it, twice as many each time: a log that has no runs is not asked row by row."""
        self._window *= 2
        first, last = self._seqs[row], self._seqs[min(row + self._window, len(self._seqs)) - 1]
        rows = range(int(np.searchsorted(self._seqs, first)), int(np.searchsorted(self._seqs, last, "right")))
        return zip(rows, self._fetch(f"seq BETWEEN {first} AND {last}"), strict=True)


def _plain(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = column.to_numpy()
    return values


def _op_codes(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Raises ValueError for an op that this version does not know."""
    if not len(column):
        return np.zeros(0, np.int64)
    encoded = pc.dictionary_encode(column).unify_dictionaries()
    dictionary = encoded.chunk(0).dictionary.to_pylist()
    codes = np.array([OP_CODES[Op(name)] for name in dictionary], np.int64)
    indices = np.concatenate([chunk.indices.to_numpy() for chunk in encoded.chunks])
    found: npt.NDArray[np.int64] = codes[indices]
    return found
