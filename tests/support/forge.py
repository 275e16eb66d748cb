"""Forging logs: what an attacker, a bug or a broken disk would do, for the tests of what must catch it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import duckdb

from kvtape.traces.chain import genesis, link, summarise
from kvtape.traces.chain_check import batch_slices, last_seqs, stored_batches
from kvtape.traces.keys import key_path
from kvtape.traces.schema import ALL_TABLES, ROW_TABLES, guard_statements
from kvtape.traces.sidecar import file_digest, head_path

__all__ = ["change_head", "copy_log", "edit_log", "own_file"]


def copy_log(src: Path, dst: Path) -> Path:
    """Copy a log with everything beside it."""
    for suffix in ("", ".wal", ".head.json"):
        source = src.with_name(src.name + suffix)
        if source.exists():
            shutil.copyfile(source, dst.with_name(dst.name + suffix))
    if key_path(src).exists() and key_path(src) != key_path(dst):
        shutil.copyfile(key_path(src), key_path(dst))
    return dst


def edit_log(src: Path, dst: Path, sql_statements: Sequence[str], rechain: bool) -> Path:
    """Copy `src` to `dst`, run the statements without the guard triggers, which come back.

    Without `rechain` the batches and the sidecar stay as they were. With it every digest is computed anew over the
    edited rows and the sidecar follows: a forgery that `verify` cannot see and only a replay can.
    """
    copy_log(src, dst)
    connection = duckdb.connect(str(dst))
    try:
        for table in ALL_TABLES:
            for verb in ("update", "delete"):
                connection.execute(f"DROP TRIGGER {table}_no_{verb} ON {table}")
        for statement in sql_statements:
            connection.execute(statement)
        if rechain:
            digest, rows = _rechain(connection)
            sessions = last_seqs(stored_batches(connection))
            change_head(dst, digest=digest.hex(), rows=rows, sessions=sessions)
        _guard_again(connection)
    finally:
        connection.close()
    return own_file(dst)


def own_file(log: Path) -> Path:
    """Let the sidecar bear the digest of the file as it is, as a forger would."""
    change_head(log, file=file_digest(log))
    return log


def change_head(log: Path, **values: object) -> None:
    sidecar = head_path(log)
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | values))


def _guard_again(connection: duckdb.DuckDBPyConnection) -> None:
    there = {name for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    for statement in guard_statements()[1:]:
        if statement.split(" ON ")[1].split()[0] in there:
            connection.execute(statement)


def _rechain(connection: duckdb.DuckDBPyConnection) -> tuple[bytes, int]:
    meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    batches = stored_batches(connection)
    tables = {t.name: {s.batch: r for s, r in batch_slices(connection, t, batches)} for t in ROW_TABLES}
    connection.execute("DELETE FROM batches")
    digest, rows = genesis(meta), 0
    for stored in batches:
        summary = summarise({name: by_batch[stored.batch] for name, by_batch in tables.items()})
        previous, digest = digest, link(digest, stored.batch, summary)
        rows += summary.rows
        connection.execute(
            "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)",
            [stored.batch, summary.rows, summary.spans, summary.tables, previous, digest],
        )
    return digest, rows
