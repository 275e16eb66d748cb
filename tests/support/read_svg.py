"""A picture as a person reads it: places by the marks of its axes, series by the key, not by the code that drew it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log
from xml.etree import ElementTree as ET

__all__ = ["Drawn", "Picture", "read_svg"]

_SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Drawn:
    """A shape: its tag, what its classes say, its numbers, its text."""

    tag: str
    classes: tuple[str, ...]
    attributes: dict[str, str]
    text: str

    def number(self, name: str) -> float:
        return float(self.attributes[name])

    @property
    def points(self) -> list[tuple[float, float]]:
        pairs = (pair.split(",") for pair in self.attributes["points"].split())
        return [(float(x), float(y)) for x, y in pairs]


@dataclass(frozen=True)
class Picture:
    title: str
    style: str
    shapes: list[Drawn]

    @property
    def texts(self) -> list[str]:
        return [s.text for s in self.shapes if s.tag == "text"]

    def of(self, tag: str, *classes: str) -> list[Drawn]:
        """In the order in which they are painted."""
        return [s for s in self.shapes if s.tag == tag and set(classes) <= set(s.classes)]

    def key(self, said: str) -> Drawn:
        """The mark that stands left of a text of the key: the shape drawn right before it."""
        at = next(i for i, s in enumerate(self.shapes) if s.text == said)
        return self.shapes[at - 1]

    def across(self, label: str, *, logarithmic: bool = False, within: float = 400) -> Callable[[float], float]:
        """From pixels to values: by the marks right above the axis's label, no further from its middle than that."""
        named = self._label(label)
        middle, below = named.number("x"), named.number("y")
        marks = [s for s in self._marks("middle") if 0 < below - s.number("y") < 30]
        near = [s for s in marks if abs(s.number("x") - middle) <= within]
        return _scale([(s.number("x"), _value(s.text)) for s in near], logarithmic)

    def up(self, label: str, *, logarithmic: bool = False) -> Callable[[float], float]:
        named = self._label(label)
        left, middle = named.number("x"), named.number("y")
        marks = [s for s in self._marks("end") if 0 < s.number("x") - left < 100]
        near = [s for s in marks if abs(s.number("y") - middle) < 300]
        return _scale([(s.number("y") - 4, _value(s.text)) for s in near], logarithmic)

    def _label(self, label: str) -> Drawn:
        """The first of that text."""
        found = [s for s in self.of("text") if s.text == label]
        assert found, f"no axis {label!r}; there is {self.texts}"
        return found[0]

    def _marks(self, anchor: str) -> list[Drawn]:
        return [s for s in self.of("text", "fill-faint") if s.attributes["text-anchor"] == anchor and _is_value(s.text)]


def read_svg(text: str) -> Picture:
    root = ET.fromstring(text)
    assert root.tag == f"{_SVG}svg"
    shapes = [
        Drawn(e.tag.removeprefix(_SVG), tuple(e.get("class", "").split()), dict(e.attrib), e.text or "")
        for e in root
        if e.tag not in (f"{_SVG}title", f"{_SVG}style")
    ]
    return Picture(root.findtext(f"{_SVG}title") or "", root.findtext(f"{_SVG}style") or "", shapes)


def _is_value(text: str) -> bool:
    return text.replace(",", "").replace(".", "").replace("e-", "").isdigit()


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _scale(marks: list[tuple[float, float]], logarithmic: bool) -> Callable[[float], float]:
    """Through the outermost two marks."""
    (x0, v0), (x1, v1) = min(marks), max(marks)
    assert x0 < x1
    if logarithmic:
        return lambda x: exp(log(v0) + (x - x0) / (x1 - x0) * log(v1 / v0))
    return lambda x: v0 + (x - x0) / (x1 - x0) * (v1 - v0)
