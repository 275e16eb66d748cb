"""The Pareto front: what nothing else is at least as good as in everything, and better in something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

__all__ = ["OBJECTIVES", "Better", "compared", "mark_front"]

Better = Literal["less", "more"]

OBJECTIVES: Final[Mapping[str, Better]] = {
    "ttft_p50_ns": "less",
    "ttft_p95_ns": "less",
    "tpot_p50_ns": "less",
    "tpot_p95_ns": "less",
    "peak_kv_bytes": "less",
    "recomputed_tokens": "less",
    "retained_mass": "more",
}
"""What is compared, and which way is better. Only among the points that serve most turns: times over the turns that a
point did serve say nothing beside times over all of them.
"""


def compared(rows: Sequence[Mapping[str, Any]], objectives: Mapping[str, Better] = OBJECTIVES) -> dict[str, Better]:
    """The objectives that some row has a figure for; what this log cannot show counts for nobody."""
    return {name: way for name, way in objectives.items() if any(row.get(name) is not None for row in rows)}


def mark_front(rows: Sequence[Mapping[str, Any]], wanted: Mapping[str, Better] = OBJECTIVES) -> list[bool]:
    """For each row whether it is on the front. A row without all figures compared is not; equal rows are both.

    `not_served` of a row: turns that were refused, unserved or cut short; one that did none, not even in part, is not
    on the front: its costs are 0. `clairvoyant`: nobody can run it, so it neither is on the front nor keeps another
    off it.
    """
    real = [row for row in rows if not row.get("clairvoyant")]
    least = min((row["not_served"] for row in real if row.get("not_served") is not None), default=0)
    objectives = compared(real, wanted)
    takes_part = [not row.get("clairvoyant") and row.get("not_served") == least and not _idle(row) for row in rows]
    values = [_figures(row, objectives) if part else None for row, part in zip(rows, takes_part, strict=True)]
    there = [v for v in values if v is not None]
    return [v is not None and not any(_dominates(other, v) for other in there) for v in values]


def _idle(row: Mapping[str, Any]) -> bool:
    return row.get("served") == 0 and not row.get("cut_short")


def _figures(row: Mapping[str, Any], objectives: Mapping[str, Better]) -> tuple[float, ...] | None:
    """Less of each is better; None where one is missing."""
    signs = [1 if way == "less" else -1 for way in objectives.values()]
    found = [sign * row[name] for name, sign in zip(objectives, signs, strict=True) if row.get(name) is not None]
    return tuple(found) if found and len(found) == len(signs) else None


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
