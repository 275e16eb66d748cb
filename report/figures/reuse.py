"""Panel: how much of each turn was reused, and why the rest was computed."""

from __future__ import annotations

from kvtape.report.panel import Missing, Panel, Table
from kvtape.report.sources import Sources

__all__ = ["reuse_panel"]


def reuse_panel(sources: Sources) -> Panel:
    _, rows = sources.log.sql("SELECT reason, count(*) AS n, sum(tokens)::BIGINT AS t FROM why_prefilled GROUP BY 1")
    table = Table("Why prompts were computed", ("reason", "events", "tokens"), rows)
    lead = "What each turn found in the cache, and why the rest was computed."
    if not rows:
        return Panel("reuse", "Reuse", lead, missing=(Missing("No prefill is recorded.", "kvtape record ..."),))
    return Panel("reuse", "Reuse", lead, tables=(table,))
