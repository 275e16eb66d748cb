"""Which panels a report has, in order. Each is made by one function of its own module in `figures`."""

from __future__ import annotations

from collections.abc import Callable

from kvtape.report.figures.equality import equality_panel
from kvtape.report.figures.occupancy import occupancy_panel
from kvtape.report.figures.policies import policies_panel
from kvtape.report.figures.proofs import proofs_panel
from kvtape.report.figures.residency import residency_panel
from kvtape.report.figures.reuse import reuse_panel
from kvtape.report.figures.rules import rules_panel
from kvtape.report.figures.timeline import timeline_panel
from kvtape.report.panel import Panel
from kvtape.report.sources import Sources

__all__ = ["PANELS", "make_panels"]

PANELS: tuple[Callable[[Sources], Panel], ...] = (
    residency_panel,
    timeline_panel,
    occupancy_panel,
    reuse_panel,
    policies_panel,
    equality_panel,
    proofs_panel,
    rules_panel,
)


def make_panels(sources: Sources) -> list[Panel]:
    """Every panel; one that has nothing to show says what is missing."""
    return [make(sources) for make in PANELS]
