"""The generated part of `docs/log-schema.md`: tables and columns from the field tables, views from their definitions.

python -m kvtape.traces.document docs/log-schema.md      writes it anew between the markers
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from kvtape.traces.schema import BATCHES, ENUMS, META, ROW_TABLES, SCHEMA_VERSION, Table, sql_type
from kvtape.traces.view import View
from kvtape.traces.views import VIEWS

__all__ = ["BEGIN", "END", "generated", "replace_generated"]

BEGIN = "<!-- generated from the field tables: python -m kvtape.traces.document docs/log-schema.md -->"
END = "<!-- end of the generated part -->"


def generated() -> str:
    """Markdown of every table, enumeration and view."""
    parts = [f"Schema version {SCHEMA_VERSION}.", "## Tables"]
    parts += [_table(t) for t in ROW_TABLES]
    parts += [_plain("batches", BATCHES), _plain("meta", META)]
    parts += ["## Enumerations", _grid(("type", "values"), [(f"`{n}`", ", ".join(e)) for n, e in ENUMS.items()])]
    parts += ["## Views", *(_view(v) for v in VIEWS)]
    return "\n\n".join(parts)


def replace_generated(text: str) -> str:
    """`text` with the part between the markers made anew. Raises ValueError when a marker is missing."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the markers {BEGIN!r} and {END!r} are not there")
    return f"{before}{BEGIN}\n\n{generated()}\n\n{END}{after}"


def _table(table: Table) -> str:
    rows = [
        (f"`{f.name}`", sql_type(f), "yes" if f.nullable else "", "yes" if f.logical else "", f.doc)
        for f in table.fields
    ]
    rows.append(("`batch`", "UBIGINT", "", "", "the batch that brought the row"))
    order = ", ".join(f"`{c}`" for c in table.order)
    head = ("column", "type", "NULL", "logical", "what it is")
    return f"### `{table.name}`\n\nCanonical order: {order}.\n\n{_grid(head, rows)}"


def _plain(name: str, columns: Iterable[tuple[str, str, str]]) -> str:
    rows = [(f"`{c}`", sql, doc) for c, sql, doc in columns]
    return f"### `{name}`\n\n{_grid(('column', 'type', 'what it is'), rows)}"


def _view(view: View) -> str:
    rows = [(f"`{c}`", doc) for c, doc in view.columns]
    return f"### `{view.name}`\n\n{view.doc}\n\n{_grid(('column', 'what it is'), rows)}\n\n```sql\n{view.example};\n```"


def _grid(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(replace_generated(target.read_text(encoding="utf-8")), encoding="utf-8")
