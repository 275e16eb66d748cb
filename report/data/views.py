"""What the page holds of a session: its history, its events as columns, its limits. Long sessions are thinned out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtape.planner.event_columns import OP_CODES
from kvtape.planner.events import Op
from kvtape.planner.rows import SessionRow
from kvtape.planner.specs import PolicySpec, SpecError, parse_policy
from kvtape.planner.table import Ints
from kvtape.report.data.history import History, history
from kvtape.report.data.thinning import Thin, thinned
from kvtape.traces.reader import Log

__all__ = ["MOST_EVENTS", "MOST_SESSIONS", "Limits", "SessionView", "known_policy", "session_views", "shown_spans"]

MOST_SESSIONS = 24
"""So many sessions can be chosen from on one page."""

MOST_EVENTS = 240_000
"""Of all sessions together: what keeps the page small. A session with more than its equal share is thinned out."""

_COUNTS = "SELECT run_id, session_id, count(*) FROM events GROUP BY ALL"


@dataclass(frozen=True, slots=True)
class Limits:
    """`context`: effective n_ctx; None where the log does not say. `sink`, `recent`: the policy's spans. All in tokens.

    `plans`: seq and budget of every plan whose budget differs from the one before it; `policy_budget`: that of the
    spec, or None.
    """

    context: int | None
    policy_budget: int | None
    sink: int
    recent: int
    plans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SessionView:
    """One session. `lost_at`: the event from which nothing is known. `thin`: what the page holds of it.

    `evicts`, `admits`: how many events of these kinds, also where it is thinned out. `texts`: the distinct reasons of
    its events, by the numbers in `thin.text`.
    """

    row: SessionRow
    label: str
    n_events: int
    evicts: int
    admits: int
    history: History
    limits: Limits
    texts: tuple[str, ...]
    thin: Thin
    lost_at: int | None


def session_views(log: Log, rows: Sequence[SessionRow]) -> tuple[SessionView, ...]:
    """The sessions that have events, at most MOST_SESSIONS: of more, those with the most events, in their order.

    Raises IllegalEvent for a log that cannot be folded.
    """
    counted = {(run, name): n for run, name, n in log.sql(_COUNTS)[1]}
    some = [row for row in rows if (row.run_id, row.session_id) in counted]
    longest = sorted(some, key=lambda row: -counted[row.run_id, row.session_id])[:MOST_SESSIONS]
    chosen = {(row.run_id, row.session_id) for row in longest}
    several = len({run for run, _ in chosen}) > 1
    share = MOST_EVENTS // max(1, len(chosen))
    return tuple(
        _view(log, row, -(-counted[row.run_id, row.session_id] // share), several)
        for row in some
        if (row.run_id, row.session_id) in chosen
    )


def _view(log: Log, row: SessionRow, every: int, several: bool) -> SessionView:
    lost = log.lost_at(row.run_id, row.session_id)
    columns = log.columns(row.run_id, row.session_id, lost)
    limits = _limits(log, row)
    past = history(columns, sink=limits.sink, recent=limits.recent)
    at, elapsed, codes, texts = _details(log, row, len(columns))
    thin = thinned(columns, past, at, elapsed, codes, every)
    name = row.session_id or "(no name)"
    label = f"{row.run_id} / {name}" if several else name
    evicts, admits = (int((columns.op == OP_CODES[op]).sum()) for op in (Op.EVICT, Op.ADMIT))
    return SessionView(row, label, len(columns), evicts, admits, past, limits, texts, thin, lost)


def _limits(log: Log, row: SessionRow) -> Limits:
    policy = known_policy(row)
    sink, recent = shown_spans(policy)
    plans: list[tuple[int, int]] = []
    for seq, plan in sorted(log.plans(row.run_id, row.session_id).items()):
        if not plans or plans[-1][1] != plan.budget_tokens:
            plans.append((seq, plan.budget_tokens))
    return Limits(row.n_ctx, policy.budget if policy else None, sink, recent, tuple(plans))


def known_policy(row: SessionRow) -> PolicySpec | None:
    """The session's policy. None also for a function of the user's own that is not here."""
    try:
        return parse_policy(row.policy) if row.policy else None
    except SpecError:
        return None


def shown_spans(policy: PolicySpec | None) -> tuple[int, int]:
    """Sink and recent of a policy as a map shows them, in tokens. One recent token is every policy's, and not shown."""
    return (0, 0) if policy is None else (policy.sink, policy.recent if policy.recent > 1 else 0)


def _details(log: Log, row: SessionRow, n: int) -> tuple[Ints, Ints, Ints, tuple[str, ...]]:
    """at_ns from the session's beginning, elapsed_ns (-1: not known), number of the reason; the reasons."""
    where = "run_id = ? AND session_id = ?"
    table = log.arrow("events", where, [row.run_id, row.session_id]).slice(0, n)
    at = np.array(table.column("at_ns").to_pylist(), dtype=np.int64)
    elapsed = np.array([-1 if v is None else v for v in table.column("elapsed_ns").to_pylist()], dtype=np.int64)
    parts = zip(*(table.column(name).to_pylist() for name in ("reason", "error_class", "way")), strict=True)
    said = [" · ".join(text for text in row if text) for row in parts]
    texts = tuple(sorted(set(said)))
    number = {text: i for i, text in enumerate(texts)}
    codes = np.array([number[text] for text in said], dtype=np.int64)
    return at - (at[0] if n else 0), elapsed, codes, texts
