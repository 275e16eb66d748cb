"""`kvtape top`: a log while it is recorded: what is resident, what goes, what failed, how fast."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtape.cli.args import AsJson, LogPath, SessionId

if TYPE_CHECKING:
    from kvtape.cli.output import Section
    from kvtape.cli.top_view import View

__all__ = ["top"]

_SHARE = 4
"""At least so many times as long as reading took passes before it is read again: copying a large log costs its disk."""


def top(
    log: LogPath,
    session: SessionId = None,
    every: Annotated[
        float,
        typer.Option(
            "--every", metavar="S", min=0.1, max=3600.0, help="Seconds between two looks, or more on a large log."
        ),
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once and print it; so does --json, and so does a pipe.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Watch a log while it is recorded: residents, evictions, fatals, rate, session by session.

    Each look is at a snapshot of the log, as every reader takes it: the recorder is not disturbed. q or Ctrl-C leaves.

    \b
    Example:
      kvtape top tapes
    """
    view = _look(log, session)
    if once or as_json or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        _print(view, as_json=as_json)
    else:
        _watch(log, session, every, view)
    return 0


def _look(log: Path, session: str | None) -> View:
    """Raises what `open_log` raises, and UsageError for a session that is not there."""
    from kvtape.backends.errors import UsageError
    from kvtape.cli.top_view import read_view
    from kvtape.planner.grammar import nearest
    from kvtape.traces.reader import open_log

    with open_log(log) as tape:
        view = read_view(tape)
    if session is None:
        return view
    found = view.only(session)
    if not found.sessions:
        names = [s.session_id for s in view.sessions]
        hint = nearest(session, names)
        raise UsageError(f"no session {session!r} in the log{hint} it has: {', '.join(names[:20]) or 'none'}")
    return found


def _print(view: View, *, as_json: bool) -> None:
    from kvtape.cli.output import emit
    from kvtape.cli.top_view import view_body

    emit("top", view_body(view), _sections(view), as_json=as_json)


def _sections(view: View) -> list[Section]:
    from kvtape.cli.output import Section

    columns = ("session", "state", "resident", "n_ctx", "evicts", "evicted", "refusals", "tokens/s", "last", "fatal")
    rows = [
        (s.session_id, s.state, s.resident, s.n_ctx, s.evicts, s.evicted, s.refusals, s.tokens_per_s, s.op, s.fatal)
        for s in view.sessions
    ]
    state = "sealed" if view.sealed else "not sealed"
    sections = [Section(f"sessions: {len(rows)}, events: {view.events}, {state}", columns, rows)]
    if view.latest:
        heads = ("session", "seq", "what", "tokens", "start", "stop", "reason", "error")
        happened = [
            (h.session_id, h.seq, h.op, h.n_tokens, h.start, h.stop, h.reason, h.error_class) for h in view.latest[:5]
        ]
        sections.append(Section("the last evicts, refusals, losses and fatals", heads, happened))
    return sections


def _watch(log: Path, session: str | None, every: float, view: View) -> None:
    from kvtape.backends.clock import MonotonicClock
    from kvtape.backends.errors import KvtapeError
    from kvtape.cli.top_screen import frame, keys, screen
    from kvtape.traces.errors import TraceError

    clock = MonotonicClock()
    looked_at, took, rate, problem = clock.now_ns(), 0, None, None
    with keys() as pressed, screen() as live:
        while True:
            shown = frame(view, str(log), *live.console.size[::-1], events_per_s=rate, problem=problem)
            live.update(shown, refresh=True)
            if pressed.quits_before(clock.now_ns() + max(int(every * 1e9), _SHARE * took), clock):
                return
            began = clock.now_ns()
            try:
                seen = _look(log, session)
            except (TraceError, KvtapeError, OSError) as err:
                problem = f"shown is the last look that worked; now: {' '.join(str(err).split())}"
            else:
                rate = max(0, seen.events - view.events) * 1e9 / max(1, began - looked_at)
                view, looked_at, problem = seen, began, None
            took = clock.now_ns() - began
