"""What a log is made of beside its rows: types, tables, triggers and views, and whether a file still has those.

Views answer for the rows and triggers guard them, so an edited view or a dropped trigger is as bad as an edited row.
Both sides are read back from DuckDB, which prints statements in a form of its own.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping

import duckdb

from kvtape.traces.findings import Finding, FindingKind
from kvtape.traces.schema import ALL_TABLES, create_table, create_types, guard_statements
from kvtape.traces.views import VIEWS

__all__ = ["check_definitions", "creating_statements", "definitions_digest", "same_definitions"]

Definitions = dict[tuple[str, str], str]
"""(kind, name) -> its definition as DuckDB prints it."""

_READ = """
    SELECT 'table', table_name, sql FROM duckdb_tables() WHERE NOT internal AND database_name = current_database()
    UNION ALL
    SELECT 'view', view_name, sql FROM duckdb_views() WHERE NOT internal AND database_name = current_database()
    UNION ALL
    SELECT 'trigger', trigger_name, sql FROM duckdb_triggers() WHERE database_name = current_database()
    UNION ALL
    SELECT 'type', type_name, array_to_string(labels, ', ') FROM duckdb_types()
    WHERE NOT internal AND database_name = current_database()
    UNION ALL
    SELECT 'macro', function_name, coalesce(macro_definition, '') FROM duckdb_functions()
    WHERE NOT internal AND database_name = current_database()
"""


def creating_statements() -> list[str]:
    """Everything that makes an empty log, in order."""
    statements = [*create_types(), *(create_table(t) for t in ALL_TABLES), *guard_statements()]
    return [*statements, *(f"CREATE VIEW {view.name} AS {view.sql}" for view in VIEWS)]


@functools.cache
def definitions_digest() -> str:
    """SHA-256 hex over those statements; stands in `meta`, so that a log says which ones it was made with."""
    return hashlib.sha256("\n;\n".join(creating_statements()).encode()).hexdigest()


def same_definitions(meta: Mapping[str, str]) -> bool:
    """Whether the log was made with the definitions of this kvtape; those of another version are not known here."""
    return meta.get("definitions") == definitions_digest()


def check_definitions(connection: duckdb.DuckDBPyConnection, meta: Mapping[str, str]) -> Iterator[Finding]:
    """What is not as it was made; nothing for a log of another kvtape, see `same_definitions`."""
    if not same_definitions(meta):
        return
    made, found = _made(), _read(connection)
    for kind, name in sorted(made.keys() | found.keys()):
        wanted, there = made.get((kind, name)), found.get((kind, name))
        if wanted == there:
            continue
        table = name if kind == "table" else None
        what = "is gone" if there is None else "does not belong to a log" if wanted is None else "was changed"
        yield Finding(FindingKind.DEFINITION, f"{kind} {name} {what}", None, table)


@functools.cache
def _made() -> Definitions:
    connection = duckdb.connect()
    try:
        for statement in creating_statements():
            connection.execute(statement)
        return _read(connection)
    finally:
        connection.close()


def _read(connection: duckdb.DuckDBPyConnection) -> Definitions:
    return {(kind, name): sql for kind, name, sql in connection.execute(_READ).fetchall()}
