"""Write the generated parts of docs/gate.md: the workloads, and the rows of the gate that come with kvtape."""

from __future__ import annotations

from pathlib import Path

import page_parts
from kvtape.backends.proofs.rows import ProofRow
from kvtape.backends.proofs.store import Proofs, shipped_rows
from kvtape.eval.gate.report import COLUMNS, cells_of
from kvtape.eval.gate.workloads import WORKLOADS

PAGE = Path(__file__).parent / "gate.md"


def workloads() -> str:
    rows = [(f"`{w.name}`", w.says, w.turns) for w in WORKLOADS.values()]
    return page_parts.table(("workload", "what it is", "turns of a conversation"), rows)


def gate_rows() -> str:
    """One table for each place where rows were measured: model, engine version, class of machine, day."""
    rows = Proofs(shipped_rows()).current("gate")
    places: dict[tuple[str, ...], list[ProofRow]] = {}
    for row in rows:
        places.setdefault((row.engine, row.engine_version, row.model, row.machine), []).append(row)
    parts = []
    for (engine, version, model, machine), there in places.items():
        days = sorted({row.day for row in there})
        parts.append(f"### {engine}: {version}, {model}\n\nOn `{machine}`, {' and '.join(days)}.\n")
        parts.append(page_parts.table(COLUMNS, cells_of(there)) + "\n")
    return "\n".join(parts).rstrip()


PARTS = {"workloads": workloads, "gate rows": gate_rows}
"""By the marker around each in the page."""


def filled(text: str) -> str:
    """The page with its generated parts as they would be now."""
    return page_parts.filled(text, PARTS)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
