"""What-ifs as points: what a policy and budget cost beside what memory it took; filled where nothing beats it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtape.cli.plots.canvas import circle, diamond, document, line, text, width_of
from kvtape.cli.plots.frame import Axis, Frame, even_axis
from kvtape.cli.plots.legend import Entry, legend, legend_width, series_look

__all__ = ["tradeoff_picture"]

_LEFT, _TOP, _SIDE, _GAP, _BELOW = 76, 64, 330, 88, 56
_RADIUS = 5.0
_LINE = 12
"""Pixels between baselines of labels that do not touch."""
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class _Cost:
    """A figure of the rows, its label, and how many of its unit one of the label's is."""

    figure: str
    label: str
    unit: float


_TTFT = _Cost("ttft_p95_ns", "time to first token, 95th percentile, s", 1e9)
_TPOT = _Cost("tpot_p95_ns", "time per output token, 95th percentile, ms", 1e6)
_MASS = _Cost("retained_mass", "attention mass retained, share", 1.0)


def tradeoff_picture(body: Mapping[str, Any]) -> str:
    """As SVG: the two costs of `kvtape whatif --json`'s rows, each against the peak of the KV cache.

    The second is the attention that is retained where it is known, else the time per output token. A point that
    leaves a figure open is not drawn there; the picture says how many are not.
    """
    rows = body["rows"]
    second = _MASS if any(row["retained_mass"] is not None for row in rows) else _TPOT
    names = list(dict.fromkeys(_family(row) for row in rows))
    looks = {name: series_look(i)[0] for i, name in enumerate(names)}
    title = "What if: policies and budgets on this workload, in modelled time"
    if body["hypothetical"]:
        title += " (costs of hardware numbers, HYPOTHETICAL)"
    up = even_axis("KV cache at its peak, MiB", max([row["peak_kv_bytes"] or 0 for row in rows] or [1]) / _MIB or 1.0)
    frames, parts = [], [text(_LEFT, 24, title)]
    for i, cost in enumerate((_TTFT, second)):
        frame = Frame(_LEFT + i * (_SIDE + _GAP), _TOP, _SIDE, _SIDE, _axis(rows, cost), up)
        frames.append(frame)
        parts += [*frame.parts(), *_points(rows, cost, frame, looks)]
        missing = sum(_place(row, cost) is None for row in rows)
        if missing:
            parts.append(
                text(
                    frame.left, _TOP - 10, f"not drawn: {missing} of {len(rows)}, without this figure", "start", "faint"
                )
            )
    entries = [*(Entry(name, looks[name], "circle") for name in names), *_shapes(rows)]
    parts += legend(frames[-1].right + 24, _TOP, entries)
    return document(frames[-1].right + 36 + legend_width(entries), frames[-1].bottom + _BELOW, title, parts)


def _shapes(rows: Sequence[Mapping[str, Any]]) -> Iterator[Entry]:
    yield Entry("filled: nothing beats it in everything", "faint", "circle")
    yield Entry("hollow: something does", "faint", "circle", hollow=True)
    if any(row["clairvoyant"] for row in rows):
        yield Entry("diamond: knows the future", "faint", "diamond")
    if any(row["not_served"] for row in rows):
        yield Entry("struck through: turns are not served", "faint", "line")
    yield Entry("beside a point: its budget, tokens", "paper", "area")


def _axis(rows: Sequence[Mapping[str, Any]], cost: _Cost) -> Axis:
    values = [place[0] for row in rows if (place := _place(row, cost)) is not None]
    ends = [high for row in rows if (spread := _spread(row, cost)) is not None for high in spread]
    return even_axis(cost.label, max([*values, *ends]) or 1.0 if values else 1.0)


def _points(rows: Sequence[Mapping[str, Any]], cost: _Cost, frame: Frame, looks: Mapping[str, str]) -> Iterator[str]:
    for row in rows:
        place = _place(row, cost)
        if place is None:
            continue
        (x, y), colour = frame.at([place])[0], looks[_family(row)]
        spread = _spread(row, cost)
        if spread is not None:
            yield line(frame.x(spread[0]), y, frame.x(spread[1]), y, colour, width=1.5)
        drawn = diamond if row["clairvoyant"] else circle
        yield drawn(x, y, _RADIUS, colour, filled=row["pareto"])
        if row["not_served"]:
            yield line(x - 7, y + 7, x + 7, y - 7, "faint", width=1.5)
    yield from _budgets(rows, cost, frame)


def _budgets(rows: Sequence[Mapping[str, Any]], cost: _Cost, frame: Frame) -> Iterator[str]:
    """Beside each point its budget, once where points lie close; those of points on one spot in one line."""
    spots: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        place = _place(row, cost)
        if place is not None and row["budget"] is not None:
            x, y = frame.at([place])[0]
            spots.setdefault((round(x), round(y)), []).append(row["budget"])
    written: list[_Label] = []
    for (x, y), budgets in spots.items():
        label = _label(frame, x, y, ", ".join(str(budget) for budget in dict.fromkeys(budgets)), written)
        if label is not None:
            written.append(label)
            yield text(label.left, label.y, label.said, "start", "faint")


@dataclass(frozen=True, slots=True)
class _Label:
    """A line of text whose baseline begins at (`left`, `y`)."""

    left: float
    y: float
    said: str

    def hits(self, other: _Label) -> bool:
        apart = self.left + width_of(self.said) < other.left or other.left + width_of(other.said) < self.left
        return not apart and abs(self.y - other.y) < _LINE


def _label(frame: Frame, x: float, y: float, said: str, written: Sequence[_Label]) -> _Label | None:
    """The first place beside a point that hits no other label; None where the same is written in the way.

    Where all places are taken, the first: a point without its budget would say less than two that overlap.
    """
    before, behind = x - 8 - width_of(said), x + 8
    sides = (before, behind) if x > frame.left + 0.85 * frame.width else (behind, before)
    places = [_Label(left, y + down, said) for down in (-6, 14, 4, -20, 28) for left in sides]
    if any(places[0].hits(other) and other.said == said for other in written):
        return None
    return next((place for place in places if not any(map(place.hits, written))), places[0])


def _family(row: Mapping[str, Any]) -> str:
    """The policy without its numbers."""
    name: str = row["policy"].partition(":")[0]
    return name


def _place(row: Mapping[str, Any], cost: _Cost) -> tuple[float, float] | None:
    """Across and up, in the labels' units; None where the row has not both."""
    if row["error"] is not None or row[cost.figure] is None or row["peak_kv_bytes"] is None:
        return None
    return row[cost.figure] / cost.unit, row["peak_kv_bytes"] / _MIB


def _spread(row: Mapping[str, Any], cost: _Cost) -> tuple[float, float] | None:
    """The interval of a figure, where arrivals were drawn."""
    found = (row.get("intervals") or {}).get(cost.figure)
    return None if found is None else (found["low"] / cost.unit, found["high"] / cost.unit)
