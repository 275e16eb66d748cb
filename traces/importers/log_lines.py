"""kvtape's own JSON lines (`kvtape export --format jsonl`) back into a log: the same rows, batches and digests.

The digest of each batch is computed anew and compared, so an edited line is found and named by its batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from kvtape.traces.canonical import in_canonical_order
from kvtape.traces.chain import genesis, link, span_list, summarise
from kvtape.traces.database import build_file, fsync_file, one_line
from kvtape.traces.errors import LogWriteFailed
from kvtape.traces.group import insert_batch
from kvtape.traces.importers.columns import Columns
from kvtape.traces.importers.sniffing import first_line
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.writing import new_log
from kvtape.traces.schema import FORMAT, SCHEMA_VERSION, TABLES
from kvtape.traces.seal import check_copy
from kvtape.traces.sidecar import Head, file_digest, session_key, write_head

__all__ = ["Restored", "is_log_lines", "restore_log"]

_REMEDY = "export the log again"
_ALWAYS = ("kvtape_version", "log_id", "key_id")
"""Meta rows that every log has, beside its format and schema version."""


@dataclass(frozen=True, slots=True)
class Restored:
    """`rows` of all tables, `events` and sessions of the log that was made."""

    rows: int
    events: int
    sessions: int
    span_ns: int


def is_log_lines(head: bytes) -> bool:
    return first_line(head).startswith(b'{"table":"meta"')


@dataclass
class _Chain:
    """Where the chain stands."""

    meta: dict[str, str]
    digest: bytes
    batch: int = 0
    rows: int = 0
    sessions: dict[str, int] = field(default_factory=dict)
    n_events: int = 0
    times: list[int] = field(default_factory=list)


def restore_log(source: Source, log: Path) -> Restored:
    """Write the log. Raises SourceRejected, LogExists, LogWriteFailed; there is no log then."""
    lines = source.lines()
    chain = _begin(source, next(lines, b""))
    try:
        with new_log(log) as fresh:
            build_file(fresh, {**chain.meta, "sealed": "true"})
            connection = duckdb.connect(str(fresh), config={"threads": "1"})
            try:
                connection.execute("BEGIN")
                waiting: dict[str, Columns] = {}
                for line in lines:
                    _take(source, line, chain, waiting, connection)
                if any(waiting.values()):
                    raise source.rejected(None, "the last batch has no digest behind it", "fetch the whole file")
                connection.execute("COMMIT")
                connection.execute("CHECKPOINT")
            finally:
                connection.close()
            fsync_file(fresh)
            head = Head(chain.meta["log_id"], chain.batch, chain.digest.hex(), chain.rows, chain.sessions, "")
            check_copy(fresh, head)
            write_head(fresh, head.as_sealed(file_digest(fresh)))
    except (OSError, duckdb.Error) as err:
        raise LogWriteFailed(f"{log}: writing failed ({one_line(err)}); nothing was imported") from err
    span = max(chain.times, default=0) - min(chain.times, default=0)
    return Restored(chain.rows, chain.n_events, len(chain.sessions), span)


def _begin(source: Source, line: bytes) -> _Chain:
    meta = _object(source, line).get("meta")
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise source.rejected("meta", "no log of kvtape", "the first line has the meta rows of a log")
    version = meta.get("schema_version")
    if str(version) not in {str(n) for n in range(1, SCHEMA_VERSION + 1)}:
        what = f"schema version {version}, this kvtape reads up to {SCHEMA_VERSION}"
        raise source.rejected("schema_version", what, "use the kvtape that exported it")
    for name in _ALWAYS:
        if not isinstance(meta.get(name), str):
            raise source.rejected(f"meta.{name}", "is missing or no text", _REMEDY)
    plain = {k: str(v) for k, v in meta.items() if k != "sealed"}
    return _Chain(plain, genesis(plain))


def _take(
    source: Source,
    line: bytes,
    chain: _Chain,
    waiting: dict[str, Columns],
    connection: duckdb.DuckDBPyConnection,
) -> None:
    row = _object(source, line)
    name = row.pop("table", None)
    if name == "batches":
        _append(source, row, chain, waiting, connection)
        waiting.clear()
    elif name in TABLES:
        unknown = row.keys() - set(TABLES[name].columns)
        if unknown:
            raise source.rejected(min(unknown), f"no column of {name}", _REMEDY)
        waiting.setdefault(name, Columns()).append(row)
    else:
        raise source.rejected("table", f"{name!r} is no table of a log", _REMEDY)


def _append(
    source: Source,
    said: Mapping[str, Any],
    chain: _Chain,
    waiting: Mapping[str, Columns],
    connection: duckdb.DuckDBPyConnection,
) -> None:
    tables: dict[str, pa.Table] = {}
    for name, rows in waiting.items():
        try:
            tables[name] = in_canonical_order(TABLES[name], rows.to_arrow(TABLES[name]))
        except (OverflowError, pa.ArrowException, TypeError, ValueError) as err:
            raise source.rejected(name, f"a value that its column cannot hold ({err})", _REMEDY) from None
    summary = summarise(tables)
    previous, batch = chain.digest, chain.batch + 1
    digest = link(previous, batch, summary)
    if said.get("batch") != batch or said.get("digest") != digest.hex():
        what = f"batch {batch} is not what was exported: its rows have another digest"
        raise source.rejected("digest", what, _REMEDY)
    insert_batch(connection, tables, (batch, summary.rows, summary.spans, summary.tables, previous, digest))
    chain.digest, chain.batch, chain.rows = digest, batch, chain.rows + summary.rows
    if "events" not in tables:
        return
    for run_id, session_id, _, last in span_list(tables["events"]):
        chain.sessions[session_key(run_id, session_id)] = last
    chain.n_events += tables["events"].num_rows
    first_at, last_at = pc.min_max(tables["events"].column("at_ns")).values()
    chain.times += [first_at.as_py(), last_at.as_py()]


def _object(source: Source, line: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as err:
        raise source.rejected(None, f"not JSON ({err})", _REMEDY) from None
    if not isinstance(value, dict):
        raise source.rejected(None, "not a JSON object", _REMEDY)
    return value
