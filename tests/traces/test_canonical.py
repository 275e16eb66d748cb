"""Canonical bytes depend on values alone, and on every one of them."""

from __future__ import annotations

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.planner.events import Op
from kvtape.traces.canonical import in_canonical_order, table_bytes, table_digest
from kvtape.traces.codec import from_arrow, to_arrow
from kvtape.traces.query import select_arrow, select_rows
from kvtape.traces.schema import ALL_TABLES, EVENTS, ROW_TABLES, TOKENS, Table, create_table, create_types
from support.logs import event, rows_of

tables = pytest.mark.parametrize("table", ROW_TABLES, ids=lambda t: t.name)


@pytest.fixture(scope="module")
def database() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    for statement in [*create_types(), *(create_table(t) for t in ALL_TABLES)]:
        connection.execute(statement)
    return connection


def whole(table: Table, rows: pa.Table) -> bytes:
    return b"".join(bytes(c) for c in table_bytes(table.fields, rows))


@tables
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_go_through_duckdb_exactly_and_keep_their_digest(
    table: Table, database: duckdb.DuckDBPyConnection, data: st.DataObject
) -> None:
    rows = data.draw(st.lists(rows_of(table), max_size=4))
    columns = in_canonical_order(table, to_arrow(table, rows))
    database.execute("BEGIN")
    try:
        database.register("incoming", columns)
        database.execute(f"INSERT INTO {table.name} SELECT *, 1 FROM incoming")
        stored = select_arrow(database, table)
        back = select_rows(database, table)
    finally:
        database.execute("ROLLBACK")
    key = lambda r: tuple(getattr(r, c) for c in table.order)  # noqa: E731
    if len({key(r) for r in rows}) == len(rows):  # rows with one key have no order of their own
        assert back == sorted(rows, key=key)
        assert table_digest(table.fields, stored) == table_digest(table.fields, columns)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows_of(EVENTS), min_size=1, max_size=4), st.lists(rows_of(EVENTS), min_size=1, max_size=4))
def test_other_rows_give_other_bytes(left: list, right: list) -> None:
    same = whole(EVENTS, to_arrow(EVENTS, left)) == whole(EVENTS, to_arrow(EVENTS, right))
    assert same == (left == right)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows_of(TOKENS), min_size=1, max_size=4), st.data())
def test_bytes_do_not_depend_on_chunks_slices_or_string_width(rows: list, data: st.DataObject) -> None:
    columns = to_arrow(TOKENS, rows)
    cut = data.draw(st.integers(0, len(rows)))
    chunked = pa.concat_tables([columns.slice(0, cut), columns.slice(cut)])
    sliced = pa.concat_tables([columns, columns]).slice(len(rows))
    wide = columns.cast(
        pa.schema([f.with_type(pa.large_string()) if f.type == pa.string() else f for f in columns.schema])
    )
    expected = whole(TOKENS, columns)
    assert [whole(TOKENS, c) for c in (chunked, sliced, wide)] == [expected] * 3


@pytest.mark.parametrize(
    "change",
    [{"reason": ""}, {"start": 0}, {"cold": False}, {"blocks": ()}, {"op": Op.PLAN}, {"detail": "null"}, {"at_ns": 5}],
    ids=str,
)
def test_empty_is_not_null_and_zero_is_not_null(change: dict) -> None:
    plain, changed = event(0), event(0, **change)
    assert whole(EVENTS, to_arrow(EVENTS, [plain])) != whole(EVENTS, to_arrow(EVENTS, [changed]))


def test_the_bytes_are_what_the_module_says() -> None:
    rows = pa.table({"s": pa.array(["ab", None]), "n": pa.array([1, 2], pa.uint64()), "x": pa.nulls(2, pa.int64())})
    from kvtape.planner.fields import Field

    fields = (Field("s", "text", ""), Field("n", "u64", ""), Field("x", "i64", ""))
    assert b"".join(bytes(c) for c in table_bytes(fields, rows)) == (
        b"\x02\0\0\0\0\0\0\0"
        b"\x01\0\0\0sM\x01\x00" + b"\x02\0\0\0\0\0\0\0" + b"ab"
        b"\x01\0\0\0nA" + b"\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0"
        b"\x01\0\0\0xN"
    )  # fmt: skip


def test_canonical_order_is_by_session_then_seq() -> None:
    rows = [event(1, session_id="b"), event(0, session_id="b"), event(10, session_id="a"), event(2, session_id="a")]
    ordered = from_arrow(EVENTS, in_canonical_order(EVENTS, to_arrow(EVENTS, rows)))
    assert [(e.session_id, e.seq) for e in ordered] == [("a", 2), ("a", 10), ("b", 0), ("b", 1)]
