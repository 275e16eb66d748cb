"""What modules of figures share: parts of a panel that several make, values in other units, tables turned round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvtape.report.panel import Cell, Figure, Missing, Table

__all__ = ["MIB", "Parts", "scaled", "turned"]

MIB: Final = 2**20

_FEW: Final = 4


@dataclass(frozen=True, slots=True)
class Parts:
    """Figures, tables, and what is missing; any of them may be none."""

    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    missing: tuple[Missing, ...] = ()


def scaled(value: float | None, unit: float) -> float | None:
    """How many of `unit` a value is; of what is not known None."""
    return None if value is None else value / unit


def turned(table: Table) -> Table:
    """A wide table of up to four rows with its columns as rows: what one of them says is read from top to bottom."""
    if not 0 < len(table.rows) <= _FEW:
        return table
    names = (table.columns[0], *(str(row[0]) for row in table.rows))
    rows: list[tuple[Cell, ...]] = [
        (name, *(row[i] for row in table.rows)) for i, name in enumerate(table.columns) if i
    ]
    return Table(table.caption, names, rows, table.left_out)
