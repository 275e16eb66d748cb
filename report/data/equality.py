"""Whether engines held what the log says: verdicts of replays, and the runs of a log beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvtape.planner.residency import RESIDENCY_OPS
from kvtape.planner.rows import SessionRow
from kvtape.report.given.shapes import BackendResult
from kvtape.traces.reader import Log
from kvtape.traces.schema import quoted_text

__all__ = ["RunPair", "run_pairs", "verdict"]

_HELD: Final = ("op", "start", "stop", "resident_tokens", "resident_digest", "layout_digest")
"""What two runs are compared in, at each event that changes what is resident (`sim.fidelity.first_difference`)."""
_SHOWN: Final = ("seq", *_HELD)


@dataclass(frozen=True, slots=True)
class RunPair:
    """Two runs of one log, event by event, in the sessions that both have; no engine's memory was asked for it.

    `compared`: events that change residency. Where they part first: `session`, `seq` and `op` of the first run, and
    `what`; None where they never do.
    """

    first_run: str
    other_run: str
    shared_sessions: int
    lone_sessions: int
    compared: int
    session: str | None
    seq: int | None
    op: str | None
    what: str | None

    @property
    def equal(self) -> bool:
        return self.what is None and self.shared_sessions > 0


def verdict(target: BackendResult) -> str:
    """What a replay found of one engine, in words."""
    if target.equal:
        return "equal"
    if not target.residency_equal:
        return "NOT equal: other rows resident, or its memory was not read after every event"
    unknown, reason = target.witness_rows - target.witness_identities, target.reference_reason
    if unknown > 0 or reason is not None:
        return f"not proven: {unknown:,} rows were not identified" + (f" ({reason})" if reason else "")
    return "NOT equal: the same rows, other numbers than the gate allows"


def run_pairs(log: Log, run_ids: Sequence[str], sessions: Mapping[str, Sequence[SessionRow]]) -> tuple[RunPair, ...]:
    """The first run beside each of the others; `sessions`: those of each run. Raises LogUnreadable."""
    names = {run: {s.session_id for s in sessions[run]} for run in run_ids}
    return tuple(_pair(log, names, run_ids[0], other) for other in run_ids[1:])


def _pair(log: Log, names: Mapping[str, set[str]], one: str, other: str) -> RunPair:
    mine, its = names[one], names[other]
    n, first = _first_difference(log, one, other)
    session, seq, op, what = first if first is not None else (None, None, None, None)
    return RunPair(one, other, len(mine & its), len(mine ^ its), n, session, seq, op, what)


def _first_difference(log: Log, one: str, other: str) -> tuple[int, tuple[str, int | None, str | None, str] | None]:
    ops = ", ".join(f"'{op}'" for op in sorted(RESIDENCY_OPS))
    runs = {"a": quoted_text(one), "b": quoted_text(other)}
    sides = ", ".join(
        f"""{side} AS (SELECT session_id, row_number() OVER (PARTITION BY session_id ORDER BY seq) AS n,
        {", ".join(f"{name}::VARCHAR AS {name}" for name in _SHOWN)} FROM events
        WHERE run_id = {run} AND op IN ({ops}) AND session_id IN (SELECT session_id FROM shared))"""
        for side, run in runs.items()
    )
    shared = f"SELECT session_id FROM sessions WHERE run_id IN ({', '.join(runs.values())}) GROUP BY ALL"
    whole = f"WITH shared AS ({shared} HAVING count(*) = 2), {sides}"
    joined = "FROM a FULL JOIN b USING (session_id, n)"
    counted = log.sql(f"{whole} SELECT count(*) {joined} WHERE a.n IS NOT NULL AND b.n IS NOT NULL")[1][0][0]
    columns = ", ".join(f"{side}.{name}" for side in runs for name in _SHOWN)
    differ = " OR ".join(f"a.{name} IS DISTINCT FROM b.{name}" for name in _HELD)
    query = f"{whole} SELECT session_id, {columns} {joined} WHERE {differ} ORDER BY session_id, n LIMIT 1"
    rows = log.sql(query)[1]
    return int(counted), _told(rows[0]) if rows else None


def _told(row: tuple[str | None, ...]) -> tuple[str, int | None, str | None, str]:
    session, mine, its = str(row[0]), row[1 : 1 + len(_SHOWN)], row[1 + len(_SHOWN) :]
    seq, op = mine[0], mine[1]
    at = None if seq is None else int(seq)
    if op is None or its[1] is None:
        return session, at, op, "one run has no more events that change residency"
    pairs = zip(_HELD, mine[1:], its[1:], strict=True)
    return session, at, op, ", ".join(f"{name} {a} / {b}" for name, a, b in pairs if a != b)
