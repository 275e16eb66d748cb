"""Axes: from values to pixels, marks that can be read, and what they measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log, log10

from kvtape.cli.plots.canvas import line, text, width_of

__all__ = ["Axis", "Frame", "even_axis", "log_axis", "number_text"]

_SIDE_TEXT = 8


@dataclass(frozen=True, slots=True)
class Axis:
    """`label`: what is measured, with its unit. `marks`: values and what is written at them. `base`: of a logarithmic
    axis, whose ends are above 0; None of an even one."""

    label: str
    low: float
    high: float
    marks: tuple[tuple[float, str], ...]
    base: int | None = None

    def share(self, value: float) -> float:
        """Where between the ends, 0 to 1."""
        if self.base is None:
            return (value - self.low) / (self.high - self.low)
        return log(value / self.low) / log(self.high / self.low)


def even_axis(
    label: str, high: float, *, low: float = 0.0, most: int = 6, said: Callable[[float], str] | None = None
) -> Axis:
    """From `low` to at least `high`, in steps of 1, 2 or 5 times a power of ten."""
    step = _step((high - low) / most if high > low else 1.0)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    last = max(last, first + 1)
    write = said or number_text
    return Axis(label, first * step, last * step, tuple((i * step, write(i * step)) for i in range(first, last + 1)))


def log_axis(
    label: str, low: float, high: float, base: int = 10, *, said: Callable[[float], str] | None = None
) -> Axis:
    """From the power of `base` at or below `low` to that at or above `high`; both above 0."""
    first, last = floor(log(low, base) + 1e-9), ceil(log(high, base) - 1e-9)
    last = max(last, first + 1)
    write = said or number_text
    marks = tuple((float(base) ** i, write(float(base) ** i)) for i in range(first, last + 1))
    return Axis(label, float(base) ** first, float(base) ** last, marks, base)


def _step(least: float) -> float:
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def number_text(value: float) -> str:
    """Thousands apart, no digits behind the point that say nothing."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.6g}"


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a plot lies: its left, top, width and height without its axes' marks, in pixels, and what it measures."""

    left: float
    top: float
    width: float
    height: float
    across: Axis
    up: Axis

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, value: float) -> float:
        return self.left + self.across.share(value) * self.width

    def y(self, value: float) -> float:
        return self.bottom - self.up.share(value) * self.height

    def at(self, values: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        """Pixels of `(across, up)` values."""
        return [(self.x(a), self.y(b)) for a, b in values]

    def parts(self) -> list[str]:
        """Grid, marks and labels; marks that would run into each other are left out."""
        shown = []
        end = float("-inf")
        for value, said in self.across.marks:
            at, half = self.x(value), width_of(said) / 2
            if at - half > end + _SIDE_TEXT:
                shown += [line(at, self.bottom, at, self.bottom + 4, "faint")]
                shown += [text(at, self.bottom + 18, said, "middle", "faint")]
                end = at + half
        for value, said in _apart(self.up.marks, self.height):
            shown += [line(self.left, self.y(value), self.right, self.y(value), "grid")]
            shown += [text(self.left - _SIDE_TEXT, self.y(value) + 4, said, "end", "faint")]
        widest = max((width_of(said) for _, said in self.up.marks), default=0.0)
        middle = self.top + self.height / 2
        return [
            *shown,
            line(self.left, self.bottom, self.right, self.bottom, "faint"),
            text(self.left + self.width / 2, self.bottom + 38, self.across.label, "middle"),
            text(self.left - 2 * _SIDE_TEXT - widest - 4, middle, self.up.label, "middle", upright=True),
        ]


def _apart(marks: Sequence[tuple[float, str]], height: float) -> Sequence[tuple[float, str]]:
    """Every mark, or every second, third, ... where there are too many for the height."""
    return marks[:: max(1, ceil(len(marks) * 16 / height))] if marks else marks
