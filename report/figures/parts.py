"""What modules of figures share: what one of them adds to a panel that several make, and tables turned round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvtape.report.panel import Cell, Figure, Missing, Table

__all__ = ["Parts", "turned"]

_FEW: Final = 4


@dataclass(frozen=True, slots=True)
class Parts:
    """Figures, tables, and what is missing; any of them may be none."""

    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    missing: tuple[Missing, ...] = ()


def turned(table: Table) -> Table:
    """A wide table of up to four rows with its columns as rows: what one of them says is read from top to bottom."""
    if not 0 < len(table.rows) <= _FEW:
        return table
    names = (table.columns[0], *(str(row[0]) for row in table.rows))
    rows: list[tuple[Cell, ...]] = [
        (name, *(row[i] for row in table.rows)) for i, name in enumerate(table.columns) if i
    ]
    return Table(table.caption, names, rows, table.left_out)
