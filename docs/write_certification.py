"""Write the generated parts of docs/certification.md: the thresholds, and the certifications that come with kvtape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import page_parts
from kvtape.backends.proofs.rows import ProofRow
from kvtape.backends.proofs.store import Proofs, shipped_rows
from kvtape.eval.certification.report import BOUNDS, COLUMNS, cells, remarks
from kvtape.eval.certification.thresholds import THRESHOLDS

PAGE = Path(__file__).parent / "certification.md"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return page_parts.table(columns, rows, _cell)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value == round(value) and abs(value) >= 10 else f"{value:.3g}"
    return str(value)


def thresholds() -> str:
    """The one table of the code."""
    rows = [(t.ability, f"`{t.name}`", f"{BOUNDS[t.bound]} {t.limit:g} {t.unit}", t.source) for t in THRESHOLDS]
    return _table(("ability", "measure", "passes", "why"), rows)


def rows() -> str:
    """A table of figures for each engine, model and machine class; then what was refused or failed, in words."""
    places: dict[tuple[str, ...], list[ProofRow]] = {}
    for row in sorted(Proofs(shipped_rows()).current("certification"), key=_order):
        places.setdefault((row.engine, row.engine_version, row.model, row.machine), []).append(row)
    parts = []
    for (engine, version, model, machine), there in places.items():
        days = sorted({row.day for row in there})
        parts.append(f"### {engine}, {version}: {model}\n\nOn `{machine}`, {' and '.join(days)}.\n")
        measured = [row for row in there if len(row.measures) > 1]
        parts.append(_table(COLUMNS[:-1], [(f"`{row.subject}`", *cells(row)[1:-1]) for row in measured]) + "\n")
        told = [line for row in there for line in _told(row)]
        parts.append(_table(("knob", "what", "why"), told) + "\n" if told else "")
    return "\n".join(parts).rstrip()


def _order(row: ProofRow) -> tuple[Any, ...]:
    """By engine, then what is stored in most bytes first; what was not measured last, by name."""
    stored = next((m.value for m in row.measures if m.name == "stored_row_bytes" and m.value is not None), 0.0)
    return (row.engine, row.engine_version, row.model, -stored, row.subject)


def _told(row: ProofRow) -> list[tuple[str, str, str]]:
    """What is said of it in words, under the name of the knob."""
    return [(f"`{row.subject}`", what, why) for what, why in remarks(row)]


PARTS = {"thresholds": thresholds, "rows": rows}
"""By the marker around each in the page."""


def filled(text: str) -> str:
    """The page with its generated parts as they would be now."""
    return page_parts.filled(text, PARTS)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
