"""`kvtape show`: the state of a session at any moment, folded from its events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AsJson, LogPath, PlotPath, SessionId

if TYPE_CHECKING:
    from kvtape.cli.output import Section
    from kvtape.planner.events import Event
    from kvtape.planner.residency import ResidencyState
    from kvtape.planner.rows import PlanRow, SessionRow
    from kvtape.traces.reader import Log

__all__ = ["show"]

MOST_SESSIONS = 100
"""An imported log has thousands of sessions; so many are shown when none is named."""


def show(
    log: LogPath,
    session: SessionId = None,
    at: Annotated[
        int | None, typer.Option("--at", metavar="SEQ", min=0, help="After this event; default: the last.")
    ] = None,
    plot: PlotPath = None,
    as_json: AsJson = False,
) -> None:
    """Show the state of a session at any moment.

    What is resident, cold and gone, the layout, the counters and the last plan, folded from the events. --plot draws
    the residency map of one session: what every position of the tape was after every event.

    \b
    Example:
      kvtape show demo-out/demo.duckdb --session essay --at 40 --plot map.svg
    """
    from kvtape.backends.errors import UsageError
    from kvtape.cli.logs import chosen_sessions, named_sessions, opened
    from kvtape.cli.output import emit, note
    from kvtape.cli.plots.writing import check_plot, write_picture

    check_plot(plot)
    with opened(log) as tape:
        run_id = tape.default_run().run_id
        rows = chosen_sessions(tape, session)
        if at is not None and len(rows) != 1:
            raise UsageError(f"--at needs --session; the log has: {named_sessions(rows)}")
        if plot is not None:
            from kvtape.cli.plots.residency import residency_picture

            if len(rows) != 1:
                raise UsageError(
                    f"--plot draws one session; name it with --session, the log has: {named_sessions(rows)}"
                )
            write_picture(plot, residency_picture(tape, rows[0], at=at))
        shown: list[dict[str, Any]] = []
        sections: list[Section] = []
        if not rows:
            note(f"kvtape: {log}: no session in it; the rest of a log is asked with kvtape sql")
        if len(rows) > MOST_SESSIONS:
            note(f"kvtape: {MOST_SESSIONS} of {len(rows)} sessions; name one with --session, or ask kvtape sql")
        for row in rows[:MOST_SESSIONS]:
            last = _moment(tape, run_id, row.session_id, at)
            state = tape.state_at(run_id, row.session_id, last)
            facts = _facts(tape, row, last, state)
            shown.append(facts)
            sections.append(_section(row, state, facts))
        digest = tape.logical_digest(run_id)
        body = {"sessions": shown, "n_sessions": len(rows)}
        emit("show", body, sections, as_json=as_json, digest=digest, digest_kind="logical")


def _moment(tape: Log, run_id: str, session_id: str, at: int | None) -> int:
    """The event to show: `at`, else the last; no further than where events were lost, since the fold ends there."""
    from kvtape.backends.errors import UsageError
    from kvtape.cli.output import note

    last = tape.event(run_id, session_id).seq
    if at is not None and at > last:
        raise UsageError(f"session {session_id} has events 0 to {last}; no event {at}")
    lost = tape.lost_at(run_id, session_id)
    if lost is None or (at is not None and at <= lost):
        return last if at is None else at
    if at is not None:
        raise UsageError(f"session {session_id} lost events from {lost} on, so nothing is known after it; --at {lost}")
    note(f"kvtape: session {session_id} lost events from {lost} on: shown is what was known then")
    return lost


def _facts(tape: Log, row: SessionRow, seq: int, state: ResidencyState) -> dict[str, Any]:
    from kvtape.backends.journal import COUNTERS
    from kvtape.planner.residency_state import UNBOUNDED

    last = tape.event(row.run_id, row.session_id, seq)
    plan = tape.last_plan(row.run_id, row.session_id, seq)
    return {
        "run_id": row.run_id,
        "session_id": row.session_id,
        "backend": row.backend,
        "policy": row.policy,
        "precision": _precision(tape.event(row.run_id, row.session_id, 0)),
        "seq": last.seq,
        "op": str(last.op),
        "turn": state.turn,
        "generation": state.generation,
        "tape_length": state.tape_length,
        "prefix_length": state.prefix_length,
        "n_ctx": None if state.n_ctx == UNBOUNDED else state.n_ctx,
        "resident_tokens": state.resident_tokens,
        "resident": state.resident.as_pairs(),
        "cold": [[b.block_id, b.start, b.stop] for b in state.cold],
        "dropped": state.dropped.as_pairs(),
        "layout": [[s.tape_start, s.length, s.cache_start] for s in state.layout],
        "snapshots": list(state.snapshot_ids()),
        "closed": state.closed,
        "fatal": state.fatal,
        "counters": tape.totals(row.run_id, row.session_id, COUNTERS, seq),  # each stands on one event of its turn
        "last_plan": None if plan is None else _plan(plan),
    }


def _precision(opened: Event) -> dict[str, Any] | None:
    """The knob that the session was opened with, and whether it was certified; None of a base precision."""
    from kvtape.planner.opening import opening_of

    said = opening_of([opened])
    return None if said.precision is None else {"knob": said.precision, "certified": said.certified}


def _plan(plan: PlanRow) -> dict[str, Any]:
    import json
    from dataclasses import asdict

    facts = {key: value for key, value in asdict(plan).items() if key not in ("run_id", "session_id")}
    return {**facts, **{key: json.loads(facts[key]) for key in ("keep", "evict", "diagnostics")}}


def _precision_line(said: dict[str, Any] | None) -> list[tuple[str, str]]:
    if said is None:
        return []
    return [("precision", f"{said['knob']}, {'certified' if said['certified'] else 'uncertified'}")]


def _section(row: SessionRow, state: ResidencyState, facts: dict[str, Any]) -> Section:
    from kvtape.cli.logs import ranges_text
    from kvtape.cli.output import Section
    from kvtape.planner.ranges import RangeSet

    plan = facts["last_plan"]
    counters = facts["counters"]
    lines = [
        ("backend, policy", f"{row.backend}, {row.policy or 'unknown'}"),
        *_precision_line(facts["precision"]),
        ("after event", f"{facts['seq']} ({facts['op']}), turn {state.turn}, generation {state.generation}"),
        ("tape", f"{state.tape_length} tokens, prefix {state.prefix_length}"),
        ("resident", f"{state.resident_tokens} of {facts['n_ctx'] or 'unknown'}: {ranges_text(state.resident)}"),
        ("cold", f"{state.cold_ranges.n_tokens} in {len(state.cold)} blocks: {ranges_text(state.cold_ranges)}"),
        ("dropped", f"{state.dropped.n_tokens}: {ranges_text(state.dropped)}"),
        ("layout (tape -> cache)", " ".join(f"{s.tape_start}+{s.length}->{s.cache_start}" for s in state.layout[:8])),
        ("counters", ", ".join(f"{name} {value}" for name, value in counters.items() if value)),
        (
            "last plan",
            "none"
            if plan is None
            else f"event {plan['seq']}: {plan['trigger']}, keeps "
            f"{plan['hot_tokens']} of {plan['total_tokens']}, evicts "
            f"{ranges_text(RangeSet((a, b) for _, a, b in plan['evict']))}",
        ),
        ("ended", f"fatal: {state.fatal}" if state.fatal else "closed" if state.closed else "open"),
    ]
    return Section(f"session {row.session_id}", ("what", "value"), lines)
