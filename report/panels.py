"""Which panels a report has, in order. Each is made by one function of its own module in `figures`."""

from __future__ import annotations

from collections.abc import Callable

from kvtape.report.figures.reuse import reuse_panel
from kvtape.report.panel import Panel
from kvtape.report.sources import Sources

__all__ = ["PANELS", "make_panels"]

PANELS: tuple[Callable[[Sources], Panel], ...] = (reuse_panel,)


def make_panels(sources: Sources) -> list[Panel]:
    """Every panel; one that has nothing to show says what is missing."""
    return [make(sources) for make in PANELS]
