"""Hit rate against budget as an SVG, budgets on a logarithmic axis.

Hand-written, so that one answer is one sequence of bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log2
from typing import Final

from kvtape.cli.svg import svg, svg_text
from kvtape.sim.blocks.sweep import Curve, Point

__all__ = ["curve_svg"]

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 132, 48, 60
_COLOURS: Final = ("#1f5fa8", "#c2571a", "#2a7a3b", "#7a3b9e", "#a33333", "#0f8a8a", "#8a6d0f", "#555555")
_STEPS: Final = 5


class _Frame:
    """From blocks and shares to the picture's coordinates. The rate axis ends at the next tenth above the highest."""

    def __init__(self, budgets: Sequence[int], highest: float) -> None:
        self.low, self.high = log2(min(budgets)), log2(max(budgets))
        self.top = max(1, -(-int(highest * 1000) // 100)) / 10

    def x(self, budget: int) -> float:
        share = (log2(budget) - self.low) / ((self.high - self.low) or 1)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / self.top * (_HEIGHT - _TOP - _BOTTOM)


def curve_svg(found: Curve) -> str:
    """One line for each policy, the endless cache dashed. Ends in a newline."""
    budgets = sorted({p.budget_blocks for p in found.points}) or [1]
    frame = _Frame(budgets, max([found.ceiling, *(p.hit_rate for p in found.points)]))
    ceiling = frame.y(found.ceiling)
    parts = [
        svg_text(_LEFT, 24, f"hit rate by {found.rules.weighting}, rules: {found.rules.name}", "start", "#111"),
        *_axes(frame, budgets),
        f'<path d="M{_LEFT} {ceiling:.2f}H{_WIDTH - _RIGHT}" stroke="#888" stroke-dasharray="4 4"/>',
        svg_text(_WIDTH - _RIGHT + 6, ceiling - 4, "endless cache", "start", "#888"),
        *_lines(frame, found.points),
    ]
    return svg(_WIDTH, _HEIGHT, parts, fill="none")


def _axes(frame: _Frame, budgets: Sequence[int]) -> Iterable[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" stroke="#444"/>'
    for i in range(_STEPS + 1):
        rate = frame.top * i / _STEPS
        yield svg_text(_LEFT - 8, frame.y(rate) + 4, f"{100 * rate:.0f} %", "end")
    last = float("-inf")
    for budget in budgets:
        if frame.x(budget) - last >= 52:
            last = frame.x(budget)
            yield svg_text(last, bottom + 18, str(budget), "middle")
    yield svg_text((_LEFT + right) / 2, bottom + 42, "budget, blocks", "middle")


def _lines(frame: _Frame, points: Sequence[Point]) -> Iterable[str]:
    names = list(dict.fromkeys(p.policy for p in points))
    for i, name in enumerate(names):
        colour = _COLOURS[i % len(_COLOURS)]
        mine = [p for p in points if p.policy == name]
        path = " ".join(f"{frame.x(p.budget_blocks):.2f},{frame.y(p.hit_rate):.2f}" for p in mine)
        yield f'<polyline points="{path}" stroke="{colour}" stroke-width="2"/>'
        yield svg_text(_WIDTH - _RIGHT + 6, _TOP + 16 * (i + 1) + 8, name, "start", colour)
