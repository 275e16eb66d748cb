"""Rows of proofs in a log: those of one row of a certification or of the gate at a time, durable as it is finished."""

from __future__ import annotations

from collections.abc import Callable

from kvtape.backends.proofs.log_rows import log_rows
from kvtape.backends.proofs.rows import ProofRow
from kvtape.traces.recorder import Recorder

__all__ = ["proof_writer"]


def proof_writer(recorder: Recorder) -> Callable[[ProofRow], None]:
    """What writes one after the other, numbered through. Raises as `Recorder.flush`."""
    numbered = 0

    def write(row: ProofRow) -> None:
        nonlocal numbered
        of_row = log_rows(recorder.run_id, [row], numbered)
        recorder.add_certifications(of_row)
        recorder.flush()
        numbered += len(of_row)

    return write
