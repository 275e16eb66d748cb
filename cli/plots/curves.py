"""Hit rate against budget, a line for each policy, the endless cache dashed."""

from __future__ import annotations

from kvtape.cli.plots.canvas import document, line, polyline, text
from kvtape.cli.plots.frame import Frame, even_axis, log_axis
from kvtape.cli.plots.legend import Entry, legend, legend_width, series_look
from kvtape.sim.blocks.sweep import Curve

__all__ = ["curve_picture"]

_LEFT, _TOP, _WIDTH, _HEIGHT, _BELOW = 76, 48, 560, 330, 56
_CEILING = "an endless cache"


def curve_picture(found: Curve, block_tokens: int) -> str:
    """As SVG. `block_tokens`: tokens of one block, for the label."""
    budgets = [p.budget_blocks for p in found.points] or [1]
    rates = [found.ceiling, *(p.hit_rate for p in found.points)]
    across = log_axis(f"budget, blocks of {block_tokens} tokens (logarithmic)", min(budgets), max(budgets), 2)
    share = f"hit rate, % of {found.rules.weighting}s"
    up = even_axis(share, max(1e-3, *rates), said=lambda rate: f"{round(100 * rate, 3):g}")
    frame = Frame(_LEFT, _TOP, _WIDTH, _HEIGHT, across, up)
    names = list(dict.fromkeys(p.policy for p in found.points))
    looks = [series_look(i) for i in range(len(names))]
    entries = [Entry(_said(name), colour, dash=dash) for name, (colour, dash) in zip(names, looks, strict=True)]
    entries.append(Entry(_CEILING, "faint", dash="4 4"))
    title = f"Hit rate against budget, rules: {found.rules.name}"
    parts = [
        text(_LEFT, 24, title),
        *frame.parts(),
        line(frame.left, frame.y(found.ceiling), frame.right, frame.y(found.ceiling), "faint", dash="4 4"),
    ]
    for name, (colour, dash) in zip(names, looks, strict=True):
        mine = ((p.budget_blocks, p.hit_rate) for p in found.points if p.policy == name)
        parts.append(polyline(frame.at(mine), colour, dash=dash))
    parts += legend(frame.right + 20, _TOP, entries)
    return document(frame.right + 32 + legend_width(entries), frame.bottom + _BELOW, title, parts)


def _said(name: str) -> str:
    return "opt (knows the future)" if name == "opt" else name
