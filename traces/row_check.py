"""What happened to the rows of one table in one batch, when their digest is not the recorded one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from kvtape.traces.canonical import in_canonical_order, table_digest
from kvtape.traces.chain import BatchSummary, recorded_spans
from kvtape.traces.findings import Finding, FindingKind
from kvtape.traces.schema import EVENTS, Table

__all__ = ["are_recorded", "check_rows"]

_SHOWN = 5


def check_rows(table: Table, batch: int, summary: BatchSummary, rows: pa.Table) -> Iterator[Finding]:
    """Findings about `rows` (canonical order) of `table`; none when they are what the batch recorded."""
    recorded = _recorded(summary, table)
    if recorded is None:
        if rows.num_rows:
            detail = f"batch {batch} recorded no {table.name}, there are {rows.num_rows}"
            yield Finding(FindingKind.EXTRA, detail, batch, table.name)
        return
    count, digest = recorded
    if rows.num_rows == count and (not count or table_digest(table.chained, rows).hex() == digest):
        return
    if rows.num_rows < count:
        which = _missing_seqs(summary, rows) if table is EVENTS else ""
        detail = f"batch {batch}: {count - rows.num_rows} of {count} rows of {table.name} are missing{which}"
        yield Finding(FindingKind.MISSING, detail, batch, table.name)
    elif rows.num_rows > count:
        repeated = _repeated(table, rows)
        kind = FindingKind.REPEATED if repeated else FindingKind.EXTRA
        detail = f"batch {batch}: {rows.num_rows} rows of {table.name}, {count} were recorded{repeated}"
        yield Finding(kind, detail, batch, table.name)
    elif table is EVENTS and (swapped := _reordered(rows, digest)):
        detail = f"batch {batch}: rows of events stand in another order: {swapped}"
        yield Finding(FindingKind.REORDERED, detail, batch, table.name)
    else:
        detail = f"batch {batch}: rows of {table.name} were changed ({_name_rows(table, rows)})"
        yield Finding(FindingKind.ALTERED, detail, batch, table.name)


def are_recorded(table: Table, summary: BatchSummary, count: int, digest: Callable[[], bytes]) -> bool:
    """Whether `count` rows with this digest are what the batch recorded of the table."""
    recorded = _recorded(summary, table)
    if recorded is None or recorded[0] != count:
        return recorded is None and count == 0
    return count == 0 or digest().hex() == recorded[1]


@functools.lru_cache(maxsize=1024)
def _tables(text: str) -> dict[str, list[int | str]]:
    found: dict[str, list[int | str]] = json.loads(text)
    return found


def _recorded(summary: BatchSummary, table: Table) -> tuple[int, str] | None:
    try:
        entry = _tables(summary.tables).get(table.name)
        return None if entry is None else (int(entry[0]), str(entry[1]))
    except (ValueError, TypeError, AttributeError, IndexError):
        return 0, ""  # the batch row itself is damaged, which the chain reports


def _missing_seqs(summary: BatchSummary, rows: pa.Table) -> str:
    there = {(r["run_id"], r["session_id"], r["seq"]) for r in rows.select(list(EVENTS.order)).to_pylist()}
    gone = []
    for run, session, first, last in recorded_spans(summary):
        gone += [f"{run}/{session} seq {q}" for q in range(first, last + 1) if (run, session, q) not in there]
    return _listed(gone)


def _repeated(table: Table, rows: pa.Table) -> str:
    keys = [tuple(r.values()) for r in rows.select(list(table.order)).to_pylist()]
    again = [k for k, following in pairwise(keys) if k == following]
    return _listed(["/".join(map(str, k[:2])) + "".join(f" {c} {v}" for c, v in _after(table, k)) for k in again])


def _after(table: Table, key: tuple[object, ...]) -> list[tuple[str, object]]:
    return list(zip(table.order[2:], key[2:], strict=True))


def _reordered(rows: pa.Table, digest: str) -> str:
    """The seqs that changed places, if handing them out in the order of time gives the recorded digest."""
    by_time = rows.take(
        pc.sort_indices(
            rows, [("run_id", "ascending"), ("session_id", "ascending"), ("at_ns", "ascending"), ("seq", "ascending")]
        )
    )
    index = by_time.schema.get_field_index("seq")
    put_back = by_time.set_column(index, "seq", rows.column("seq"))
    if table_digest(EVENTS.chained, in_canonical_order(EVENTS, put_back)).hex() != digest:
        return ""
    now, then = by_time.column("seq").to_pylist(), rows.column("seq").to_pylist()
    moved = [f"seq {old} stands at {new}" for new, old in zip(now, then, strict=True) if new != old]
    return ", ".join(moved[:_SHOWN])


def _name_rows(table: Table, rows: pa.Table) -> str:
    if "seq" not in table.columns:
        return f"{rows.num_rows} rows"
    bounds = rows.group_by(["run_id", "session_id"]).aggregate([("seq", "min"), ("seq", "max")]).to_pylist()
    spans = [f"{b['run_id']}/{b['session_id']} seq {b['seq_min']} to {b['seq_max']}" for b in bounds]
    return "among " + ", ".join(sorted(spans)[:_SHOWN])


def _listed(names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f" ({', '.join(names[:_SHOWN])}{more})"
