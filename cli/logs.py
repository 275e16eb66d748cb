"""Opening logs for a command: the reader's notice goes to stderr, a missing session is a clear error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvtape.backends.errors import UsageError
from kvtape.planner.grammar import nearest

if TYPE_CHECKING:
    from kvtape.planner.ranges import RangeSet
    from kvtape.planner.rows import SessionRow
    from kvtape.traces.reader import Log

__all__ = ["chosen_sessions", "named_sessions", "opened", "ranges_text"]


@contextmanager
def opened(path: Path) -> Iterator[Log]:
    """The log, read-only; what the reader had to do to read it is said on stderr."""
    from kvtape.cli.output import note
    from kvtape.traces.reader import open_log

    with open_log(path) as log:
        if log.notice:
            note(f"kvtape: {log.notice}")
        yield log


def chosen_sessions(log: Log, session_id: str | None) -> list[SessionRow]:
    """The sessions of the log's default run, or the one asked for. Raises UsageError naming those there are."""
    rows = log.sessions(log.default_run().run_id)
    if session_id is None:
        return rows
    found = [row for row in rows if row.session_id == session_id]
    if not found:
        hint = nearest(session_id, [row.session_id for row in rows])
        raise UsageError(f"no session {session_id!r} in the log{hint} it has: {named_sessions(rows)}")
    return found


def named_sessions(rows: Sequence[SessionRow], most: int = 20) -> str:
    """The names of sessions for an error line, which stays a line where a trace has thousands."""
    more = f" and {len(rows) - most} more" if len(rows) > most else ""
    return (", ".join(row.session_id for row in rows[:most]) or "none") + more


def ranges_text(ranges: RangeSet, most: int = 8) -> str:
    """`[0, 4) [516, 1024)`, shortened in the middle when there are many."""
    parts = [str(r) for r in ranges]
    if len(parts) > most:
        half = most // 2
        parts = [*parts[:half], f"... {len(parts) - 2 * half} more ...", *parts[-half:]]
    return " ".join(parts) or "none"
