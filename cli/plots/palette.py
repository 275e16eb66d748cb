"""The colours of every picture, light and dark: those of the report page, apart for every kind of colour vision.

An SVG asks the reader's system which of the two it wants; where nobody answers (PNG, old viewers) it is light.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

__all__ = ["DARK", "LIGHT", "SERIES", "style"]

LIGHT: Final[Mapping[str, str]] = {
    "paper": "#ffffff",
    "ink": "#1b1f24",
    "faint": "#57606a",
    "rule": "#d0d7de",
    "grid": "#e4e8ec",
    "s0": "#1680ee",
    "s1": "#501700",
    "s2": "#127844",
    "s3": "#c95fba",
    "s4": "#8e6c06",
    "s5": "#0c2835",
    "s6": "#5e5f6d",
    "s7": "#3b03e6",
    "resident": "#1f7fe0",
    "recent": "#0a5236",
    "sink": "#6b1177",
    "cold": "#c4600a",
    "dropped": "#8f9196",
}
DARK: Final[Mapping[str, str]] = {
    "paper": "#0f1318",
    "ink": "#e6eaef",
    "faint": "#a2adb9",
    "rule": "#39424d",
    "grid": "#262e37",
    "s0": "#1bafff",
    "s1": "#d35134",
    "s2": "#0fff86",
    "s3": "#fde7f2",
    "s4": "#f0a510",
    "s5": "#2876aa",
    "s6": "#979a9c",
    "s7": "#8f48f5",
    "resident": "#3f86f0",
    "recent": "#3ddc97",
    "sink": "#ffa3dd",
    "cold": "#c98a1b",
    "dropped": "#666b74",
}
"""Colours by the part that they play; the series s0 to s7 in the order in which they are taken."""

SERIES: Final = tuple(name for name in LIGHT if name[0] == "s" and name[1:].isdigit())


def style() -> str:
    """The sheet that gives `line-NAME` its stroke and `fill-NAME` its fill, for every name of a colour."""
    light, dark = (" ".join(_rules(colours)) for colours in (LIGHT, DARK))
    return f"<style>{light} @media (prefers-color-scheme: dark) {{ {dark} }}</style>"


def _rules(colours: Mapping[str, str]) -> Iterator[str]:
    for name, colour in colours.items():
        yield f".line-{name}{{stroke:{colour}}} .fill-{name}{{fill:{colour}}}"
