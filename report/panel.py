"""What a report is made of: panels of figures, tables, and of what is missing. Plain data; `page` writes it.

How the parts go together:

    report.data.*     pure: rows of a log or of result files -> frozen dataclasses (numbers, and how they were taken)
    report.figures.*  pure: those -> Figure, Table
    report.panels     which panels there are, in order
    report.page       panels -> one HTML text; the only module that writes markup, and everything in it is escaped

A figure is a `kind` that `assets/*.js` knows how to draw, and `data` for it, which goes into the page as JSON. Nobody
who cannot see the drawing is left out: `summary` says in words what it shows, `table` holds its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Cell", "Figure", "Kind", "Missing", "Panel", "Table"]

Cell = str | int | float | bool | None
"""A value of a table. Numbers stay numbers: the page aligns and groups them. None is shown as "unknown", an empty text
where a row has no such value."""

Kind = Literal["chart", "residency", "timeline", "occupancy"]
"""What draws a figure: `chart` draws a `figures.chart.Chart`, each of the others one picture of a session."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns; `columns` carry their units ("prefilled (tokens)").

    `left_out`: how many more rows there are that the table does not show; the page says so.
    """

    caption: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Figure:
    """One drawing. `id`: small letters, digits, dashes; unique in the page.

    `summary`: one to three sentences with the numbers that matter, read aloud in place of the drawing.
    `data`: JSON values for the script. `table`: the same numbers as rows, folded away under the drawing.
    """

    id: str
    title: str
    kind: Kind
    summary: str
    data: Mapping[str, Any]
    table: Table | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that the report could show and the log does not hold: what, and the command that makes it."""

    what: str
    command: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One section of the page. `id`: its anchor, as of a figure. `lead`: what the panel says, how to read it, and how
    its numbers were aggregated, in plain sentences.

    A panel without figures and tables must say in `missing` why. `tables` stand open, unlike those of figures.
    """

    id: str
    title: str
    lead: str
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    missing: tuple[Missing, ...] = ()

    def __post_init__(self) -> None:
        if not (self.figures or self.tables or self.missing):
            raise ValueError(f"panel {self.id}: nothing to show, and nothing said of why")
