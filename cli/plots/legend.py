"""The key of a picture: what each colour, dash and shape stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvtape.cli.plots.canvas import circle, diamond, line, rect, text, width_of
from kvtape.cli.plots.palette import SERIES

__all__ = ["Entry", "legend", "legend_width", "series_look"]

_LINE = 18
_MARK = 24
_DASHES = ("", "8 4", "3 3", "9 3 2 3")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the key: `shape` in `colour`, `hollow` or `dash`ed, and what it means."""

    said: str
    colour: str
    shape: Literal["line", "area", "circle", "diamond"] = "line"
    dash: str = ""
    hollow: bool = False


def series_look(number: int) -> tuple[str, str]:
    """Colour and dashes of the series of that number, no two alike up to 32: lines that lie on each other show all."""
    return SERIES[number % len(SERIES)], _DASHES[(number + number // len(SERIES)) % len(_DASHES)]


def legend_width(entries: Sequence[Entry]) -> float:
    return _MARK + max((width_of(entry.said) for entry in entries), default=0.0)


def legend(x: float, y: float, entries: Sequence[Entry]) -> list[str]:
    """Line by line down from a point that is the upper left corner."""
    parts = []
    for i, entry in enumerate(entries):
        middle = y + i * _LINE + _LINE / 2
        parts += [_mark(x, middle, entry), text(x + _MARK, middle + 4, entry.said)]
    return parts


def _mark(x: float, middle: float, entry: Entry) -> str:
    if entry.shape == "line":
        return line(x, middle, x + 18, middle, entry.colour, width=2, dash=entry.dash)
    if entry.shape == "area":
        return rect(x + 2, middle - 6, 12, 12, entry.colour)
    drawn = circle if entry.shape == "circle" else diamond
    return drawn(x + 9, middle, 5, entry.colour, filled=not entry.hollow)
