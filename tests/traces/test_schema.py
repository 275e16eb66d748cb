"""One table of fields: dataclass, wire model, DuckDB table and Arrow schema must say the same."""

from __future__ import annotations

import dataclasses

import duckdb
import pytest

from kvtape.traces.codec import empty_table
from kvtape.traces.schema import ALL_TABLES, ENUMS, ROW_TABLES, Table, arrow_schema, create_table, create_types
from kvtape.traces.wire import WIRE_MODELS

tables = pytest.mark.parametrize("table", ROW_TABLES, ids=lambda t: t.name)


@pytest.fixture
def database() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    for statement in [*create_types(), *(create_table(t) for t in ALL_TABLES)]:
        connection.execute(statement)
    return connection


@tables
def test_the_dataclass_has_the_fields_in_their_order(table: Table) -> None:
    found = dataclasses.fields(table.row)
    assert tuple(f.name for f in found) == table.columns
    optional = {f.name for f in found if f.default is None}
    nullable = {f.name for f in table.fields if f.nullable}
    assert optional <= nullable
    assert all(f"{f.type}".endswith("| None") == (f.name in nullable) for f in found)


@tables
def test_the_wire_model_has_the_fields_in_their_order(table: Table) -> None:
    model = WIRE_MODELS[table.name]
    assert tuple(model.model_fields) == table.columns
    assert {n for n, f in model.model_fields.items() if f.is_required()} == {
        f.name for f in table.fields if not f.nullable
    }
    assert {n: f.description for n, f in model.model_fields.items()} == {f.name: f.doc for f in table.fields}


@tables
def test_duckdb_has_the_fields_and_then_the_batch(table: Table, database: duckdb.DuckDBPyConnection) -> None:
    rows = database.execute(f"DESCRIBE {table.name}").fetchall()
    assert tuple(r[0] for r in rows) == (*table.columns, "batch")
    assert [r[2] == "YES" for r in rows] == [*(f.nullable for f in table.fields), False]
    kinds = {"u64": "UBIGINT", "i64": "BIGINT", "f64": "DOUBLE", "bool": "BOOLEAN"}
    kinds |= {"tokens": "INTEGER[]", "floats": "FLOAT[]"}
    for row, field in zip(rows, table.fields, strict=False):
        if field.kind in ENUMS:
            assert row[1] == "ENUM(" + ", ".join(f"'{m.value}'" for m in ENUMS[field.kind]) + ")"
        else:
            assert row[1] == kinds.get(field.kind, "VARCHAR")


@tables
def test_arrow_columns_go_into_duckdb_and_come_back_with_their_types(
    table: Table, database: duckdb.DuckDBPyConnection
) -> None:
    schema = arrow_schema(table)
    assert tuple(schema.names) == table.columns
    database.register("incoming", empty_table(table))
    database.execute(f"INSERT INTO {table.name} SELECT *, 1 FROM incoming")
    back = database.sql(f"SELECT * EXCLUDE (batch) FROM {table.name}").to_arrow_table().schema
    for field in table.fields:
        if field.kind in ENUMS:
            assert str(back.field(field.name).type).startswith("dictionary<values=string")
        elif field.kind in ("tokens", "floats"):
            assert back.field(field.name).type.value_type == schema.field(field.name).type.value_type
        else:
            assert back.field(field.name).type == schema.field(field.name).type


@tables
def test_rows_are_sorted_by_columns_that_they_have(table: Table) -> None:
    assert set(table.order) <= set(table.columns)
