"""Rows of certification for people and scripts: one line a knob, an ability a column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvtape.backends.proofs.rows import Ability, Measure, ProofRow

__all__ = ["COLUMNS", "cells", "rows_body", "table"]

_FIGURES: Final[tuple[tuple[Ability, str], ...]] = (
    ("capacity", "stored_row_bytes"),
    ("capacity", "row_bytes_delta"),
    ("quality", "nll_delta"),
    ("quality", "kl"),
    ("quality", "top1"),
    ("quality", "recall"),
    ("shift", "nll_delta"),
    ("shift", "kl"),
)

COLUMNS: Final = (
    "knob",
    "verdict",
    "bytes/token",
    "- predicted",
    "NLL delta",
    "KL",
    "top-1",
    "recall",
    "round trip",
    "snapshot",
    "shifts",
    "NLL delta, shifted",
    "KL, shifted",
    "why",
)


def rows_body(rows: Sequence[ProofRow]) -> list[dict[str, Any]]:
    """For JSON: every field of every row, and the verdict of each ability."""
    return [{**row.model_dump(), "abilities": _abilities(row)} for row in rows]


def table(rows: Sequence[ProofRow]) -> tuple[str, tuple[str, ...], list[tuple[Any, ...]]]:
    """Title, columns and cells."""
    return "certification; NLL and KL in nats a token, against the best precision", COLUMNS, [cells(r) for r in rows]


def cells(row: ProofRow) -> tuple[Any, ...]:
    """One row under `COLUMNS`; None where there is no figure."""
    figures = [_value(row, ability, name) for ability, name in _FIGURES]
    trips = [row.ability("round_trip"), row.ability("snapshot"), row.ability("shift")]
    return (row.subject, row.verdict, *figures[:6], *trips, *figures[6:], row.reason)


def _abilities(row: ProofRow) -> dict[str, str]:
    return {name: verdict for name in dict.fromkeys(m.ability for m in row.measures) if (verdict := row.ability(name))}


def _value(row: ProofRow, ability: Ability, name: str) -> float | None:
    found: list[Measure] = [m for m in row.measures if (m.ability, m.name) == (ability, name)]
    return found[0].value if found else None
