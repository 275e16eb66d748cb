"""The report in a real browser: it is drawn, it answers to pointer and keys, and it says what the log says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser

from kvtape.planner.events import Event
from kvtape.traces.reader import open_log
from support.browser import Tab, counted, new_tab
from support.contrast import variables
from support.long_log import write_long_log
from support.read_cells import folded_cell, read_cell
from support.report_page import Figure, figures, ready, write_page

PANELS = 8
SINK, RECENT = 4, 700
"""Of the policy of `long_log`."""
HOSTILE = ("</script><img src=x onerror=alert(1)>", "\"'><script>alert(2)</script>&amp;\u2028")
STATES = ("resident", "recent", "sink", "cold", "dropped")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two longer sessions, whose names are hostile."""
    folder = tmp_path_factory.mktemp("two")
    return write_page(write_long_log(folder / "two.duckdb", [400, 150], HOSTILE), folder / "report.html")


def events_of(page: Path, session: str) -> list[Event]:
    with open_log(page.with_name("two.duckdb")) as log:
        return list(log.events("long", session))


def figure(tab: Tab, kind: str) -> Figure:
    return next(f for f in figures(tab) if f.kind == kind)


def test_every_panel_shows_something(browser: Browser, full: Path) -> None:
    with new_tab(browser, full) as tab:
        assert {f.kind for f in figures(tab)} == {"residency", "timeline", "occupancy", "chart"}
        panels = tab.page.locator("main > section").all()
        assert len(panels) == PANELS
        for panel in panels:
            title = panel.locator("h2").inner_text()
            assert panel.locator(".drawing, tbody tr").count(), f"{title}: no figure and no row"
            panel.evaluate("panel => scrollTo(0, panel.getBoundingClientRect().top + scrollY)")
            shot = tab.pixels()
            assert shot.std() > 8, f"{title}: a blank picture"
            assert len(counted(shot)) > 20, title


def test_every_figure_has_marks_in_its_plot(browser: Browser, full: Path) -> None:
    with new_tab(browser, full) as tab:
        paper = variables(tab.page, "paper")["paper"]
        for shown in figures(tab):
            far = [n for c, n in counted(shown.pixels()).items() if max(map(abs, np.subtract(c, paper))) > 60]
            assert sum(far) > 40, f"{shown.title}: nothing but axes"
            assert shown.labels("x"), shown.title
            assert len(shown.labels("y")) >= 2, shown.title


def test_the_map_has_the_colours_of_its_states(browser: Browser, two: Path) -> None:
    with new_tab(browser, two) as tab:
        names = variables(tab.page, *STATES)
        colours = figure(tab, "residency").colours()
        for state in ("recent", "cold", "dropped", "resident"):
            assert colours.get(names[state], 0) > 0.01, state


def test_pointing_says_the_exact_counts_and_the_reason(browser: Browser, two: Path) -> None:
    events = events_of(two, HOSTILE[0])
    evicted = next(e for e in events if str(e.op) == "evict" and e.seq > 150)
    tape = max(e.stop for e in events if e.stop is not None)
    with new_tab(browser, two) as tab:
        shown = figure(tab, "residency")
        # Anywhere, and where something begins: in cells that a corner of it cuts.
        corners = [(e.seq / len(events), 1 - e.start / tape) for e in events[150:] if str(e.op) == "evict"][:5]
        for across, down in (*corners, (0.1, 0.95), (0.52, 0.45), (0.77, 0.3), (0.98, 0.02)):
            cell = read_cell(shown.point(across, down))
            assert cell.events[0] - 1 < across * len(events) < cell.events[1] + 2
            assert cell.states == folded_cell(events, cell, sink=SINK, recent=RECENT)
        said = shown.point((evicted.seq + 0.5) / len(events), 0.5)
        assert read_cell(said).events == (evicted.seq, evicted.seq)
        assert f"evict [{evicted.start}, {evicted.stop})" in said
        assert evicted.reason
        assert evicted.reason in said


def test_zooming_counts_again(browser: Browser, two: Path) -> None:
    events = events_of(two, HOSTILE[0])
    with new_tab(browser, two) as tab:
        shown = figure(tab, "residency")
        whole, before = shown.labels("x"), shown.pixels()
        coarse = read_cell(shown.point(0.5, 0.5))
        tab.page.keyboard.down("Control")
        tab.page.mouse.wheel(0, -400)
        tab.page.keyboard.up("Control")
        wheeled = shown.labels("x")
        assert wheeled != whole
        shown.drag((0.3, 0.3), (0.7, 0.7))
        assert shown.labels("x") not in (whole, wheeled)
        assert (shown.pixels() != before).any()
        for _ in range(4):
            shown.button("Zoom in").click()
        fine = read_cell(shown.point(0.5, 0.5))
        width = coarse.positions[1] - coarse.positions[0]
        assert fine.positions[1] - fine.positions[0] < width
        assert fine.states == folded_cell(events, fine, sink=SINK, recent=RECENT)
        shown.button("Whole figure").click()
        assert shown.labels("x") == whole


def test_a_scroll_past_a_figure_scrolls_the_page(browser: Browser, two: Path) -> None:
    with new_tab(browser, two) as tab:
        shown = figure(tab, "residency")
        whole = shown.labels("x")
        shown.point(0.5, 0.5)
        at = tab.page.evaluate("scrollY")
        tab.page.mouse.wheel(0, 300)
        tab.page.wait_for_function("at => scrollY > at", arg=at)
        assert shown.labels("x") == whole


def test_figures_of_events_move_together(browser: Browser, two: Path) -> None:
    with new_tab(browser, two) as tab:
        shown, beside = figure(tab, "residency"), figure(tab, "occupancy")
        whole = beside.labels("x")
        shown.button("Zoom in").click()
        assert beside.labels("x") == shown.labels("x") != whole


def test_another_session_is_chosen_in_all_figures(browser: Browser, two: Path) -> None:
    events = events_of(two, HOSTILE[1])
    with new_tab(browser, two) as tab:
        shown, beside = figure(tab, "residency"), figure(tab, "timeline")
        first = shown.pixels()
        shown.whole.get_by_label("Session").select_option(index=1)
        cell = read_cell(shown.point(0.6, 0.8))
        assert cell.states == folded_cell(events, cell, sink=SINK, recent=RECENT)
        assert (shown.pixels() != first).any()
        assert beside.whole.get_by_label("Session").input_value() == "1"


def test_hostile_names_are_texts(browser: Browser, two: Path) -> None:
    with new_tab(browser, two) as tab:
        ready(tab.page)
        options = tab.page.locator("select").first.locator("option").all_text_contents()
        assert all(any(name in option for option in options) for name in (HOSTILE[0], HOSTILE[1][:20]))
        assert tab.page.locator("img, iframe, object, embed, form").count() == 0
        assert tab.page.locator("script[src], link[rel=stylesheet], [onerror], [onload]").count() == 0


def test_keys_reach_and_work_everything(browser: Browser, two: Path) -> None:
    """Tab goes through all that can be worked, each seen to have the focus; keys alone zoom, read and choose."""
    with new_tab(browser, two) as tab:
        ready(tab.page)
        count = tab.page.evaluate(
            "() => [...document.querySelectorAll('a[href], button, select, summary, [tabindex=\"0\"]')]"
            ".filter(e => e.checkVisibility()).length"
        )
        seen: list[str] = []
        for _ in range(count):
            tab.page.keyboard.press("Tab")
            seen.append(tab.page.evaluate(_FOCUSED))
        assert len(set(seen)) == count > 20
        unseen = [name for name in seen if not name.endswith(" outlined")]
        assert unseen == []
        tab.page.keyboard.press("Tab")
        assert tab.page.evaluate("document.activeElement === document.body"), "there is more than can be seen"


_FOCUSED = """() => {
  const e = document.activeElement, style = getComputedStyle(e);
  const all = [...document.querySelectorAll("*")], box = e.getBoundingClientRect();
  const outlined = parseFloat(style.outlineWidth) >= 2 && style.outlineStyle !== "none" && box.width > 0
    && box.bottom > 0 && box.top < innerHeight;
  return `${all.indexOf(e)} ${e.tagName} ${(e.ariaLabel || e.textContent).slice(0, 40)}${outlined ? " outlined" : ""}`;
}"""


def test_a_figure_is_worked_by_keys(browser: Browser, two: Path) -> None:
    events = events_of(two, HOSTILE[0])
    with new_tab(browser, two) as tab:
        shown = figure(tab, "residency")
        whole = shown.labels("x")
        shown.drawing.focus()
        tab.page.keyboard.press("ArrowRight")
        first = read_cell(shown.readout())
        assert first.states == folded_cell(events, first, sink=SINK, recent=RECENT)
        for _ in range(5):
            tab.page.keyboard.press("ArrowRight")
        assert read_cell(shown.readout()).events > first.events
        tab.page.keyboard.press("ArrowUp")
        assert read_cell(shown.readout()).positions > first.positions
        tab.page.keyboard.press("+")
        zoomed = shown.labels("x")
        assert zoomed != whole
        tab.page.keyboard.press("Shift+ArrowRight")
        assert shown.labels("x") not in (whole, zoomed)
        assert re.match(r"Shown: event \(seq\) [\d,]+ to [\d,]+; tape position", shown.readout())
        tab.page.keyboard.press("0")
        assert shown.labels("x") == whole
        folded = shown.whole.locator("details")
        folded.locator("summary").focus()
        tab.page.keyboard.press("Enter")
        assert folded.locator("table").is_visible()


def test_the_theme_is_the_systems_until_one_is_chosen(browser: Browser, two: Path) -> None:
    with new_tab(browser, two, scheme="dark") as tab:
        dark = variables(tab.page, "paper", "recent")
        shown = figure(tab, "residency")
        seen = tab.colours()
        assert max(seen, key=seen.__getitem__) == dark["paper"]
        assert shown.colours().get(dark["recent"], 0) > 0.01
        button = tab.page.locator("#theme")
        button.focus()
        tab.page.keyboard.press("Enter")
        light = variables(tab.page, "paper", "recent")
        assert light["paper"] > dark["paper"]
        assert shown.colours().get(light["recent"], 0) > 0.01
        tab.page.keyboard.press("Enter")
        assert variables(tab.page, "paper", "recent") == dark
        tab.page.emulate_media(color_scheme="light")
        assert variables(tab.page, "paper", "recent") == dark, "the choice stands"
        tab.page.keyboard.press("Enter")
        assert variables(tab.page, "paper", "recent") == light
        tab.page.emulate_media(color_scheme="dark")
        assert shown.colours().get(dark["recent"], 0) > 0.01
