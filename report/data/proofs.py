"""What was proven of a log's models on its engines: certifications of precisions, the gate of optimisations.

Rows come from four places: with kvtape, from the user's own document, from the log itself, from results that are given.
Of the first two only those count that speak of a model of the log, on an engine that it was recorded or replayed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtape.backends.proofs.log_rows import proof_rows
from kvtape.backends.proofs.rows import ProofRow
from kvtape.backends.proofs.store import proofs_path, read_rows, shipped_rows
from kvtape.eval.certification.report import remarks
from kvtape.planner.events import Op
from kvtape.planner.opening import opening_of
from kvtape.planner.rows import SessionRow
from kvtape.report.given.reading import Given
from kvtape.report.given.shapes import Certification, Replay
from kvtape.traces.reader import Log

__all__ = ["Precision", "Proof", "Refusal", "precisions", "proofs_of", "refusals"]

_Key = tuple[str, str | None, str | None, str | None, str | None, str | None, bool | None]


@dataclass(frozen=True, slots=True)
class Proof:
    """`where`: which of the four places the row is from, in words; of a result that was given its file."""

    where: str
    row: ProofRow


@dataclass(frozen=True, slots=True)
class Refusal:
    """An ability that a precision did not prove, with its verdict, and why."""

    subject: str
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Precision:
    """How sessions of the log stored their rows. `knob` None: a base precision, which needs no proof.

    `certified`: whether a passing row let the knob through when the session opened; None where it is no knob.
    """

    engine: str
    engine_version: str | None
    model: str | None
    keys: str | None
    values: str | None
    knob: str | None
    certified: bool | None
    sessions: int


def proofs_of(log: Log, sessions: Sequence[SessionRow], run_ids: Sequence[str], given: Given) -> tuple[Proof, ...]:
    """Certifications first, then the gate, each by engine. The engines of replays that are given count as the log's.

    Raises UsageError for a document of the user's own that is damaged, LogUnreadable.
    """
    models = {s.model_fingerprint for s in sessions}
    engines = {s.backend for s in sessions}
    engines |= {b.name.partition(":")[0] for named in given.of(Replay) for b in named.value.backends}
    own = proofs_path()
    kept = [("comes with kvtape", row) for row in shipped_rows()]
    kept += [("the user's own", row) for row in (read_rows(own) if own.exists() else ())]
    found = [Proof(where, row) for where, row in kept if row.fingerprint in models and row.engine in engines]
    for run_id in run_ids:
        found += [Proof("this log", row) for row in proof_rows(log.certifications(run_id))]
    found += [Proof(named.name, row) for named in given.of(Certification) for row in named.value.rows]
    return tuple(sorted(found, key=lambda p: (p.row.kind, p.row.engine, p.row.fingerprint)))


def refusals(proofs: Iterable[Proof]) -> tuple[Refusal, ...]:
    """What did not pass, of certifications, each ability once."""
    return tuple(
        Refusal(row.subject, what, why)
        for row in (proof.row for proof in proofs if proof.row.kind == "certification")
        for what, why in remarks(row)
        if row.verdict != "pass" or len(row.measures) > 1  # else it stands for another row, which decides
    )


def precisions(log: Log, sessions: Sequence[SessionRow]) -> tuple[Precision, ...]:
    """One for each way in which rows were stored, with the number of sessions. Raises LogUnreadable."""
    opened = _openings(log, {s.run_id for s in sessions})
    counts: dict[_Key, int] = {}
    for s in sessions:
        said = opened.get((s.run_id, s.session_id))
        knob, certified = (None, None) if said is None else said
        key = (s.backend, s.engine_version, s.model_name, s.kv_type_k, s.kv_type_v, knob, certified)
        counts[key] = counts.get(key, 0) + 1
    return tuple(_precision(key, n) for key, n in counts.items())


def _precision(key: _Key, n: int) -> Precision:
    engine, version, model, keys, values, knob, certified = key
    return Precision(engine, version, model, keys, values, knob, certified, n)


def _openings(log: Log, run_ids: Iterable[str]) -> dict[tuple[str, str], tuple[str | None, bool | None]]:
    """What sessions said of a knob, of those that said anything when they opened."""
    asked = f"SELECT run_id, session_id FROM events WHERE op = '{Op.OPEN}' AND detail IS NOT NULL ORDER BY ALL"
    wanted = set(run_ids)
    found: dict[tuple[str, str], tuple[str | None, bool | None]] = {}
    for run_id, session_id in log.sql(asked)[1]:
        if run_id in wanted:
            opening = opening_of([log.event(run_id, session_id, 0)])
            found[run_id, session_id] = (opening.precision, opening.certified)
    return found
