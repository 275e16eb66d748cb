"""Text to HTML: everything that comes from a log is escaped here, for text, for attributes and for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from kvtape.report.panel import Cell, Table

__all__ = ["cell_text", "json_block", "table_html", "text"]


def text(value: str) -> str:
    """Safe between tags and in quoted attributes. What UTF-8 cannot say becomes a question mark."""
    return escape(value.encode(errors="replace").decode(), quote=True)


def json_block(id: str, value: Any) -> str:  # noqa: A002
    """JSON for scripts in an element that nothing executes. No `<` is left in it, so no text can end it.

    Raises ValueError for numbers that JSON does not have.
    """
    found = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{text(id)}">{found}</script>'


def cell_text(value: Cell) -> str:
    """As people read it: thousands grouped, four significant digits of what is no whole number."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"
    return value


def table_html(table: Table, *, rows_named: bool = True) -> str:
    """A table with a caption and headers; wide ones scroll by themselves, and can be scrolled with the keyboard."""
    numeric = [_numeric([row[i] for row in table.rows]) for i in range(len(table.columns))]
    head = "".join(
        f'<th scope="col"{_class("number" if right else "")}>{text(name)}</th>'
        for name, right in zip(table.columns, numeric, strict=True)
    )
    body = "".join(f"<tr>{_row(row, numeric, rows_named)}</tr>" for row in table.rows)
    more = f'<p class="note">{table.left_out:,} more rows are left out.</p>' if table.left_out else ""
    none = "" if table.rows else '<p class="note">No rows.</p>'
    label = f'role="group" tabindex="0" aria-label="{text(table.caption)}"'
    caption = f"<caption>{text(table.caption)}</caption>"
    whole = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="table" {label}>{whole}</div>{none}{more}'


def _numeric(values: Sequence[Cell]) -> bool:
    """Whether a column is aligned as numbers: it has some, and nothing else but gaps."""
    numbers = [value for value in values if isinstance(value, int | float)]
    return bool(numbers) and all(value == "" or value is None for value in values if not isinstance(value, int | float))


def _row(row: tuple[Cell, ...], numeric: list[bool], rows_named: bool) -> str:
    cells = []
    for i, value in enumerate(row):
        kind = ("number" if numeric[i] else "text") + (" unknown" if value is None else "")
        tag = 'th scope="row"' if rows_named and not i else "td"
        cells.append(f"<{tag}{_class(kind)}>{text(cell_text(value))}</{tag[:2]}>")
    return "".join(cells)


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
