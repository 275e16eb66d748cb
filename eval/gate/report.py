"""Rows of the gate for people and scripts, from the rows of proof that are kept of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtape.backends.proofs.rows import Measure, ProofRow
from kvtape.eval.gate.proof import SAVED
from kvtape.eval.gate.verdict import NOT_HERE, THROUGH

__all__ = ["COLUMNS", "body_of", "cells_of", "percent"]

COLUMNS = ("optimisation", "workload", "engine", "turns", "CPU time saved", "wall time saved", "verdict", "why")


def body_of(row: ProofRow) -> dict[str, Any]:
    """One row with stable keys: `through`, the effects with their intervals (shares, not per cent), the measures."""
    by_name = {m.name: m for m in row.measures}
    optimisation, _, rest = row.subject.partition("@")
    decided = next((by for by, name in SAVED.items() if name in by_name and by_name[name].threshold is not None), None)
    return {
        "subject": row.subject,
        "optimisation": optimisation,
        "workload": rest.partition(",")[0],
        "model": row.model,
        "engine": row.engine,
        "engine_version": row.engine_version,
        "machine": row.machine,
        "day": row.day,
        "settings": row.settings,
        "verdict": {"pass": THROUGH, "fail": NOT_HERE, "refused": "refused"}[row.verdict],
        "through": row.verdict == "pass",
        "reason": row.reason,
        "decided_by": decided,
        **{by: _effect(by_name.get(name)) for by, name in SAVED.items()},
        "measures": [m.model_dump(exclude_none=True) for m in row.measures],
    }


def cells_of(rows: Iterable[ProofRow]) -> list[tuple[Any, ...]]:
    """A table of `COLUMNS`; the clock that decided bears a star."""
    bodies = [body_of(row) for row in rows]
    return [
        (
            body["optimisation"],
            body["workload"],
            body["engine"],
            next((int(m["value"]) for m in body["measures"] if m["name"] == "turns"), None),
            *(percent(body[by]) + ("*" if body["decided_by"] == by else "") for by in SAVED),
            body["verdict"],
            body["reason"],
        )
        for body in bodies
    ]


def percent(effect: dict[str, Any] | None) -> str:
    """`12.3 % [10.1, 14.5]`."""
    if effect is None:
        return "-"
    saved = f"{100 * effect['saved']:.1f} %"
    return saved if effect["low"] is None else f"{saved} [{100 * effect['low']:.1f}, {100 * effect['high']:.1f}]"


def _effect(measure: Measure | None) -> dict[str, Any] | None:
    if measure is None:
        return None
    return {"saved": measure.value, "low": measure.low, "high": measure.high}
