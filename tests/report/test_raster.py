"""The script's counts and colours of cells, in a browser, beside counting every pair; packed columns come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser

from kvtape.report.packing import pack
from kvtape.report.page import PageMeta, page
from kvtape.report.panel import Missing, Panel
from support.browser import Tab, new_tab
from support.repository import ROOT

EVENTS, TAPE, STATES = 90, 70, 6


@pytest.fixture(scope="module")
def tab(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Any:
    columns = [np.array([2**51, -5, 0, 7, -(2**51)]), np.array([1, 1, 2**40, 0, 3])]
    html = page([Panel("a", "A", "l", missing=(Missing("m", "c"),))], PageMeta("t", "l", packed={"p": pack(columns)}))
    path = Path(tmp_path_factory.mktemp("raster")) / "page.html"
    path.write_text(html, encoding="utf-8")
    with new_tab(browser, path) as opened:
        # The page keeps its names to itself.
        assert opened.page.evaluate("typeof counted + typeof unpacked") == "undefined" * 2
        for name in ("base.js", "raster.js"):
            opened.page.add_script_tag(content=(ROOT / "report" / "assets" / name).read_text(encoding="utf-8"))
        yield opened


def shapes(seed: int) -> tuple[dict[str, list[int]], np.ndarray]:
    """Rectangles that do not overlap, and the states they draw: int `[tape, events]`."""
    draw = np.random.default_rng(seed)
    grid = np.zeros((TAPE, EVENTS), dtype=np.int64)
    found: dict[str, list[int]] = {name: [] for name in ("since", "span", "start", "length", "state")}
    for _ in range(60):
        since, start = int(draw.integers(EVENTS)), int(draw.integers(TAPE))
        span, length = int(draw.integers(1, EVENTS - since + 1)), int(draw.integers(1, TAPE - start + 1))
        area = grid[start : start + length, since : since + span]
        if not area.any():
            area[:] = state = int(draw.integers(1, STATES))
            for name, value in zip(found, (since, span, start, length, state), strict=True):
                found[name].append(value)
    return found, grid


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("x0", "dx", "y0", "dy"), [(0, 1, 0, 1), (0, 7, 0, 11), (21, 3, 10, 5), (64, 16, 32, 32)])
def test_cells_are_counted_exactly(tab: Tab, x0: int, dx: int, y0: int, dy: int, kept: bool) -> None:
    drawn, whole = shapes(x0 + dx)
    nx, ny = -(-(EVENTS - x0) // dx), -(-(TAPE - y0) // dy)
    code = """([shapes, grid, n, events, tape, kept]) => {
        const counts = counted(shapes, grid, n);
        return [counts.map((c) => c && [...c]), [...majority(counts, grid, events, tape, kept)]];
    }"""
    grid = {"x0": x0, "dx": dx, "nx": nx, "y0": y0, "dy": dy, "ny": ny}
    counts, best = tab.page.evaluate(code, [drawn, grid, STATES, EVENTS, TAPE, kept])
    for j in range(ny):
        for i in range(nx):
            cell = whole[y0 + j * dy : y0 + (j + 1) * dy, x0 + i * dx : x0 + (i + 1) * dx]
            expected = [int((cell == state).sum()) for state in range(STATES)]
            found = [0 if c is None else c[j * nx + i] for c in counts]
            assert found[1:] == expected[1:]
            if kept and any(expected[1:-1]):
                expected[0] = expected[-1] = 0
            assert expected[best[j * nx + i]] == max(expected)


def test_packed_columns_come_back_in_the_script(tab: Tab) -> None:
    code = "async () => { const c = await unpacked('p', 5, ['a', 'b']); return [[...c.a], [...c.b]]; }"
    assert tab.page.evaluate(code) == [[2**51, -5, 0, 7, -(2**51)], [1, 1, 2**40, 0, 3]]
