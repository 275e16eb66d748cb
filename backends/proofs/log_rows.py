"""Proofs as rows of a log, and back: one for each measure, and before them one for the subject as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvtape.backends.proofs.rows import Measure, ProofRow
from kvtape.planner.rows import CertificationRow

__all__ = ["log_rows", "proof_rows"]


def log_rows(run_id: str, proofs: Iterable[ProofRow], first: int = 0) -> list[CertificationRow]:
    """Rows of proofs, numbered from `first`, as `Recorder.add_certifications` takes them."""
    parts = [(proof, measure) for proof in proofs for measure in (None, *proof.measures)]
    return [_row(run_id, first + i, proof, measure) for i, (proof, measure) in enumerate(parts)]


def proof_rows(rows: Iterable[CertificationRow]) -> list[ProofRow]:
    """What `log_rows` took apart, put together again.

    Of a measure that is judged by nothing a log does not keep on which side of a threshold it would pass.
    """
    found: list[tuple[CertificationRow, list[Measure]]] = []
    for row in sorted(rows, key=lambda r: r.certification):
        if row.measure is None:
            found.append((row, []))
        elif found:
            found[-1][1].append(_measure(row))
    return [_proof(subject, measures) for subject, measures in found]


def _measure(row: CertificationRow) -> Measure:
    names = ("ability", "value", "low", "high", "threshold", "verdict", "reason")
    said: dict[str, Any] = {name: getattr(row, name) for name in names}
    said |= {"name": row.measure, "unit": row.unit or "", "bound": row.bound or "equal"}
    return Measure(**said)


def _proof(row: CertificationRow, measures: Sequence[Measure]) -> ProofRow:
    said: dict[str, Any] = {name: getattr(row, name) for name in ProofRow.model_fields if name != "measures"}
    return ProofRow(**said, measures=tuple(measures))


def _row(run_id: str, number: int, proof: ProofRow, measure: Measure | None) -> CertificationRow:
    told = proof if measure is None else measure
    threshold = None if measure is None else measure.threshold
    return CertificationRow(
        run_id=run_id,
        certification=number,
        kind=proof.kind,
        model=proof.model,
        fingerprint=proof.fingerprint,
        engine=proof.engine,
        engine_version=proof.engine_version,
        machine=proof.machine,
        day=proof.day,
        subject=proof.subject,
        settings=proof.settings,
        ability=None if measure is None else measure.ability,
        measure=None if measure is None else measure.name,
        value=None if measure is None else measure.value,
        low=None if measure is None else measure.low,
        high=None if measure is None else measure.high,
        unit=None if measure is None else measure.unit,
        bound=None if measure is None or threshold is None else measure.bound,
        threshold=threshold,
        verdict=told.verdict,
        reason=told.reason,
    )
