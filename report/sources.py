"""What a report is made from: an open log, which of its runs are shown, and files of results beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtape.planner.rows import RunRow, SessionRow
from kvtape.report.data.views import SessionView, session_views
from kvtape.report.given.reading import Given, Subject, read_given
from kvtape.traces.errors import NoSuchRow
from kvtape.traces.reader import Log

__all__ = ["Sources", "choose"]


@dataclass(frozen=True, slots=True)
class Sources:
    """`shown`: runs whose sessions the panels of sessions show. `runs`: those that the panels of results look at.

    `sessions`: of the runs shown, in the order of their first events; `only`: their names when they were asked for.
    `given`: what other verbs wrote of this log. `digests`: the logical digest of each of `runs`.
    `recorded`: the sessions of each of `runs`. `views`: those of the sessions that the page holds.
    """

    log: Log
    shown: tuple[RunRow, ...]
    runs: tuple[RunRow, ...]
    sessions: tuple[SessionRow, ...]
    only: tuple[str, ...] = ()
    given: Given = field(default_factory=Given)
    digests: Mapping[str, str] = field(default_factory=dict)
    recorded: Mapping[str, Sequence[SessionRow]] = field(default_factory=dict)
    views: tuple[SessionView, ...] = ()


def choose(log: Log, runs: Sequence[str] = (), only: Sequence[str] = (), results: Sequence[Path] = ()) -> Sources:
    """Without `runs` the log's default run is shown, and the results of all runs.

    Raises NoSuchRow, and UsageError for a file of `results` that is none, or not of this log.
    """
    there = {row.run_id: row for row in log.runs()}
    unknown = [name for name in runs if name not in there]
    if unknown:
        raise NoSuchRow(f"{log.path}: no run {unknown[0]!r}; the log has {', '.join(there) or 'none'}")
    shown = tuple(there[name] for name in dict.fromkeys(runs)) or (log.default_run(),)
    looked_at = shown if runs else tuple(there.values())
    recorded = {run.run_id: log.sessions(run.run_id) for run in looked_at}
    sessions = tuple(row for run in shown for row in recorded[run.run_id])
    names = [row.session_id for row in sessions]
    absent = [name for name in only if name not in names]
    if absent:
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        raise NoSuchRow(f"{log.path}: no session {absent[0]!r}; there is {', '.join(names[:20]) or 'none'}{more}")
    kept = tuple(row for row in sessions if not only or row.session_id in only)
    digests = {run_id: log.logical_digest(run_id) for run_id in recorded}
    given = read_given(results, _subject(log, recorded, digests)) if results else Given()
    return Sources(log, shown, looked_at, kept, tuple(only), given, digests, recorded, session_views(log, kept))


def _subject(log: Log, recorded: Mapping[str, Sequence[SessionRow]], digests: Mapping[str, str]) -> Subject:
    """Results may be of any run that is looked at, and of any model in them."""
    models = {row.model_fingerprint for rows in recorded.values() for row in rows}
    return Subject(log.path.name, frozenset(digests.values()), frozenset(m for m in models if m is not None))
