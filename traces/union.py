"""Several logs read as one: the segments of a log folder, or logs that were written out as Parquet.

Every table is a view over the tables of the parts, and the views of a log stand over those. Batch numbers go on from
part to part. A run may have rows in several parts (its recorders were several processes); a session is in one.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from kvtape.traces.database import one_line, read_meta
from kvtape.traces.errors import LogMissing, LogUnreadable, NotALog, SequenceConflict, SqlRejected
from kvtape.traces.folder import Segment, is_log_folder, segments
from kvtape.traces.parquet_files import file_glob
from kvtape.traces.reader import Log, open_log
from kvtape.traces.schema import (
    BATCHES,
    FORMAT,
    ROW_TABLES,
    RUNS,
    SCHEMA_VERSION,
    Table,
    create_table,
    quoted,
    quoted_text,
)
from kvtape.traces.upcast import columns_of, no_rows
from kvtape.traces.views import VIEWS

__all__ = ["PARQUET", "Part", "UnionLog", "open_folder", "open_parquet", "parquet_parts", "parquet_place", "union"]

PARQUET = "parquet://"
_READING = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN}


@dataclass(frozen=True, slots=True)
class Part:
    """One log among several: its meta rows, its file (None for Parquet), or the folder or URL of its Parquet files."""

    name: str
    meta: Mapping[str, str]
    file: Path | None = None
    parquet: str | None = None


class UnionLog(Log):
    """A log that is read from several. It has no head of its own; each part was opened against its own."""

    def __init__(self, path: Path, connection: duckdb.DuckDBPyConnection, parts: Sequence[Part]) -> None:
        super().__init__(path, connection, _common_meta(parts), path)
        self.parts = tuple(parts)
        self.sealed = all("sealed" in part.meta for part in parts)

    @property
    def chain_digest(self) -> str:
        """SHA-256 hex over the chain digests of the parts, sorted; of a single part that part's own."""
        found = self._query("SELECT lower(hex(arg_max(digest, batch))) FROM batches GROUP BY part ORDER BY 1")
        digests = [str(row[0]) for row in found]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    def sql(self, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """As `Log.sql`. Where Parquet files are open to queries COPY could write beside them: only reading passes."""
        if any(part.parquet is not None for part in self.parts):
            try:
                kinds = {statement.type for statement in self.connection.extract_statements(query)}
            except duckdb.Error as err:
                raise SqlRejected(f"{self.path}: {one_line(err)}") from None
            if kinds - _READING:
                raise SqlRejected(f"{self.path}: only SELECT and EXPLAIN read, and nothing else passes here")
        return super().sql(query)

    def hold(self, held: ExitStack) -> None:
        """Release this too on closing."""
        self._held.push(held)


def _common_meta(parts: Sequence[Part]) -> dict[str, str]:
    """What all parts say alike; the format is that of a log."""
    first = dict(parts[0].meta) if parts else {}
    common = {k: v for k, v in first.items() if all(part.meta.get(k) == v for part in parts)}
    return {"format": FORMAT, "schema_version": str(SCHEMA_VERSION)} | common


def open_folder(folder: Path, *, torn: bool = False) -> UnionLog:
    """The segments of a log folder as one log; live ones as they are at this moment.

    Raises NotALog, LogUnreadable (a segment is torn, or in the manifest and gone), LogTooNew, SequenceConflict.
    """
    if not is_log_folder(folder):
        raise NotALog(f"{folder}: a folder without a manifest.jsonl; give a log file or a log folder")
    found = segments(folder)
    with ExitStack() as held:
        logs = [held.enter_context(open_log(s.path, torn=torn)) for s in _present(folder, found, torn=torn)]
        log = union(folder, [Part(log.path.name, log.meta, file=log.source) for log in logs])
        log.notice = _notice(folder, found, logs)
        log.hold(held.pop_all())
        return log
    raise AssertionError("unreachable")


def _present(folder: Path, found: Sequence[Segment], *, torn: bool) -> list[Segment]:
    gone = [s.path.name for s in found if not s.there]
    if gone and not torn:
        raise LogUnreadable(
            f"{folder}: {', '.join(gone)} in the manifest and not there; put it back, or merge what is left"
        )
    return [s for s in found if s.there]


def _notice(folder: Path, found: Sequence[Segment], logs: Sequence[Log]) -> str | None:
    said = []
    live = [log.path.name for log in logs if not log.sealed]
    if live:
        said.append(f"{len(live)} of {len(logs)} segments of {folder.name} are not sealed: read from snapshots")
    gone = [s.path.name for s in found if not s.there]
    if gone:
        said.append(f"gone: {', '.join(gone)}")
    return "; ".join(said) or None


def parquet_place(path: str | Path) -> str | None:
    """What stands behind `parquet://`; None for any other path. A Path has lost one of two slashes, of an URL too."""
    found = re.match(r"parquet:/(.*)$", str(path), re.DOTALL)
    if found is None:
        return None
    where = found.group(1)
    if isinstance(path, str):
        return where.removeprefix("/")
    return re.sub(r"^(\w+):/(?!/)", r"\1://", where) if re.match(r"\w+:/", where) else "/" + where


def parquet_parts(where: str) -> list[str]:
    """Folders (or the URL) of the logs that `parquet://where` names; `where` may be a glob over folders.

    Raises LogMissing.
    """
    if "://" in where:
        return [where.rstrip("/")]
    path = Path(where)
    found = sorted(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))) if "*" in where else [path]
    logs = [str(p) for p in found if (p / "meta.parquet").is_file()]
    if not logs:
        raise LogMissing(f"{PARQUET}{where}: no log written out as Parquet there; give a folder with meta.parquet")
    return logs


def open_parquet(where: str) -> UnionLog:
    """Logs written out as Parquet, read as one. Raises LogMissing, LogUnreadable, SequenceConflict."""
    parts = [_parquet_part(out) for out in parquet_parts(where)]
    return union(Path(f"parquet:/{where}" if "://" in where else f"parquet:{Path(where).absolute()}"), parts)


def _parquet_part(out: str) -> Part:
    connection = _plain_connection([out])
    try:
        connection.execute(f"CREATE VIEW meta AS SELECT * FROM read_parquet({quoted_text(file_glob(out, 'meta'))})")
        return Part(Path(out).name, read_meta(connection, Path(out), alone=True), parquet=out)
    finally:
        connection.close()


def union(path: Path, parts: Sequence[Part]) -> UnionLog:
    """One log over the parts. Raises SequenceConflict when two have the same session, LogUnreadable."""
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="kvtape-")))
        file = folder / "union.duckdb"
        try:
            building = duckdb.connect(str(file))
            try:
                _attach(building, parts)
                _create_views(building, parts)
            finally:
                building.close()
            connection = duckdb.connect(str(file), read_only=True)
            held.callback(connection.close)
            _attach(connection, parts)
            _confine(connection, parts)
        except duckdb.Error as err:
            raise LogUnreadable(
                f"{path}: cannot be read ({one_line(err)}); kvtape verify says which part is damaged"
            ) from None
        log = UnionLog(path, connection, parts)
        _refuse_conflicts(log)
        log.hold(held.pop_all())
        return log
    raise AssertionError("unreachable")


def _attach(connection: duckdb.DuckDBPyConnection, parts: Sequence[Part]) -> None:
    for i, part in enumerate(parts):
        if part.file is not None:
            connection.execute(f"ATTACH {quoted_text(part.file)} AS part{i} (READ_ONLY)")
        elif part.parquet is not None and "://" in part.parquet:
            _load_httpfs(connection, part.parquet)


def _plain_connection(outs: Sequence[str]) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    for out in outs:
        if "://" in out:
            _load_httpfs(connection, out)
    return connection


def _load_httpfs(connection: duckdb.DuckDBPyConnection, url: str) -> None:
    try:
        connection.execute("LOAD httpfs")
    except duckdb.Error:
        raise LogMissing(f"{url}: DuckDB's httpfs is not installed; install it once with: INSTALL httpfs") from None


def _confine(connection: duckdb.DuckDBPyConnection, parts: Sequence[Part]) -> None:
    """Queries may read the parts and nothing else."""
    allowed = [part.parquet for part in parts if part.parquet is not None]
    if allowed:
        names = ", ".join(quoted_text(f"{a}/") for a in allowed)
        connection.execute(f"SET allowed_directories = [{names}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _create_views(connection: duckdb.DuckDBPyConnection, parts: Sequence[Part]) -> None:
    offsets, last = [], 0
    for i, part in enumerate(parts):
        offsets.append(last)
        last += connection.execute(f"SELECT coalesce(max(batch), 0) FROM {_rows(i, part, 'batches')}").fetchall()[0][0]
    for table in ROW_TABLES:
        connection.execute(f"CREATE VIEW {table.name} AS {_over_all(table, parts, offsets)}")
    names = ", ".join(name for name, _, _ in BATCHES if name != "batch")
    batches = [
        f"SELECT batch + {offset} AS batch, {names}, {i} AS part FROM {_rows(i, part, 'batches')}"
        for i, (part, offset) in enumerate(zip(parts, offsets, strict=True))
    ]
    connection.execute(f"CREATE VIEW batches AS {' UNION ALL '.join(batches) or _no_rows('batches', ', 0 AS part')}")
    for view in VIEWS:
        connection.execute(f"CREATE VIEW {view.name} AS {view.sql}")


def _over_all(table: Table, parts: Sequence[Part], offsets: Sequence[int]) -> str:
    selects = []
    for i, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
        version = int(part.meta["schema_version"])
        if table.since <= version:
            # Enumerations of two files are two types; as text they are one.
            columns = ", ".join(columns_of(table, version, enums_as_text=True))
            rows = _rows(i, part, table.name)
            selects.append(f"SELECT {columns}, (batch + {offset})::UBIGINT AS batch FROM {rows}")
    everything = " UNION ALL ".join(selects)
    if not everything:
        return no_rows(table, enums_as_text=True)
    if table is not RUNS:
        return everything
    names = ", ".join(quoted(c) for c in table.columns)
    return f"SELECT {names}, min(batch) AS batch FROM ({everything}) GROUP BY {names}"


def _rows(i: int, part: Part, table: str) -> str:
    if part.parquet is None:
        return f"part{i}.{table}"
    glob = file_glob(part.parquet, table)
    if "://" not in glob and not any(Path().glob(glob) if not glob.startswith("/") else Path("/").glob(glob[1:])):
        return f"({_no_rows(table, '')})"
    return f"read_parquet({quoted_text(glob)}, hive_partitioning = false)"


def _no_rows(table: str, more: str) -> str:
    """A query with the columns of a table and no rows."""
    inside = create_table(table).partition("(")[2].rsplit(")", 1)[0]
    columns = [c.replace(" NOT NULL", "").strip() for c in inside.split(", ")]
    typed = [(c.rsplit(" ", 1)[0], c.rsplit(" ", 1)[1]) for c in columns]
    enums = ("op", "way", "placement")
    return (
        "SELECT "
        + ", ".join(f"NULL::{'VARCHAR' if kind in enums else kind} AS {name}" for name, kind in typed)
        + f"{more} WHERE false"
    )


def _refuse_conflicts(log: UnionLog) -> None:
    twice = log._query(
        "SELECT run_id, session_id, count(*) FROM sessions GROUP BY ALL HAVING count(*) > 1 ORDER BY ALL LIMIT 1"
    )
    if twice:
        run, session, n = twice[0]
        raise SequenceConflict(f"{log.path}: session {session} of run {run} is in {n} parts; a session belongs to one")
    other = log._query("SELECT run_id FROM runs GROUP BY run_id HAVING count(*) > 1 ORDER BY 1 LIMIT 1")
    if other:
        raise SequenceConflict(f"{log.path}: run {other[0][0]} has another row in another part; give runs own ids")
