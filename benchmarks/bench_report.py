"""What a report costs its reader: seconds until the page stands, milliseconds until a zoom is drawn, megabytes.

    python benchmarks/bench_report.py [--events N] [--rounds N] [--log L]

Prints a JSON line for each log: that of the demo, as it comes with kvtape, and a generated one of N events (200,000) in
two sessions. Needs the system's Chromium. Promised of both: under 6 MB, open in under 2 s, a zoom drawn in under 0.2 s.

bytes       of the file
write_s     `kvtape report`, as a process of its own
open_s      from asking for the page until its first frame stands with every figure in sight drawn; median of --rounds
            windows of a browser that runs already, and the slowest
all_s       the same until every figure of the page was drawn, from top to bottom
zoom_ms     from a turn of the wheel over the residency map until the frame with the map drawn anew: median and slowest
empty_s     the same as open_s for a page without anything: what browser and driver take by themselves
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from playwright.sync_api import Browser

from kvtape.cli.sample.bundled import unpack_sample
from support.browser import Tab, new_tab, running_browser
from support.long_log import write_long_log
from support.report_page import FRAME

LIMITS = {"bytes": 6_000_000, "open_s": 2.0, "zoom_ms": 200.0}
ZOOMS = 12


def report(log: Path, page: Path) -> float:
    """Write the report of a log; seconds."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "kvtape.cli", "report", str(log), "--out", str(page)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def open_seconds(browser: Browser, page: Path) -> float:
    began = time.perf_counter()
    with new_tab(browser, page) as tab:
        tab.page.evaluate(FRAME)
        return time.perf_counter() - began


def all_seconds(browser: Browser, page: Path) -> float:
    began = time.perf_counter()
    with new_tab(browser, page) as tab:
        for figure in tab.page.locator("figure[data-kind]").all():
            figure.scroll_into_view_if_needed()
            tab.page.evaluate(FRAME)
        return time.perf_counter() - began


def zoom_ms(browser: Browser, page: Path) -> list[float]:
    """Wheel turns over the middle of the map, in and out again; the clock is the page's own."""
    with new_tab(browser, page) as tab:
        canvas = tab.page.locator("figure[data-kind=residency] canvas").first
        canvas.scroll_into_view_if_needed()
        tab.page.evaluate(FRAME)
        return [turn(tab, canvas, -240 if i < ZOOMS // 2 else 240) for i in range(ZOOMS)]


def turn(tab: Tab, canvas: Any, delta: int) -> float:
    took: float = canvas.evaluate(
        """(canvas, delta) => new Promise(done => {
            const box = canvas.getBoundingClientRect(), began = performance.now();
            canvas.dispatchEvent(new WheelEvent("wheel", {bubbles: true, cancelable: true, ctrlKey: true, deltaY: delta,
                clientX: box.left + box.width / 2, clientY: box.top + box.height / 2}));
            requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - began)));
        })""",
        delta,
    )
    return took


def measure(browser: Browser, log: Path, rounds: int, folder: Path) -> dict[str, Any]:
    page, empty = folder / "report.html", folder / "empty.html"
    empty.write_text("<!doctype html><html lang=en><title>empty</title>", encoding="utf-8")
    wrote = report(log, page)
    opened = sorted(open_seconds(browser, page) for _ in range(rounds))
    zooms = sorted(zoom_ms(browser, page))
    return {
        "bytes": page.stat().st_size,
        "write_s": round(wrote, 2),
        "open_s": round(statistics.median(opened), 3),
        "open_slowest_s": round(opened[-1], 3),
        "all_s": round(all_seconds(browser, page), 3),
        "empty_s": round(statistics.median(open_seconds(browser, empty) for _ in range(rounds)), 3),
        "zoom_ms": round(statistics.median(zooms), 1),
        "zoom_slowest_ms": round(zooms[-1], 1),
    }


def main() -> int:
    """Exit 1 when a promise is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--log", type=Path, default=None, help="measure this log alone")
    options = parser.parse_args()
    missed = False
    with tempfile.TemporaryDirectory() as name, running_browser() as browser:
        folder = Path(name)
        for log in [options.log] if options.log else made(folder, options.events):
            figures = measure(browser, log, options.rounds, folder)
            print(json.dumps({"benchmark": "report", "log": log.stem, "limits": LIMITS, **figures}), flush=True)
            missed |= any(figures[name] > limit for name, limit in LIMITS.items())
    return 1 if missed else 0


def made(folder: Path, events: int) -> list[Path]:
    demo = folder / "demo.duckdb"
    unpack_sample(demo)
    long = write_long_log(folder / f"generated-{events}.duckdb", [events * 4 // 5, events // 5])
    return [demo, long]


if __name__ == "__main__":
    sys.exit(main())
