"""The logical digest: two recordings of one run have the same one.

Over the `logical` columns only: no run ids, times, batch numbers, engine-dependent sizes or keyed hashes; rows of each
table by session and seq.
"""

from __future__ import annotations

import hashlib

import duckdb

from kvtape.traces.canonical import table_bytes
from kvtape.traces.query import empty_columns, select_arrow
from kvtape.traces.schema import ROW_TABLES

__all__ = ["logical_digest"]

_CHUNK_ROWS = 65_536
"""Part of the definition: rows are hashed in chunks of this many."""


def logical_digest(connection: duckdb.DuckDBPyConnection, run_id: str) -> str:
    """SHA-256 hex over the run's rows; see the module."""
    digest = hashlib.sha256(b"kvtape logical digest 1")
    for table in ROW_TABLES:
        fields = [f for f in table.fields if f.logical]
        unread = {f.name for f in table.fields if not f.logical} | set(empty_columns(connection, table))
        rows = select_arrow(connection, table, "run_id = ?", [run_id], empty=sorted(unread))
        if table.since > 1 and not rows.num_rows:
            continue  # as in logs that do not have the table
        digest.update(f"{table.name} {rows.num_rows}".encode())
        for start in range(0, rows.num_rows, _CHUNK_ROWS):
            for chunk in table_bytes(fields, rows.slice(start, _CHUNK_ROWS)):
                digest.update(chunk)
    return digest.hexdigest()
