"""Modelled against recorded times as an SVG, one panel for each kind of operation, both axes logarithmic.

Hand-written, so that one answer is one sequence of bytes on every machine.
"""

from __future__ import annotations

from math import floor, log10
from typing import Final
from xml.sax.saxutils import escape

from kvtape.cli.svg import svg
from kvtape.sim.costs.model import CostTable, Fit

__all__ = ["calibration_svg"]

_SIDE: Final = 220
_GAP: Final = 56
_ACROSS: Final = 3


def calibration_svg(costs: CostTable) -> str:
    """A point for each sample that was kept; on the diagonal model and record agree. Ends in a newline."""
    fits = [(kind, known.fit) for kind, known in costs.kinds.items() if known.fit is not None]
    down = -(-len(fits) // _ACROSS) or 1
    width, height = _GAP + _ACROSS * (_SIDE + _GAP), _GAP + down * (_SIDE + _GAP)
    parts = [
        f'<text x="{_GAP}" y="24">{escape(costs.origin.backend)}: recorded (up) against modelled (across), ms</text>'
    ]
    for i, (kind, fit) in enumerate(fits):
        x, y = _GAP + i % _ACROSS * (_SIDE + _GAP), _GAP + i // _ACROSS * (_SIDE + _GAP)
        parts += _panel(kind, fit, x, y)
    return svg(width, height, parts)


def _panel(kind: str, fit: Fit, x: int, y: int) -> list[str]:
    values = [max(v, 1.0) for pair in fit.scatter for v in pair] or [1.0]
    low, high = floor(log10(min(values))), floor(log10(max(values))) + 1

    def at(ns: float) -> float:
        return (log10(max(ns, 1.0)) - low) / (high - low) * _SIDE

    lines = [
        f'<rect x="{x}" y="{y}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#444"/>',
        f'<path d="M{x} {y + _SIDE}L{x + _SIDE} {y}" stroke="#bbb"/>',
        f'<text x="{x + 6}" y="{y + 16}">{escape(kind)}, {fit.events} events</text>',
        f'<text x="{x}" y="{y + _SIDE + 16}">{10.0 ** (low - 6):g}</text>',
        f'<text x="{x + _SIDE}" y="{y + _SIDE + 16}" text-anchor="end">{10.0 ** (high - 6):g}</text>',
    ]
    lines += [
        f'<circle cx="{x + at(modelled):.1f}" cy="{y + _SIDE - at(recorded):.1f}" r="2" fill="#1f5fa8"/>'
        for modelled, recorded in fit.scatter
    ]
    return lines
