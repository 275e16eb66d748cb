"""What the plots share: an SVG around its parts, and a line of text in it."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

__all__ = ["svg", "svg_text"]


def svg(width: int, height: int, parts: Iterable[str], *, fill: str | None = None) -> str:
    """`parts` on white, in pixels; shapes without a `fill` of their own take this one. Ends in a newline."""
    filled = "" if fill is None else f' fill="{fill}"'
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12"{filled}>',
        '<rect width="100%" height="100%" fill="#fff"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def svg_text(x: float, y: float, text: str, anchor: str, colour: str = "#444") -> str:
    """`text` at a point that is its start, middle or end."""
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
