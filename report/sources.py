"""What a report is made from: an open log, which of its runs are shown, and files of results beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtape.planner.rows import RunRow, SessionRow
from kvtape.traces.errors import NoSuchRow
from kvtape.traces.reader import Log

__all__ = ["Sources", "choose"]


@dataclass(frozen=True, slots=True)
class Sources:
    """`shown`: runs whose sessions the panels of sessions show. `runs`: those that the panels of results look at.

    `sessions`: of the runs shown, in the order of their first events; `only`: their names when they were asked for.
    `results`: JSON files that other verbs wrote.
    """

    log: Log
    shown: tuple[RunRow, ...]
    runs: tuple[RunRow, ...]
    sessions: tuple[SessionRow, ...]
    only: tuple[str, ...] = ()
    results: tuple[Path, ...] = ()


def choose(log: Log, runs: Sequence[str] = (), only: Sequence[str] = (), results: Sequence[Path] = ()) -> Sources:
    """Without `runs` the log's default run is shown, and the results of all runs. Raises NoSuchRow."""
    there = {row.run_id: row for row in log.runs()}
    unknown = [name for name in runs if name not in there]
    if unknown:
        raise NoSuchRow(f"{log.path}: no run {unknown[0]!r}; the log has {', '.join(there) or 'none'}")
    shown = tuple(there[name] for name in dict.fromkeys(runs)) or (log.default_run(),)
    sessions = tuple(row for run in shown for row in log.sessions(run.run_id))
    names = [row.session_id for row in sessions]
    absent = [name for name in only if name not in names]
    if absent:
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        raise NoSuchRow(f"{log.path}: no session {absent[0]!r}; there is {', '.join(names[:20]) or 'none'}{more}")
    kept = tuple(row for row in sessions if not only or row.session_id in only)
    return Sources(log, shown, shown if runs else tuple(there.values()), kept, tuple(only), tuple(results))
