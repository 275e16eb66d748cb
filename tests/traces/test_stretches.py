"""A stretch has the digest of the slice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.traces.canonical import in_canonical_order, is_in_canonical_order, table_digest
from kvtape.traces.codec import to_arrow
from kvtape.traces.schema import ROW_TABLES, Table
from kvtape.traces.stretches import Stretches
from support.logs import rows_of


@pytest.mark.parametrize("table", ROW_TABLES, ids=lambda t: t.name)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_stretch_has_the_digest_of_the_slice(table: Table, data: st.DataObject) -> None:
    rows = to_arrow(table, data.draw(st.lists(rows_of(table), min_size=1, max_size=8)))
    before = data.draw(st.integers(0, 2))
    rows = rows.slice(min(before, rows.num_rows - 1))
    start = data.draw(st.integers(0, rows.num_rows - 1))
    stop = data.draw(st.integers(start + 1, rows.num_rows))
    assert Stretches(table.fields, rows).digest(start, stop) == table_digest(
        table.fields, rows.slice(start, stop - start)
    )


@pytest.mark.parametrize("table", ROW_TABLES, ids=lambda t: t.name)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_order_is_seen(table: Table, data: st.DataObject) -> None:
    rows = to_arrow(table, data.draw(st.lists(rows_of(table), max_size=6)))
    keys = list(zip(*(rows.column(name).to_pylist() for name in table.order), strict=True))
    encoded = [tuple(k.encode() if isinstance(k, str) else k for k in key) for key in keys]
    assert is_in_canonical_order(table, rows) == (encoded == sorted(set(encoded)))
    ordered = in_canonical_order(table, rows)
    found = list(zip(*(ordered.column(name).to_pylist() for name in table.order), strict=True))
    assert [tuple(k.encode() if isinstance(k, str) else k for k in key) for key in found] == sorted(encoded)
