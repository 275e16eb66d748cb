"""Rows of certification for people and scripts: one line a knob, an ability a column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvtape.backends.proofs.rows import Ability, Bound, Measure, ProofRow

__all__ = ["BOUNDS", "COLUMNS", "cells", "remarks", "rows_body", "table"]

BOUNDS: Final[dict[Bound, str]] = {"most": "at most", "least": "at least", "equal": "exactly"}
"""On which side of its threshold a measure passes, in words."""

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


def remarks(row: ProofRow) -> list[tuple[str, str]]:
    """What is said of a row in words, each ability once: a refusal with its reason, a failure with its figures.

    Of a row that stands for another one, which decides, that.
    """
    if row.reason is not None and len(row.measures) == 1:
        return [(row.verdict, row.reason)]
    found = []
    for ability in dict.fromkeys(m.ability for m in row.measures if m.verdict != "pass"):
        bad = [m for m in row.measures if m.ability == ability and m.verdict != "pass"]
        found.append((f"{ability.replace('_', ' ')}: {row.ability(ability)}", "; ".join(map(_why, bad))))
    return found


def _why(m: Measure) -> str:
    return m.reason or f"{m.name} {_figure(m.value)} {m.unit}, {BOUNDS[m.bound]} {m.threshold:g}"


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value == round(value) and abs(value) >= 10 else f"{value:.3g}"


def _abilities(row: ProofRow) -> dict[str, str]:
    return {name: verdict for name in dict.fromkeys(m.ability for m in row.measures) if (verdict := row.ability(name))}


def _value(row: ProofRow, ability: Ability, name: str) -> float | None:
    found: list[Measure] = [m for m in row.measures if (m.ability, m.name) == (ability, name)]
    return found[0].value if found else None
