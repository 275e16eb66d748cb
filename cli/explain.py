"""`kvtape explain`: one decision of a log: what was kept and evicted, why, and what else could have been decided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AsJson, LogPath, SessionId

if TYPE_CHECKING:
    from kvtape.planner.rows import RunRow, SessionRow
    from kvtape.traces.reader import Log

__all__ = ["explain"]


def explain(
    log: LogPath,
    where: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] SEQ",
            help="The event, and where the log has several runs the beginning of one's id.",
            show_default=False,
        ),
    ],
    session: SessionId = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="SPEC", help="What would it have done? Repeatable; default: the usual ones."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Explain one decision: what went and why, and what else could have been decided.

    It is the plan of event SEQ, or the one behind an evict, admit, prefill or refusal: what was resident, what went and
    why, what other policies would have done with the same blocks and scores at that moment, and whether what went was
    asked for again later. The recorded plan is made again on what the log has, and the output says whether it comes out
    the same (exit code 1 when not).

    \b
    Example:
      kvtape explain demo-out/demo.duckdb 14 --session essay --policy class:budget=512
    """
    from kvtape.backends.errors import UsageError
    from kvtape.cli.explain_text import explained_body, explained_sections
    from kvtape.cli.logs import opened
    from kvtape.cli.output import emit
    from kvtape.sim.explain.explaining import explain_event
    from kvtape.sim.explain.moment import recorded_session

    if len(where) > 2:
        raise UsageError(f"{' '.join(where)}: give [RUN] SEQ, a run and the number of an event")
    run_text, number = where[0] if len(where) == 2 else None, where[-1]
    with opened(log) as tape:
        run = _run_of(tape, run_text)
        row = _session_of(tape, run, session)
        at = _seq_of(number)
        recorded = recorded_session(tape, run.run_id, row.session_id)
        found = explain_event(recorded, at, policy or None)
        body = explained_body(found, run, row, _why_computed(tape, run, row, at))
        digest = tape.logical_digest(run.run_id)
    emit("explain", body, explained_sections(body), as_json=as_json, digest=digest, digest_kind="logical")
    return int(found.decision is not None and found.decision.rederived.verdict == "differs")


def _seq_of(text: str) -> int:
    from kvtape.backends.errors import UsageError

    if not text.isascii() or not text.isdigit():
        raise UsageError(
            f"SEQ {text!r}: give the number of an event; kvtape sql lists them (select seq, op from events)"
        )
    return int(text)


def _run_of(tape: Log, text: str | None) -> RunRow:
    """The run whose id is `text` or begins with it; the log's default run for None. Raises UsageError."""
    from kvtape.backends.errors import UsageError
    from kvtape.planner.grammar import nearest

    if text is None:
        return tape.default_run()
    runs = tape.runs()
    found = [r for r in runs if r.run_id == text] or [r for r in runs if r.run_id.startswith(text)]
    if len(found) != 1:
        there = ", ".join(r.run_id for r in (found or runs)) or "none"
        hint = nearest(text, [r.run_id for r in runs])
        what = "several runs begin so" if found else f"no such run{hint} the log has"
        raise UsageError(f"run {text!r}: {what}: {there}")
    return found[0]


def _session_of(tape: Log, run: RunRow, session_id: str | None) -> SessionRow:
    """The session named, or the only one. Raises UsageError naming those there are."""
    from kvtape.backends.errors import UsageError
    from kvtape.cli.logs import named_sessions
    from kvtape.planner.grammar import nearest

    rows = tape.sessions(run.run_id)
    if session_id is None and len(rows) == 1:
        return rows[0]
    found = [row for row in rows if row.session_id == session_id]
    if not found:
        hint = ";" if session_id is None else nearest(session_id, [row.session_id for row in rows])
        what = "name one with --session" if session_id is None else f"no session {session_id!r}"
        raise UsageError(f"{what}{hint} run {run.run_id} has: {named_sessions(rows)}")
    return found[0]


def _why_computed(tape: Log, run: RunRow, row: SessionRow, seq: int) -> dict[str, Any] | None:
    """The event's row of the view `why_prefilled`, None where it computed nothing."""
    from kvtape.traces.database import readable

    query = (
        'SELECT reason, tokens, "start", "stop", replaced_tokens FROM why_prefilled '
        "WHERE run_id = ? AND session_id = ? AND seq = ?"
    )
    with readable(tape.path):
        found = tape.connection.execute(query, [run.run_id, row.session_id, seq]).fetchall()
    names = ("reason", "tokens", "start", "stop", "replaced_tokens")
    return dict(zip(names, found[0], strict=True)) if found else None
