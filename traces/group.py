"""Consecutive batches on their way into one transaction: group commit.

    batch k      rows of each table, canonical order      a link of the chain of its own
    batch k+1    ...                                      over the link before
    group        all rows, batch after batch              one INSERT a table, one COMMIT, one head

What it costs to begin, commit and acknowledge a transaction is paid once, however many batches wait. A crash leaves
all of a group or nothing, hence whole batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from kvtape.traces.canonical import is_in_canonical_order
from kvtape.traces.chain import batch_summary, link, span_list
from kvtape.traces.database import insert_rows
from kvtape.traces.schema import EVENTS, ROW_TABLES, TABLES, Table
from kvtape.traces.sidecar import Head, session_key
from kvtape.traces.stretches import Stretches

__all__ = ["Group", "group_batches", "insert_batch"]

Link = tuple[int, int, str, str, bytes, bytes]
"""A row of `batches`."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows by table, with the number of their `batch`; the rows of `batches`; the head once all is committed."""

    tables: Mapping[str, pa.Table]
    links: Sequence[Link]
    head: Head


def group_batches(head: Head, batches: Sequence[Mapping[str, pa.Table]]) -> Group:
    """The batches (tables by name, columns as in `schema.arrow_schema`) that follow `head`, numbered and hashed."""
    first = head.batch + 1
    tables = {t.name: rows for t in ROW_TABLES if (rows := _together(t, batches, first)) is not None}
    bounds = {name: _bounds(name, batches) for name in tables}
    stretches = {name: Stretches(TABLES[name].chained, rows) for name, rows in tables.items()}
    links: list[Link] = []
    sessions, digest = dict(head.sessions), bytes.fromhex(head.digest)
    for i in range(len(batches)):
        here = {name: found[i] for name, found in bounds.items() if found[i][1] > found[i][0]}
        start, stop = here.get(EVENTS.name, (0, 0))
        spans = span_list(tables[EVENTS.name].slice(start, stop - start)) if stop else []
        digests = {name: (stop - start, stretches[name].digest(start, stop)) for name, (start, stop) in here.items()}
        summary = batch_summary(digests, spans)
        previous, digest = digest, link(digest, first + i, summary)
        links.append((first + i, summary.rows, summary.spans, summary.tables, previous, digest))
        sessions.update({session_key(run, session): last for run, session, _, last in spans})
    rows = head.rows + sum(row[1] for row in links)
    after = replace(head, batch=head.batch + len(batches), digest=digest.hex(), rows=rows, sessions=sessions)
    return Group(tables, links, after)


def insert_batch(connection: duckdb.DuckDBPyConnection, tables: Mapping[str, pa.Table], row: Link) -> None:
    """Append one batch, its rows by table (columns as in `schema.arrow_schema`) and its `row` of `batches`."""
    for name, rows in tables.items():
        insert_rows(connection, name, _numbered(rows, row[0]))
    connection.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)", row)


def _together(table: Table, batches: Sequence[Mapping[str, pa.Table]], first: int) -> pa.Table | None:
    """The table's rows of all batches with their batch number, batch after batch, each in canonical order; None when
    there are none."""
    parts = [
        _numbered(rows, number)
        for number, batch in enumerate(batches, first)
        if (rows := batch.get(table.name)) is not None and rows.num_rows
    ]
    if not parts:
        return None
    together = pa.concat_tables(parts).combine_chunks()
    if is_in_canonical_order(table, together, "batch"):
        return together
    return together.take(pc.sort_indices(together, [(name, "ascending") for name in ("batch", *table.order)]))


def _numbered(rows: pa.Table, batch: int) -> pa.Table:
    return rows.append_column("batch", pa.repeat(pa.scalar(batch, pa.uint64()), rows.num_rows))


def _bounds(name: str, batches: Sequence[Mapping[str, pa.Table]]) -> list[tuple[int, int]]:
    """Where the rows of each batch begin and end among those of all."""
    return list(pairwise(accumulate((b[name].num_rows if name in b else 0 for b in batches), initial=0)))
