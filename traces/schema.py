"""The tables of a log: DuckDB DDL, Arrow schemas and column order, all from the field tables of `planner`.

    meta      key, value                                   what the file is; fixed when it is created
    batches   one row per batch, with its digest           the chain that `verify` recomputes
    runs, sessions, events, tokens, blocks, plans,
    scores, trials, certifications                         the rows; each bears the number of its batch

There is no PRIMARY KEY: it costs half the append rate, and sequence numbers are checked before a row is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pyarrow as pa

from kvtape.planner.events import EVENT_FIELDS, SCHEMA_VERSION, Event, Op, Placement, Way
from kvtape.planner.fields import Field, Kind
from kvtape.planner.rows import (
    BLOCK_FIELDS,
    CERTIFICATION_FIELDS,
    PLAN_FIELDS,
    RUN_FIELDS,
    SCORE_FIELDS,
    SESSION_FIELDS,
    TOKENS_FIELDS,
    TRIAL_FIELDS,
    BlockRow,
    CertificationRow,
    PlanRow,
    RunRow,
    ScoreRow,
    SessionRow,
    TokensRow,
    TrialRow,
)

__all__ = [
    "ALL_TABLES",
    "BATCHES",
    "BLOCKS",
    "CERTIFICATIONS",
    "ENUMS",
    "EVENTS",
    "FORMAT",
    "META",
    "PLANS",
    "ROW_TABLES",
    "RUNS",
    "SCHEMA_VERSION",
    "SCORES",
    "SESSIONS",
    "TABLES",
    "TOKENS",
    "TRIALS",
    "Table",
    "arrow_schema",
    "arrow_type",
    "create_table",
    "create_types",
    "guard_statements",
    "quoted",
    "quoted_text",
    "sql_type",
]

FORMAT = "kvtape-log"
"""Value of `meta.format`: how a log is told from any other DuckDB file."""

ENUMS: dict[Kind, type[StrEnum]] = {"op": Op, "way": Way, "placement": Placement}

_SQL: dict[Kind, str] = {
    "u64": "UBIGINT",
    "i64": "BIGINT",
    "f64": "DOUBLE",
    "bool": "BOOLEAN",
    "text": "VARCHAR",
    "json": "VARCHAR",
    "op": "op",
    "way": "way",
    "placement": "placement",
    "tokens": "INTEGER[]",
    "floats": "FLOAT[]",
}

_ARROW: dict[Kind, pa.DataType] = {
    "u64": pa.uint64(),
    "i64": pa.int64(),
    "f64": pa.float64(),
    "bool": pa.bool_(),
    "text": pa.string(),
    "json": pa.string(),
    "op": pa.string(),
    "way": pa.string(),
    "placement": pa.string(),
    "tokens": pa.list_(pa.int32()),
    "floats": pa.list_(pa.float32()),
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of rows: its fields, the dataclass of one row, and the columns its canonical order sorts by."""

    name: str
    fields: tuple[Field, ...]
    row: type[Any]
    order: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.fields)

    @property
    def since(self) -> int:
        """The schema version that brought the table."""
        return min(f.since for f in self.fields)

    @property
    def chained(self) -> tuple[Field, ...]:
        """The fields under the hash chain."""
        return tuple(f for f in self.fields if f.chained)


RUNS = Table("runs", RUN_FIELDS, RunRow, ("run_id",))
SESSIONS = Table("sessions", SESSION_FIELDS, SessionRow, ("run_id", "session_id"))
EVENTS = Table("events", EVENT_FIELDS, Event, ("run_id", "session_id", "seq"))
TOKENS = Table("tokens", TOKENS_FIELDS, TokensRow, ("run_id", "session_id", "seq"))
BLOCKS = Table("blocks", BLOCK_FIELDS, BlockRow, ("run_id", "session_id", "seq", "block_id"))
PLANS = Table("plans", PLAN_FIELDS, PlanRow, ("run_id", "session_id", "seq"))
SCORES = Table("scores", SCORE_FIELDS, ScoreRow, ("run_id", "session_id", "seq", "block_id", "start"))
TRIALS = Table("trials", TRIAL_FIELDS, TrialRow, ("run_id", "trial"))
CERTIFICATIONS = Table("certifications", CERTIFICATION_FIELDS, CertificationRow, ("run_id", "certification"))

ROW_TABLES = (RUNS, SESSIONS, EVENTS, TOKENS, BLOCKS, PLANS, SCORES, TRIALS, CERTIFICATIONS)
"""In the order in which the chain hashes them."""

TABLES: dict[str, Table] = {t.name: t for t in ROW_TABLES}

META: tuple[tuple[str, str, str], ...] = (
    ("key", "VARCHAR", "format, schema_version, kvtape_version, definitions, log_id, key_id; later sealed and others"),
    ("value", "VARCHAR", "its value"),
)

BATCHES: tuple[tuple[str, str, str], ...] = (
    ("batch", "UBIGINT", "1-based and gapless; a transaction holds one batch or several whole ones"),
    ("rows", "UBIGINT", "rows of all tables in the batch"),
    ("spans", "VARCHAR", "JSON [[run_id, session_id, first seq, last seq], ...] of its events"),
    ("tables", "VARCHAR", "JSON {table: [rows, SHA-256 hex of their canonical bytes]}"),
    ("previous", "BLOB", "digest of the batch before; of the meta rows for the first"),
    ("digest", "BLOB", "SHA-256 over previous, batch, rows, spans and tables"),
)

_BATCH_COLUMN = '"batch" UBIGINT NOT NULL'

ALL_TABLES = ("meta", "batches", *TABLES)


def quoted(name: str) -> str:
    """An SQL identifier; field names such as `trigger` are keywords."""
    return '"' + name.replace('"', '""') + '"'


def quoted_text(value: object) -> str:
    """An SQL text constant, of a path too."""
    return "'" + str(value).replace("'", "''") + "'"


def sql_type(field: Field) -> str:
    return _SQL[field.kind]


def arrow_type(field: Field) -> pa.DataType:
    return _ARROW[field.kind]


def arrow_schema(table: Table) -> pa.Schema:
    """Column order and types of the rows of `table` as they are handed to a writer (without `batch`)."""
    return pa.schema([pa.field(f.name, arrow_type(f), f.nullable) for f in table.fields])


def create_types() -> list[str]:
    """CREATE TYPE of each enumeration."""
    statements = []
    for name, enum in ENUMS.items():
        values = ", ".join(f"'{member.value}'" for member in enum)
        statements.append(f"CREATE TYPE {name} AS ENUM ({values})")
    return statements


def create_table(name: str) -> str:
    """CREATE TABLE of any table of a log."""
    if name in ("meta", "batches"):
        columns = [f"{quoted(c)} {sql} NOT NULL" for c, sql, _ in (META if name == "meta" else BATCHES)]
    else:
        columns = [_column(f) for f in TABLES[name].fields] + [_BATCH_COLUMN]
    return f"CREATE TABLE {name} ({', '.join(columns)})"


def _column(field: Field) -> str:
    return f"{quoted(field.name)} {sql_type(field)}{'' if field.nullable else ' NOT NULL'}"


def guard_statements() -> list[str]:
    """Triggers that refuse UPDATE, DELETE and TRUNCATE: a guard rail against accidents, the chain is the proof."""
    statements = ["CREATE TABLE append_only (never INTEGER)"]
    for table in ALL_TABLES:
        statements += [
            f"CREATE TRIGGER {table}_no_{verb.lower()} AFTER {verb} ON {table} FOR EACH STATEMENT "
            f"INSERT INTO append_only SELECT error('{table} is append-only: a log is never changed')"
            for verb in ("UPDATE", "DELETE")
        ]
    return statements
