"""The watcher that the page's tests rely on: it sees what goes wrong, and nothing where nothing does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from support import browser as harness
from support.browser import browser_path, new_tab

QUIET = "<!doctype html><html lang=en><title>t</title><main><h1>A heading</h1><p>words</p></main>"
IMAGE = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="

FAULTS = {
    "console.error": ("<script>console.error('went wrong')</script>", "console error: went wrong"),
    "console.warn": ("<script>console.warn('old call')</script>", "console warning: old call"),
    "uncaught": ("<script>setTimeout(() => missing())</script>", "uncaught: missing is not defined"),
    "dialog": ("<script>alert('boo')</script>", "dialog: boo"),
    "network": ("<img alt='' src='http://example.org/x.png'>", "request: http://example.org/x.png"),
    "neighbour": ("<link rel=stylesheet href='other.css'>", "other.css"),
}


def page(folder: Path, body: str) -> Path:
    file = folder / "page.html"
    file.write_text(QUIET + body, encoding="utf-8")
    return file


def test_a_page_without_faults_has_no_problems(browser: Browser, tmp_path: Path) -> None:
    with new_tab(browser, page(tmp_path, f"<img alt='' src='{IMAGE}'>")) as tab:
        assert tab.axe() == []
        told = [(n["role"], n["name"]) for n in tab.accessibility_tree()]
    assert {("heading", "A heading"), ("StaticText", "words")} <= set(told)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(browser: Browser, tmp_path: Path, fault: str) -> None:
    body, expected = FAULTS[fault]
    with pytest.raises(pytest.fail.Exception, match=re.escape(expected)):
        visit(browser, page(tmp_path, body))


def visit(browser: Browser, file: Path) -> None:
    with new_tab(browser, file) as tab:
        tab.page.wait_for_timeout(50)


def test_pixels_and_rules_of_accessibility_are_read(browser: Browser, tmp_path: Path) -> None:
    style = "position:absolute;left:0;top:0;background:#f00;width:30px;height:20px"
    body = f"<div id=red style='{style}'></div><button></button>"
    with new_tab(browser, page(tmp_path, body)) as tab:
        red = tab.page.locator("#red")
        assert tab.pixels(red).shape == (20, 30, 3)
        assert tab.colours(red) == {(255, 0, 0): 600}
        assert any(line.startswith("button-name:") for line in tab.axe())


def test_without_a_browser_ci_fails_and_others_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "NAMES", ("no-such-browser",))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        browser_path()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="no-such-browser"):
        browser_path()
