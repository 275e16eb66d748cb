"""Proofs as rows of a log come back as they were."""

from __future__ import annotations

from kvtape.backends.proofs.log_rows import log_rows, proof_rows
from kvtape.backends.proofs.rows import Measure, ProofRow
from kvtape.backends.proofs.store import shipped_rows


def _as_logged(row: ProofRow) -> ProofRow:
    """A log says on which side a measure passes only where something judges it."""
    measures = tuple(m if m.threshold is not None else m.model_copy(update={"bound": "equal"}) for m in row.measures)
    return row.model_copy(update={"measures": measures})


def test_every_shipped_row_comes_back_in_any_order() -> None:
    rows = log_rows("r", shipped_rows(), first=7)
    assert proof_rows(reversed(rows)) == [_as_logged(row) for row in shipped_rows()]


def test_a_measure_keeps_its_interval_and_its_reason() -> None:
    measure = Measure(ability="quality", name="kl", value=0.5, low=0.4, high=0.6, verdict="fail", reason="drifts")
    row = shipped_rows()[0].model_copy(update={"measures": (measure,)})
    assert proof_rows(log_rows("r", [row])) == [row]
