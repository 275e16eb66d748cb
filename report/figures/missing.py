"""What panels of sessions say where there is no session to show."""

from __future__ import annotations

from kvtape.report.panel import Missing
from kvtape.report.sources import Sources

__all__ = ["no_sessions"]


def no_sessions(sources: Sources) -> tuple[Missing, ...]:
    """Runs of results have no sessions of their own."""
    runs = ", ".join(run.run_id for run in sources.shown)
    what = f"Run {runs} has no session with events. Record one, or name another run of the log."
    command = f"kvtape record --text FILE --log L\nkvtape report {sources.log.path.name} RUN"
    return (Missing(what, command),)
