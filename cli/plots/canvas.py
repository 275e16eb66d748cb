"""An SVG and the few shapes that pictures are made of. Coordinates are pixels from the upper left corner."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Literal
from xml.sax.saxutils import escape

from kvtape.cli.plots.palette import style

__all__ = ["Anchor", "circle", "diamond", "document", "line", "polyline", "rect", "text", "width_of"]

Anchor = Literal["start", "middle", "end"]

_FONT_PX = 12
_MEAN_GLYPH = 0.56
"""Of a line of text, in ems: digits of the usual sans-serif fonts are as wide."""


def document(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """`parts` on paper, named `title` for who cannot see it. Ends in a newline."""
    wide, high = ceil(width), ceil(height)
    size = f'width="{wide}" height="{high}" viewBox="0 0 {wide} {high}"'
    font = f'font-family="Roboto, Helvetica, Arial, sans-serif" font-size="{_FONT_PX}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font} fill="none">',
        f"<title>{escape(_printable(title))}</title>",
        style(),
        '<rect class="fill-paper" width="100%" height="100%"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def text(x: float, y: float, said: str, anchor: Anchor = "start", colour: str = "ink", *, upright: bool = False) -> str:
    """A line of text whose baseline starts, is centred or ends at a point; `upright`: read from below."""
    turned = f' transform="rotate(-90 {_n(x)} {_n(y)})"' if upright else ""
    placed = f'x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"{turned}'
    return f'<text class="fill-{colour}" {placed}>{escape(_printable(said))}</text>'


def width_of(said: str) -> float:
    """About how wide a line of text is."""
    return len(said) * _FONT_PX * _MEAN_GLYPH


def line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1, dash: str = "") -> str:
    return f'<path class="line-{colour}" d="M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}"{_stroke(width, dash)}/>'


def polyline(points: Iterable[tuple[float, float]], colour: str, *, width: float = 2, dash: str = "") -> str:
    path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
    return f'<polyline class="line-{colour}" points="{path}" stroke-linejoin="round"{_stroke(width, dash)}/>'


def rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    """Without soft edges: between two that touch nothing shines through."""
    size = f'width="{_n(width)}" height="{_n(height)}"'
    return f'<rect class="fill-{colour}" x="{_n(x)}" y="{_n(y)}" {size} shape-rendering="crispEdges"/>'


def circle(x: float, y: float, radius: float, colour: str, *, filled: bool = True) -> str:
    """Filled, or a ring that shows the paper."""
    return f'<circle {_look(colour, filled)} cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"/>'


def diamond(x: float, y: float, radius: float, colour: str, *, filled: bool = True) -> str:
    """As `circle`, another shape."""
    corners = ((x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y))
    return f'<polygon {_look(colour, filled)} points="{" ".join(f"{_n(a)},{_n(b)}" for a, b in corners)}"/>'


def _look(colour: str, filled: bool) -> str:
    return f'class="fill-{colour}"' if filled else f'class="line-{colour} fill-paper" stroke-width="1.5"'


def _stroke(width: float, dash: str) -> str:
    return f' stroke-width="{_n(width)}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _n(value: float) -> str:
    """With at most two digits behind the point, and none that say nothing."""
    said = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if said == "-0" else said


def _printable(said: str) -> str:
    """XML has no place for control characters, whatever a session is called."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in said)
