"""Photograph the report of the bundled log anew, in the system's Chromium: the pictures of report.md.

python docs/write_report_pictures.py
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from PIL import Image

from kvtape.cli.sample.bundled import unpack_sample
from support.browser import new_tab, running_browser
from support.report_page import figures, write_page

DOCS = Path(__file__).parent
COLOURS = 64
"""In a picture: drawings are flat, and letters need few shades."""

PICTURES: tuple[tuple[str, Literal["light", "dark"], str, float, float], ...] = (
    ("report-map.png", "light", "residency", 0.206, 0.55),
    ("report-time-line.png", "dark", "timeline", 0.43, 0.3),
)
"""Name, theme, the figure at the top of the picture, and where in its plot the pointer stands."""

BELOW_THE_LINKS = """figure => {
    const links = document.querySelector("nav").getBoundingClientRect().height;
    scrollTo(0, figure.getBoundingClientRect().top + scrollY - links - 12);
}"""
"""Scrolls to a figure, behind the links that stay at the top of the window."""


def main() -> None:
    with tempfile.TemporaryDirectory() as name, running_browser() as browser:
        folder = Path(name)
        unpack_sample(folder / "demo.duckdb")
        page = write_page(folder / "demo.duckdb", folder / "report.html")
        for picture, scheme, kind, across, down in PICTURES:
            with new_tab(browser, page, scheme=scheme, width=960, height=800) as tab:
                figure = next(f for f in figures(tab) if f.kind == kind)
                figure.whole.evaluate(BELOW_THE_LINKS)
                left, top, width, height = figure.plot()
                box = figure.drawing.bounding_box()
                assert box is not None
                tab.page.mouse.move(box["x"] + left + across * width, box["y"] + top + down * height)
                figure.settled()
                write(tab.page.screenshot(), DOCS / picture)


def write(shot: bytes, out: Path) -> None:
    whole = Image.open(io.BytesIO(shot)).convert("RGB")
    # The colours that lie farthest apart, so that a state of few pixels (a swatch of the key) keeps its own.
    few = whole.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(out, optimize=True)


if __name__ == "__main__":
    main()
