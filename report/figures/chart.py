"""Charts of series over two axes, as data: the drawing is the script's (`assets/chart.js`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvtape.report.panel import Cell, Figure, Table

__all__ = ["Axis", "Chart", "Mark", "Series", "chart_figure"]

Mark = Literal["line", "points", "bars", "dashed"]
"""`bars` of several series stand on each other; `dashed` is a line for bounds and limits."""


@dataclass(frozen=True, slots=True)
class Axis:
    """`label` names the quantity, `unit` its unit. `log` only where all values are above 0.

    `names`: of a categorical axis, whose values are then 0, 1, 2, ...
    """

    label: str
    unit: str = ""
    log: bool = False
    names: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one name, `x` ascending for lines. `low`, `high`: an interval around each y, e.g. 95 % confidence.

    `texts`: one line for each point, shown when it is pointed at, beside its coordinates.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    mark: Mark = "line"
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    texts: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("y", "low", "high", "texts"):
            n = len(getattr(self, name))
            if n != len(self.x) and (n or name == "y"):
                raise ValueError(f"series {self.name}: {n} values of {name} for {len(self.x)} of x")
        if bool(self.low) != bool(self.high):
            raise ValueError(f"series {self.name}: an interval has two ends")


@dataclass(frozen=True, slots=True)
class Chart:
    """Series over one x and one y axis. At most eight series have a colour of their own."""

    x: Axis
    y: Axis
    series: tuple[Series, ...]


def chart_figure(id: str, title: str, summary: str, chart: Chart) -> Figure:  # noqa: A002
    """The figure of a chart, with a table of all its points."""
    return Figure(id, title, "chart", summary, _data(chart), _table(title, chart))


def _data(chart: Chart) -> dict[str, Any]:
    return {"x": _axis(chart.x), "y": _axis(chart.y), "series": [asdict(s) for s in chart.series]}


def _axis(axis: Axis) -> dict[str, Any]:
    return {"text": axis.text, "log": axis.log, "names": list(axis.names)}


def _table(title: str, chart: Chart) -> Table:
    columns = ["series", chart.x.text, chart.y.text]
    ends, notes = any(s.low for s in chart.series), any(s.texts for s in chart.series)
    columns += ["low", "high"] if ends else []
    columns += ["note"] if notes else []
    return Table(title, tuple(columns), [row for s in chart.series for row in _rows(chart, s, ends, notes)])


def _rows(chart: Chart, series: Series, ends: bool, notes: bool) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for i, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
        row: list[Cell] = [series.name, chart.x.names[int(x)] if chart.x.names else x, y]
        if ends:
            row += [series.low[i], series.high[i]] if series.low else [None, None]
        if notes:
            row.append(series.texts[i] if series.texts else "")
        rows.append(tuple(row))
    return rows
