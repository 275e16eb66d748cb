"""Proofs as rows of a log: one for each measure, and before them one for the subject as a whole."""

from __future__ import annotations

from collections.abc import Iterable

from kvtape.backends.proofs.rows import Measure, ProofRow
from kvtape.planner.rows import CertificationRow

__all__ = ["log_rows"]


def log_rows(run_id: str, proofs: Iterable[ProofRow], first: int = 0) -> list[CertificationRow]:
    """Rows of proofs, numbered from `first`, as `Recorder.add_certifications` takes them."""
    parts = [(proof, measure) for proof in proofs for measure in (None, *proof.measures)]
    return [_row(run_id, first + i, proof, measure) for i, (proof, measure) in enumerate(parts)]


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
