"""What recorders write in the tests of crashes, and what must be found afterwards: the same events every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtape.planner.events import Event, Op
from kvtape.traces.errors import LogMissing, LogUnreadable, TraceError
from kvtape.traces.findings import FindingKind
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.repair import repair
from kvtape.traces.verify import verify
from support.logs import KEY, TickClock, event, run_row, session_row

__all__ = ["Verdict", "expected_event", "judge", "record_log"]

Say = Callable[[str], None]
"""Where a recorder says what it was told is durable: `open`, `acked N` (events 0 to N), `sealed`."""


def expected_event(seq: int) -> Event:
    return event(seq, Op.DECODE, start=seq, stop=seq + 1, n_tokens=1, reason="x" * (seq % 50))


def record_log(path: Path, n_events: int, say: Say, *, flush_every: int = 7, seal: bool = True) -> None:
    """Record and flush, saying what is acknowledged the moment it is: several batches a flush, often in one group."""
    recorder = Recorder(path, run_row(), clock=TickClock(), key=KEY, batch_events=3, max_latency_s=0)
    say("open")
    recorder.open_session(session_row())
    for seq in range(n_events):
        recorder.record(expected_event(seq), tokens=[seq % 97])
        if seq % flush_every == flush_every - 1 or seq == n_events - 1:
            recorder.flush()
            say(f"acked {seq}")
    if seal:
        recorder.seal()
        say("sealed")
    else:
        recorder.close()


@dataclass(frozen=True, slots=True)
class Verdict:
    """`wrong`: what must never be, None when all is well. `events` found; `how`: whole, repaired or absent."""

    wrong: str | None
    events: int
    how: str


def judge(path: Path, said: list[str], scratch: Path) -> Verdict:
    """Is everything that was acknowledged there, in whole batches, and nothing that was never recorded?

    Before anything is said a log may lack its sidecar. A log that a torn write left unreadable must give all that was
    acknowledged back through repair into `scratch`.
    """
    acked = max((int(line.split()[1]) for line in said if line.startswith("acked ")), default=-1)
    how = "whole"
    try:
        problem, found = _read(path, told=bool(said))
    except LogMissing:
        return Verdict("an acknowledged log is not there" if said else None, 0, "absent")
    except LogUnreadable as err:
        how = "repaired"
        try:
            report = repair(path, scratch)
        except TraceError as second:
            # Nobody was told that this log exists: it is as good as absent.
            return Verdict(f"{err}; {second}" if said else None, 0, how)
        if report.cut.batches is not None:
            return Verdict(f"repair: {report.cut.text}", report.events, how)
        problem, found = _read(scratch, told=bool(said))
    except TraceError as err:
        return Verdict(str(err) if said else None, 0, "refused")
    if problem is None and len(found) <= acked:
        problem = f"events up to {acked} were acknowledged, {len(found)} are there"
    if problem is None and found != [expected_event(seq) for seq in range(len(found))]:
        problem = "the events are not those that were recorded"
    return Verdict(problem, len(found), how)


def _read(path: Path, *, told: bool) -> tuple[str | None, list[Event]]:
    result = verify(path)
    findings = [f for f in result.findings if told or f.kind is not FindingKind.HEAD_MISSING]
    if findings:
        return f"verify: {[f.detail for f in findings]}", []
    with open_log(path) as log:
        sessions = [s.session_id for run in log.runs() for s in log.sessions(run.run_id)]
        return None, log.events("r0", "s0") if sessions else []
