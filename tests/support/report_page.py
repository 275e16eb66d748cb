"""A report in the browser: its figures, what they say of themselves, and how a person moves in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Locator, Page

from support.browser import Colour, Tab, counted
from support.command import kvtape

__all__ = ["FRAME", "Figure", "figures", "ready", "write_page"]

FRAME = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Resolved when a frame has been shown after everything that was asked before."""

_PLOT = """drawing => {
  const outer = drawing.getBoundingClientRect();
  const boxes = [...drawing.querySelectorAll("line")].map(line => line.getBoundingClientRect());
  const wide = boxes.reduce((a, b) => b.width > a.width ? b : a);
  const tall = boxes.reduce((a, b) => b.height > a.height ? b : a);
  return [wide.left - outer.left, tall.top - outer.top, wide.width, tall.height];
}"""
"""The longest lines are those of the axes."""


def write_page(log: Path, out: Path, *options: object) -> Path:
    """`kvtape report`; gives `out`."""
    ran = kvtape("report", log, "--out", out, *options)
    assert ran.code == 0, ran.err
    return out


def ready(page: Page) -> None:
    """Wait until every figure has its axes: columns of sessions are unpacked behind the load."""
    page.wait_for_function(
        "() => [...document.querySelectorAll('figure[data-kind]')].every(f => f.querySelector('.drawing text'))"
    )
    page.evaluate(FRAME)


def figures(tab: Tab) -> list[Figure]:
    ready(tab.page)
    return [Figure(tab, found) for found in tab.page.locator("figure[data-kind]").all()]


class Figure:
    """One figure of the page. Coordinates are shares of its plot, from the left and from the top."""

    def __init__(self, tab: Tab, whole: Locator) -> None:
        self.tab, self.page, self.whole = tab, tab.page, whole
        self.drawing = whole.locator(".drawing")
        self.kind = str(whole.get_attribute("data-kind"))
        self.title = whole.locator("h3").inner_text()

    def settled(self) -> None:
        self.page.evaluate(FRAME)

    def readout(self) -> str:
        """What is said of the place under the pointer or the cross."""
        self.settled()
        return self.whole.locator(".readout").inner_text()

    def labels(self, axis: str) -> list[str]:
        self.settled()
        return self.whole.locator(f".tick-{axis}").all_text_contents()

    def button(self, name: str) -> Locator:
        return self.whole.get_by_role("button", name=name, exact=False)

    def plot(self) -> tuple[float, float, float, float]:
        """Left, top, width and height of what the axes span, in the drawing."""
        left, top, width, height = self.drawing.evaluate(_PLOT)
        return left, top, width, height

    def place(self, across: float, down: float) -> tuple[float, float]:
        """In the window, of a place in the plot, which is scrolled into sight."""
        self.drawing.scroll_into_view_if_needed()
        box = self.drawing.bounding_box()
        assert box is not None
        left, top, width, height = self.plot()
        return box["x"] + left + across * width, box["y"] + top + down * height

    def point(self, across: float, down: float) -> str:
        self.page.mouse.move(*self.place(across, down))
        return self.readout()

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        (x0, y0), (x1, y1) = self.place(*begin), self.place(*end)
        self.page.mouse.move(x0, y0)
        self.page.mouse.down()
        self.page.mouse.move((x0 + x1) / 2, (y0 + y1) / 2)
        self.page.mouse.move(x1, y1)
        self.page.mouse.up()
        self.settled()

    def pixels(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The plot alone, without its axes: (height, width, 3)."""
        self.settled()
        left, top, width, height = (round(v) for v in self.plot())
        return self.tab.pixels(self.drawing)[top + 2 : top + height - 2, left + 2 : left + width - 2]

    def colours(self) -> dict[Colour, float]:
        """Shares of the plot's pixels by colour."""
        pixels = self.pixels()
        return {colour: n * 3 / pixels.size for colour, n in counted(pixels).items()}
