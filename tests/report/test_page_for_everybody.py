"""The report for people who do not look at it on a wide screen: screen readers, telephones, paper, tired eyes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser

from support.browser import new_tab
from support.contrast import shown_texts
from support.report_page import figures, ready, write_page

WORKED = ("button", "combobox", "link", "application", "DisclosureTriangle")
"""Roles of what can be worked."""


@pytest.fixture(scope="module")
def bare(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without results: the panels say what is missing."""
    return write_page(results / "L.duckdb", tmp_path_factory.mktemp("bare") / "bare.html")


def test_axe_objects_to_nothing(browser: Browser, full: Path, bare: Path) -> None:
    # Its rule of contrast is the slowest one and does not see into drawings: the test below computes it.
    for page, within in ((full, None), (bare, ".missing")):
        with new_tab(browser, page) as tab:
            ready(tab.page)
            tab.page.evaluate(_UNFOLD)
            assert tab.axe(within, rules={"color-contrast": {"enabled": False}}) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(browser: Browser, full: Path, scheme: Literal["light", "dark"]) -> None:
    with new_tab(browser, full, scheme=scheme) as tab:
        ready(tab.page)
        # A series that is hidden stays a text that is read.
        for series in tab.page.locator(".legend button[aria-pressed]").all()[::4]:
            series.click()
        tab.page.mouse.move(0, 0)
        texts = shown_texts(tab.page)
        assert len(texts) > 200
        assert [t for t in texts if t.contrast < 4.5] == []


_UNFOLD = "document.querySelectorAll('details').forEach(d => { d.open = true; })"


def test_a_screen_reader_is_told_all_that_is_shown(browser: Browser, full: Path) -> None:
    with new_tab(browser, full) as tab:
        shown = figures(tab)
        told = tab.accessibility_tree()
        headings = [(int(n["level"]), n["name"]) for n in told if n["role"] == "heading"]
        assert headings[0][0] == 1
        assert all(after <= before + 1 for (before, _), (after, _) in pairwise(headings))
        assert [level for level, _ in headings].count(1) == 1
        assert {f.title for f in shown} <= {name for _, name in headings}
        roles = {n["role"] for n in told}
        assert {"banner", "navigation", "main", "contentinfo"} <= roles
        assert [n for n in told if n["role"] in WORKED and not n["name"].strip()] == []
        # Series are switched by buttons of their names, in groups that bear the names of their figures.
        names = [n["name"] for n in told if n["role"] in ("button", "combobox") and n.get("pressed") in (None, "")]
        assert sorted({name for name in names if names.count(name) > 1}) == [], "two controls of one name"
        assert "canvas" not in {n["role"].lower() for n in told}, "a drawing without words"


def test_every_figure_is_told_in_words_and_numbers(browser: Browser, full: Path) -> None:
    with new_tab(browser, full) as tab:
        for figure in figures(tab):
            described = figure.drawing.get_attribute("aria-describedby")
            summary = tab.page.locator(f"#{described}").inner_text()
            assert len(summary) > 30, figure.title
            assert any(c.isdigit() for c in summary), f"{figure.title}: no number in {summary!r}"
            # Folded under the figure, or open beside it.
            table = figure.whole.locator("details table").or_(figure.whole.locator("xpath=../div//table")).first
            assert table.locator("caption").text_content(), figure.title
            assert table.locator("tbody tr").count() >= 1, figure.title
            assert figure.whole.locator(".readout").get_attribute("aria-live") == "polite"


def test_every_table_has_headers(browser: Browser, full: Path) -> None:
    with new_tab(browser, full) as tab:
        bad = tab.page.evaluate(
            "() => [...document.querySelectorAll('table')].filter(t => !t.caption || !t.querySelector('th[scope=col]')"
            " && !t.querySelector('th[scope=row]') || !t.closest('[role=group][tabindex=\"0\"][aria-label], details'))"
            ".map(t => t.outerHTML.slice(0, 200))"
        )
        assert bad == []
        assert tab.page.locator("table").count() > 8


def test_the_skip_link_leads_past_the_head(browser: Browser, bare: Path) -> None:
    with new_tab(browser, bare) as tab:
        tab.page.keyboard.press("Tab")
        skip = tab.page.locator("a.skip")
        box = skip.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        tab.page.keyboard.press("Enter")
        assert tab.page.evaluate("document.activeElement.id") == "panels"


@pytest.mark.parametrize("width", [360, 1920])
def test_no_width_makes_the_page_scroll_sideways(browser: Browser, full: Path, bare: Path, width: int) -> None:
    for page in (full, bare):
        with new_tab(browser, page, width=width) as tab:
            shown = figures(tab)
            over, seen = tab.page.evaluate(
                "[document.scrollingElement.scrollWidth, document.documentElement.clientWidth]"
            )
            assert over <= seen
            for figure in shown:
                _, _, wide, tall = figure.plot()
                assert wide > 0.5 * min(width, 1200), figure.title
                assert tall > 120, figure.title
                ends = sorted(figure.whole.locator(".tick-x").evaluate_all(_ENDS))
                together = [pair for pair in pairwise(ends) if pair[0][1] > pair[1][0] + 1]
                assert not together, f"{figure.title}: labels on each other"


_ENDS = "labels => labels.map(l => l.getBoundingClientRect()).map(box => [box.left, box.right])"


def test_a_legend_shows_the_marks_and_lines_of_its_series(browser: Browser, full: Path) -> None:
    with new_tab(browser, full) as tab:
        ready(tab.page)
        keys = dict(tab.page.evaluate(_KEYS))
        dashed = {name for name in keys if name.endswith("(dashed)")}
        assert dashed
        # A bound is a line alone: marks of its own would lie over those that it bounds.
        assert {keys[name] for name in dashed} == {"7 4"}
        marks = {keys[name].removeprefix("none ").split(" ")[0] for name in keys.keys() - dashed}
        assert {"circle", "path"} <= marks <= {"circle", "path", "rect"}


_KEYS = """[...document.querySelectorAll(".legend button")].map(b => [b.textContent, [...b.querySelectorAll(".key *")]
  .map(m => m.getAttribute("stroke-dasharray") || m.tagName).join(" ")])"""


def test_on_paper_the_page_is_light_and_without_controls(browser: Browser, full: Path) -> None:
    with new_tab(browser, full, scheme="dark") as tab:
        shown = figures(tab)
        tab.page.emulate_media(media="print")
        for figure in shown:
            colours = figure.colours()
            assert max(colours, key=colours.__getitem__) != (15, 19, 24), f"{figure.title} is dark"
        assert not tab.page.locator("nav").is_visible()
        tab.page.set_viewport_size({"width": 1050, "height": 740})  # paper on its side
        assert tab.page.evaluate(_WIDE) == [], "a table runs off the paper"
        assert tab.page.locator(".controls").first.is_hidden()
        assert [t for t in shown_texts(tab.page) if t.contrast < 4.5] == []
        pdf = tab.page.pdf()
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") >= 8


_WIDE = """[...document.querySelectorAll("table")].filter(t => t.offsetWidth > t.parentElement.clientWidth)
  .map(t => t.caption.textContent)"""


def test_without_results_the_page_says_which_commands_make_them(browser: Browser, bare: Path) -> None:
    with new_tab(browser, bare) as tab:
        missing = tab.page.locator(".missing")
        assert missing.count() >= 3
        for command in missing.locator("code").all_inner_texts():
            assert command.startswith("kvtape ")
