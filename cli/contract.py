"""The parity contract, asked of logs and of a test run: what holds, what fails and where, what is unproven."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtape.cli.output import Section
    from kvtape.replay.evidence import Evidence
    from kvtape.traces.reader import Log

__all__ = ["contract_report", "contract_sections"]

_SHOWN = 20
_UNCERTIFIED = "uncertified_sessions"
"""In the evidence of I5: no breach, since they say so, and not what a certification speaks for."""


@dataclass(slots=True)
class _Seen:
    """What the logs say of one invariant: rows it was held against, where they break it, and counts of its own."""

    rows: int = 0
    findings: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def contract_report(logs: Sequence[Path], evidence_file: Path | None) -> dict[str, Any]:
    """`invariants`: I1 to I7 with `state` holds, fails or unproven, and the evidence for it.

    A log can make one fail, never hold; only a test run of these sources makes one hold.
    """
    from kvtape.cli.logs import opened
    from kvtape.replay.evidence import INVARIANTS, read_evidence

    evidence = None if evidence_file is None else read_evidence(evidence_file)
    seen = {name: _Seen() for name in INVARIANTS}
    seen["I5"].counts[_UNCERTIFIED] = 0
    sessions = events = 0
    for path in logs:
        with opened(path) as tape:
            n_sessions, n_events = _look(tape, path, seen)
        sessions, events = sessions + n_sessions, events + n_events
    stale = None if evidence is None else evidence.stale
    return {
        "invariants": {name: _state(name, seen[name], evidence, stale, logs=len(logs)) for name in INVARIANTS},
        "logs": [str(path) for path in logs],
        "sessions": sessions,
        "events": events,
    }


def _look(tape: Log, path: Path, seen: dict[str, _Seen]) -> tuple[int, int]:
    """Hold every session of every run against the invariants."""
    from kvtape.planner.events import Op
    from kvtape.planner.opening import opening_of
    from kvtape.replay.identities import check_identities
    from kvtape.replay.invariants import Broken, capability_findings, fatal_findings, plan_findings
    from kvtape.replay.opt_ins import deferral_findings, precision_findings, speculation_findings

    def note(name: str, rows: int, run_id: str, found: Iterable[Broken]) -> None:
        seen[name].rows += rows
        seen[name].findings += [f"{path.name} {run_id}/{b.session_id} seq {b.seq}: {b.what}" for b in found]

    n_events = 0
    sessions = [row for run in tape.runs() for row in tape.sessions(run.run_id)]
    for row in sessions:
        events = tape.events(row.run_id, row.session_id)
        plans = tape.plans(row.run_id, row.session_id)
        note("I1", sum(e.op is Op.FATAL for e in events), row.run_id, fatal_findings(events))
        note("I2", len(events) if row.capabilities else 0, row.run_id, capability_findings(row, events))
        note("I3", len(plans), row.run_id, plan_findings(events, plans))
        note("I5", int(row.kv_type_k is not None), row.run_id, precision_findings(row, events))
        said = opening_of(events)
        seen["I5"].counts[_UNCERTIFIED] += said.precision is not None and not said.certified
        note("I6", sum(e.op is Op.PROMPT for e in events), row.run_id, deferral_findings(events))
        note("I7", sum(e.op is Op.DECODE for e in events), row.run_id, speculation_findings(events))
        n_events += len(events)
    for check in check_identities(lambda query: tape.sql(query)[1]):
        found = [Broken(session, seq, f"{check.name}: {what}") for _, session, seq, what in check.broken]
        for (run_id, *_), broken in zip(check.broken, found, strict=True):
            note("I4", 0, run_id, [broken])
        seen["I4"].rows += check.rows
    return len(sessions), n_events


def _state(name: str, seen: _Seen, evidence: Evidence | None, stale: str | None, *, logs: int) -> dict[str, Any]:
    told: dict[str, Any] = {
        "logs": logs,
        "rows": seen.rows,
        "broken_rows": len(seen.findings),
        "findings": seen.findings[:_SHOWN],
        **seen.counts,
        "tests": None,
    }
    why: list[str] = []
    failed = bool(seen.findings)
    if evidence is None:
        why.append("no test run was given (--evidence)")
    elif stale is not None:
        why.append(f"the test run does not count: {stale}")
    else:
        count = evidence.count(name)
        told["tests"] = {
            "passed": count.passed,
            "failed": count.failed,
            "skipped": count.skipped,
            "cells": count.cells,
            "failures": list(count.failures[:_SHOWN]),
        }
        failed = failed or count.failed > 0
        if count.missing:
            why.append(f"the test run lacks {', '.join(count.missing)}")
        elif not count.passed:
            why.append("no test of it passed")
    told["why_unproven"] = why
    return {"state": "fails" if failed else "unproven" if why else "holds", "evidence": told}


def contract_sections(body: dict[str, Any]) -> list[Section]:
    """The table of states, then every row and test that breaks one."""
    from kvtape.cli.output import Section

    rows = []
    wrong: list[tuple[str, str]] = []
    for name, told in body["invariants"].items():
        e = told["evidence"]
        tests = e["tests"] or {"passed": None, "failed": None, "cells": None}
        why = "; ".join(e["why_unproven"])
        rows.append(
            (name, told["state"], e["rows"], e["broken_rows"], tests["passed"], tests["failed"], tests["cells"], why)
        )
        wrong += [(name, finding) for finding in e["findings"]]
        wrong += [(name, test) for test in (e["tests"] or {}).get("failures", ())]
    columns = ("invariant", "state", "rows", "broken", "tests passed", "failed", "cells", "why unproven")
    sections = [Section("the parity contract", columns, rows)]
    if body["sessions"]:
        count = body["invariants"]["I5"]["evidence"][_UNCERTIFIED]
        said = f"uncertified: {count} of {body['sessions']} sessions ran on a precision that nothing certified"
        sections.append(Section(None, (), [(said,)]))
    if wrong:
        sections.append(Section("what breaks it", ("invariant", "where"), wrong))
    return sections
