"""What one module of figures adds to a panel that several make."""

from __future__ import annotations

from dataclasses import dataclass

from kvtape.report.panel import Figure, Missing, Table

__all__ = ["Parts"]


@dataclass(frozen=True, slots=True)
class Parts:
    """Figures, tables, and what is missing; any of them may be none."""

    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    missing: tuple[Missing, ...] = ()
