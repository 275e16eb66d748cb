"""Recorded against modelled times, a panel for each kind of operation; on the diagonal model and record agree."""

from __future__ import annotations

from kvtape.cli.plots.canvas import circle, document, line, text
from kvtape.cli.plots.frame import Frame, log_axis
from kvtape.cli.plots.legend import Entry, legend
from kvtape.sim.costs.model import CostTable, Fit

__all__ = ["calibration_picture"]

_SIDE, _LEFT, _TOP, _DOWN, _ACROSS = 200, 84, 84, 88, 3
_RIGHT = 24


def calibration_picture(costs: CostTable) -> str:
    """As SVG: a point for each sample that was kept, both axes logarithmic."""
    fits = [(kind, known.fit) for kind, known in costs.kinds.items() if known.fit is not None]
    columns = max(1, min(_ACROSS, len(fits)))
    rows = -(-len(fits) // _ACROSS)
    title = f"Recorded against modelled times of {costs.origin.backend} {costs.origin.model_name or ''}".rstrip()
    entries = [Entry("a recorded operation", "s0", "circle"), Entry("model and record agree", "faint", dash="4 4")]
    parts = [text(_RIGHT, 24, title), *legend(_RIGHT, 32, entries)]
    if not fits:
        parts.append(text(_RIGHT, _TOP + 20, "No times were learnt from: there is nothing to compare.", colour="faint"))
    for i, (kind, fit) in enumerate(fits):
        x, y = _LEFT + i % _ACROSS * (_SIDE + _LEFT), _TOP + 20 + i // _ACROSS * (_SIDE + _DOWN)
        parts += _panel(kind, fit, x, y)
    width = columns * (_SIDE + _LEFT) + _RIGHT
    return document(max(width, 420), _TOP + max(rows * (_SIDE + _DOWN), 40), title, parts)


def _panel(kind: str, fit: Fit, x: float, y: float) -> list[str]:
    pairs = [(max(modelled, 1.0) / 1e6, max(recorded, 1.0) / 1e6) for modelled, recorded in fit.scatter]
    values = [ms for pair in pairs for ms in pair] or [1.0]
    low, high = min(values), max(values)
    frame = Frame(x, y, _SIDE, _SIDE, log_axis("modelled, ms", low, high), log_axis("recorded, ms", low, high))
    said = f"{kind}: {fit.events} event{'s' * (fit.events != 1)}, median error {100 * fit.median_error:.1f} %"
    return [
        text(x, y - 8, said),
        *frame.parts(),
        line(frame.left, frame.bottom, frame.right, frame.top, "faint", dash="4 4"),
        *(circle(a, b, 2.5, "s0") for a, b in frame.at(pairs)),
    ]
