"""Redaction: a new sealed log without content, which still verifies and can still be carried out again.

The chain covers keyed hashes of content and never content itself, so that taking it out changes no digest. What goes:
token ids, and the texts of trials. What stays: which tokens two prompts share (their keyed hashes).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import duckdb

from kvtape.traces.chain_check import check_chain, last_seqs, stored_batches
from kvtape.traces.database import open_read_only, readable, refuse_leftovers
from kvtape.traces.errors import LogUnreadable
from kvtape.traces.leftovers import claimed
from kvtape.traces.reader import open_log
from kvtape.traces.schema import ROW_TABLES, Table, quoted
from kvtape.traces.seal import copy_rows, publish_sealed
from kvtape.traces.sidecar import Head
from kvtape.traces.telling import Tell, silent
from kvtape.traces.upcast import bring_up

__all__ = ["RedactReport", "redact"]


@dataclass(frozen=True, slots=True)
class RedactReport:
    """`taken`: "table.column" -> rows that had content there; `digest`: the chain's, that of the log it was made of."""

    events: int
    taken: dict[str, int]
    digest: str


def redact(path: str | Path, out: str | Path, tell: Tell = silent) -> RedactReport:
    """Make `out` of the log `path`, which is not touched, without any content. `tell` hears of the rows verified first.

    Raises what `open_log` raises, LogUnreadable for a log that does not verify, LogExists, OSError.
    """
    target = Path(out)
    refuse_leftovers(target)
    with open_log(path) as log, claimed(target) as fresh:
        if log.meta.get("log_id") is None or log.source.is_dir():
            raise LogUnreadable(f"{path}: several logs; merge them first, then redact the result")
        with readable(log.path):
            report = check_chain(log.connection, log.meta, log.head, tell)
        if report.findings:
            raise LogUnreadable(f"{path}: does not verify ({report.findings[0].detail}); nothing was made of it")
        sessions = last_seqs(stored_batches(log.connection))
        taken = {f"{t.name}.{c}": _count(log.connection, t.name, c) for t in ROW_TABLES for c in _content(t)}
        events = int(log.sql("SELECT count(*) FROM events")[1][0][0])
        meta = {**log.meta, "sealed": "true", "redacted": "token ids and texts of trials were taken out"}
        source = log.source
        log.connection.close()
        connection = open_read_only(source, source, confined=False)
        try:
            bring_up(connection, log.schema_version)
            copy_rows(connection, meta, fresh, _without_content)
        finally:
            connection.close()
        head = Head(meta["log_id"], report.batches, report.digest, report.rows, sessions, "")
        publish_sealed(fresh, target, head)
    return RedactReport(events, taken, report.digest)


def _content(table: Table) -> list[str]:
    return [f.name for f in table.fields if not f.chained]


def _count(connection: duckdb.DuckDBPyConnection, table: str, column: str) -> int:
    return int(connection.execute(f"SELECT count({quoted(column)}) FROM {table}").fetchall()[0][0])


def _without_content(table: Table) -> str:
    """The columns of a table, NULL in place of content."""
    gone = _content(table)
    columns = [f"NULL AS {quoted(c)}" if c in gone else quoted(c) for c in table.columns]
    return ", ".join([*columns, "batch"])
