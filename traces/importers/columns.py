"""Rows gathered column by column: what becomes an Arrow table without a dictionary for each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from kvtape.traces.schema import Table, arrow_schema

__all__ = ["Columns", "Row"]

Row = dict[str, Any]
"""One row by column name; columns without a value are left out."""


class Columns:
    """Grows by a row at a time. A column exists from the first row that fills it; rows without it have None there."""

    __slots__ = ("_columns", "_n")

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {}
        self._n = 0

    def append(self, row: Mapping[str, Any]) -> None:
        columns, n = self._columns, self._n
        for name, value in row.items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = []
            if len(column) < n:
                column.extend([None] * (n - len(column)))
            column.append(value)
        self._n = n + 1

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Row]:
        """Each row, without the columns where it has nothing."""
        columns = {name: self.column(name) for name in self._columns}
        for i in range(self._n):
            yield {name: values[i] for name, values in columns.items() if values[i] is not None}

    def column(self, name: str) -> list[Any]:
        """All values of a column, `[len(self)]`."""
        values = self._columns.get(name, [])
        values.extend([None] * (self._n - len(values)))
        return values

    def to_arrow(self, table: Table, constants: Mapping[str, Any] | None = None) -> pa.Table:
        """The rows in the columns of `table`; a column that no row has is null. `constants` are the same in every row.

        Raises OverflowError, TypeError or pyarrow.ArrowInvalid for a value that its column cannot hold.
        """
        known, schema = constants or {}, arrow_schema(table)
        arrays = []
        for column in schema:
            if column.name in known:
                arrays.append(pa.repeat(pa.scalar(known[column.name], column.type), self._n))
            elif column.name in self._columns:
                arrays.append(pa.array(self.column(column.name), column.type))
            else:
                arrays.append(pa.nulls(self._n, column.type))
        return pa.Table.from_arrays(arrays, schema=schema)
