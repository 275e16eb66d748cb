"""The Pareto front: what nothing else is at least as good as in everything, and better in something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["OBJECTIVES", "mark_front"]

OBJECTIVES: Final = (
    "ttft_p50_ns",
    "ttft_p95_ns",
    "tpot_p50_ns",
    "tpot_p95_ns",
    "peak_kv_bytes",
    "recomputed_tokens",
)
"""What is compared; less of each is better. Only among the points that serve most turns: times over the turns that a
point did serve say nothing beside times over all of them.
"""


def mark_front(rows: Sequence[Mapping[str, Any]]) -> list[bool]:
    """For each row whether it is on the front. A row without all figures is not; equal rows are both.

    `not_served` of a row: turns that were refused, unserved or cut short.
    """
    least = min((row["not_served"] for row in rows if row.get("not_served") is not None), default=0)
    values = [_figures(row) if row.get("not_served") == least else None for row in rows]
    there = [v for v in values if v is not None]
    return [v is not None and not any(_dominates(other, v) for other in there) for v in values]


def _figures(row: Mapping[str, Any]) -> tuple[float, ...] | None:
    found = [row.get(name) for name in OBJECTIVES]
    return None if any(f is None for f in found) else tuple(float(f) for f in found if f is not None)


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
