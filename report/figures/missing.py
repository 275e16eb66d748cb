"""What panels of sessions say where there is no session to show, or none in which anything was computed."""

from __future__ import annotations

import shlex

from kvtape.report.data.commands import RECORD, ROOFLINE
from kvtape.report.panel import Missing
from kvtape.report.sources import Sources

__all__ = ["nothing_to_show"]


def nothing_to_show(sources: Sources) -> tuple[Missing, ...]:
    """Why panels of sessions have nothing to draw; empty where they have."""
    return _no_effects(sources) if sources.views else _no_sessions(sources)


def _no_sessions(sources: Sources) -> tuple[Missing, ...]:
    """Runs of results have no sessions of their own."""
    runs = ", ".join(run.run_id for run in sources.shown)
    what = f"Run {runs} has no session with events. Record one, or name another run of the log."
    command = f"{RECORD}\nkvtape report {shlex.quote(sources.log.path.name)} RUN"
    return (Missing(what, command),)


def _no_effects(sources: Sources) -> tuple[Missing, ...]:
    """Empty where anything was ever resident. An imported trace of requests says what was asked, and no more."""
    if any(view.history.resident.any() for view in sources.views):
        return ()
    what = (
        f"The {len(sources.sessions):,} sessions of this run say what was asked, not what a cache held: no prefill, "
        "decode or evict is in them. Simulate the workload, and report that."
    )
    log = sources.log.path.name
    costs = f"kvtape calibrate --roofline {ROOFLINE} --out costs.json   # numbers of your machine and model"
    what_if = "--n-ctx 2048 --policy stream:sink=4,recent=1020 --costs costs.json"
    command = f"kvtape simulate {shlex.quote(log)} {what_if} --log simulated.duckdb"
    return (Missing(what, f"{costs}\n{command}\nkvtape report simulated.duckdb"),)
