"""A log as JSON lines, from which `import --format kvtape-jsonl` makes the same log again, digest for digest.

{"table": "meta", "meta": {..}}          what the file is, first
{"table": "events", "run_id": ..}        every row, batch after batch; columns without a value are left out
{"table": "batches", "batch": 1, ..}     after the rows of each batch: their digest
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa

from kvtape.traces.chain_check import StoredBatch, batch_slices, chain_windows, stored_batches
from kvtape.traces.errors import TraceError
from kvtape.traces.reader import Log
from kvtape.traces.schema import ROW_TABLES

__all__ = ["log_lines"]


def log_lines(log: Log) -> Iterator[bytes]:
    """The lines, ends included. Raises TraceError for a log of several parts, which has no chain of its own."""
    if "log_id" not in log.meta:
        raise TraceError(f"{log.path}: several logs read as one; put them together first with `kvtape merge`")
    yield _line("meta", {"meta": log.meta})
    for window in chain_windows(stored_batches(log.connection)):
        slices = {t.name: dict(_by_number(log, t.name, window)) for t in ROW_TABLES}
        for batch in window:
            for table in ROW_TABLES:
                for row in slices[table.name][batch.batch].drop_columns(["batch"]).to_pylist():
                    yield _line(table.name, {k: v for k, v in row.items() if v is not None})
            yield _line("batches", _batch(batch))


def _by_number(log: Log, name: str, window: list[StoredBatch]) -> Iterator[tuple[int, pa.Table]]:
    table = next(t for t in ROW_TABLES if t.name == name)
    for batch, rows in batch_slices(log.connection, table, window):
        yield batch.batch, rows


def _batch(batch: StoredBatch) -> dict[str, Any]:
    return {"batch": batch.batch, "digest": batch.digest.hex()}


def _line(table: str, values: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"table": table, **values}) + b"\n"
