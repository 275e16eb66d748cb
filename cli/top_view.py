"""What `kvtape top` knows of a log at one moment: each session in numbers, and what happened last that matters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtape.traces.reader import Log

__all__ = ["RECENT_NS", "Happening", "SessionLine", "View", "read_view", "view_body"]

RECENT_NS = 10 * 10**9
"""A session's rate is that of its last ten seconds, by its own clock."""

_LATEST = 50
"""So many evicts, refusals, losses and fatals are told, of all sessions or of the one that is asked for."""

_SESSIONS = f"""
    WITH lasts AS (
        SELECT run_id, session_id, max(at_ns) AS last_ns, min(at_ns) AS first_ns
        FROM events GROUP BY ALL),
    sums AS (
        SELECT run_id, session_id, count(*) AS events, max(seq) AS seq, max(batch) AS batch,
            arg_max(op::VARCHAR, seq) AS op,
            coalesce(arg_max(resident_tokens, seq), 0) AS resident,
            arg_max(kv_bytes, seq) AS kv_bytes,
            count(*) FILTER (op = 'evict') AS evicts,
            coalesce(sum(n_tokens) FILTER (op = 'evict'), 0)::BIGINT AS evicted,
            count(*) FILTER (op = 'refuse') AS refusals,
            coalesce(sum(n_tokens) FILTER (op IN ('prefill', 'decode')), 0)::BIGINT AS computed,
            min(coalesce(error_class, reason, 'unknown')) FILTER (op = 'fatal') AS fatal,
            bool_or(op = 'lost') AS lost
        FROM events GROUP BY ALL),
    recent AS (
        SELECT run_id, session_id, sum(n_tokens) AS tokens,
            max(at_ns::HUGEINT + coalesce(elapsed_ns, 0)) - min(at_ns) AS span_ns
        FROM events JOIN lasts USING (run_id, session_id)
        WHERE op IN ('prefill', 'decode') AND at_ns::HUGEINT + {RECENT_NS} >= last_ns GROUP BY ALL)
    SELECT s.run_id, s.session_id, r.kind, s.op, s.events, s.seq, s.resident, o.n_ctx, s.kv_bytes, s.evicts, s.evicted,
        s.refusals, s.computed, CASE WHEN span_ns > 0 THEN tokens * 1e9 / span_ns END AS tokens_per_s, s.fatal, s.lost
    FROM sums s JOIN lasts USING (run_id, session_id) LEFT JOIN recent USING (run_id, session_id)
        LEFT JOIN (SELECT run_id, any_value(kind::VARCHAR) AS kind FROM runs GROUP BY ALL) r ON r.run_id = s.run_id
        LEFT JOIN sessions o ON o.run_id = s.run_id AND o.session_id = s.session_id
    ORDER BY s.batch DESC, last_ns DESC, s.run_id, s.session_id
"""

_HAPPENED = f"""
    SELECT run_id, session_id, seq, op::VARCHAR, n_tokens, start, stop, reason, error_class
    FROM events WHERE op IN ('evict', 'refuse', 'lost', 'fatal')
    QUALIFY row_number() OVER (PARTITION BY session_id ORDER BY batch DESC, at_ns DESC, seq DESC) <= {_LATEST}
    ORDER BY batch DESC, at_ns DESC, seq DESC, run_id, session_id
"""


@dataclass(frozen=True, slots=True)
class SessionLine:
    """One session. `state`: open, closed or fatal; `n_ctx` and `kv_bytes` are None where the source does not say.

    `computed`: tokens prefilled and decoded; `tokens_per_s`: of these, in its last RECENT_NS.
    """

    run_id: str
    session_id: str
    kind: str
    op: str
    events: int
    seq: int
    resident: int
    n_ctx: int | None
    kv_bytes: int | None
    evicts: int
    evicted: int
    refusals: int
    computed: int
    tokens_per_s: float | None
    fatal: str | None
    lost: bool

    @property
    def state(self) -> str:
        if self.fatal is not None:
            return "fatal"
        return "closed" if self.op == "close" else "open"


@dataclass(frozen=True, slots=True)
class Happening:
    """An evict, a refusal, a loss or a fatal."""

    run_id: str
    session_id: str
    seq: int
    op: str
    n_tokens: int | None
    start: int | None
    stop: int | None
    reason: str | None
    error_class: str | None


@dataclass(frozen=True, slots=True)
class View:
    """`sessions`: those that were written to last come first; `latest`: newest first, the last 50 of each session;
    `unacknowledged`: see `Log`.
    """

    sealed: bool
    unacknowledged: int | None
    events: int
    sessions: tuple[SessionLine, ...]
    latest: tuple[Happening, ...]

    def only(self, session_id: str) -> View:
        """The same of one session."""
        sessions = tuple(s for s in self.sessions if s.session_id == session_id)
        latest = tuple(h for h in self.latest if h.session_id == session_id)
        return View(self.sealed, self.unacknowledged, sum(s.events for s in sessions), sessions, latest)


def read_view(log: Log) -> View:
    """The view of an open log. Raises LogUnreadable."""
    sessions = tuple(SessionLine(*row) for row in log.sql(_SESSIONS)[1])
    latest = tuple(Happening(*row) for row in log.sql(_HAPPENED)[1])
    return View(log.sealed, log.unacknowledged, sum(s.events for s in sessions), sessions, latest)


def view_body(view: View) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "sealed": view.sealed,
        "unacknowledged": view.unacknowledged,
        "events": view.events,
        "resident_tokens": sum(s.resident for s in view.sessions if s.state == "open"),
        "evicts": sum(s.evicts for s in view.sessions),
        "evicted_tokens": sum(s.evicted for s in view.sessions),
        "fatals": sum(s.fatal is not None for s in view.sessions),
        "sessions": [{**asdict(s), "state": s.state} for s in view.sessions],
        "latest": [asdict(h) for h in view.latest[:_LATEST]],
    }
