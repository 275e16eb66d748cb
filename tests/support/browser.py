"""The system's own Chromium, headless and offline: what a page shows, says and does, and whatever goes wrong on it."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Locator, Page, Request, sync_playwright

__all__ = ["NAMES", "Colour", "Tab", "browser_path", "counted", "new_tab", "running_browser"]

Colour = tuple[int, int, int]
"""Red, green, blue, 0 to 255."""

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""Names under which the browser is looked for."""

_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--force-color-profile=srgb", "--hide-scrollbars")
"""Without the sandbox: root may not have one, and the only pages opened are those that the tests wrote."""


def browser_path() -> str:
    """Where the browser is. A test that needs one is skipped where there is none, and fails in CI."""
    for name in NAMES:
        if (found := shutil.which(name)) is not None:
            return found
    message = f"none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium)"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


@contextmanager
def running_browser() -> Generator[Browser, None, None]:
    """One browser, for a module of tests: more cost a second each. Its loop owns the thread until it is closed."""
    path = browser_path()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page in a profile of its own. `problems`: console errors, uncaught errors, and requests that leave the file."""

    def __init__(self, context: BrowserContext, file: Path) -> None:
        self.url = file.resolve().as_uri()
        self.problems: list[str] = []
        self.page: Page = context.new_page()
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda err: self.problems.append(f"uncaught: {err}"))
        self.page.on("dialog", self._interrupted)
        self.page.on("request", self._asked)
        self.page.goto(self.url)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.problems.append(f"console {message.type}: {message.text}")

    def _interrupted(self, dialog: Dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _asked(self, request: Request) -> None:
        if request.url.partition("#")[0] != self.url and not request.url.startswith(("data:", "blob:")):
            self.problems.append(f"request: {request.url}")

    def pixels(self, part: Locator | None = None) -> npt.NDArray[np.uint8]:
        """What is seen of `part`, or in the window: (height, width, 3)."""
        shot = self.page.screenshot() if part is None else part.screenshot()
        return np.asarray(Image.open(io.BytesIO(shot)).convert("RGB"))

    def colours(self, part: Locator | None = None) -> dict[Colour, int]:
        """Pixels of every colour in what is seen."""
        return counted(self.pixels(part))

    def axe(self, within: str | None = None, **options: Any) -> list[str]:
        """What axe objects to, on the page or in what the selector finds: a line for each element, with the remedy."""
        answer = Axe().run(self.page, context=within, options=options or None).response
        return [
            f"{rule['id']}: {node['html'][:160]} {node['failureSummary']}"
            for rule in answer["violations"]
            for node in rule["nodes"]
        ]

    def accessibility_tree(self) -> list[dict[str, Any]]:
        """Nodes as a screen reader is told of them, in reading order: `role`, `name` and other properties."""
        session = self.page.context.new_cdp_session(self.page)
        nodes = {n["nodeId"]: n for n in session.send("Accessibility.getFullAXTree")["nodes"]}
        session.detach()
        roots = [n for n in nodes.values() if "parentId" not in n]
        return [flat for root in roots for flat in _flat(root, nodes)]


def counted(pixels: npt.NDArray[np.uint8]) -> dict[Colour, int]:
    """How many pixels there are of every colour in a picture (height, width, 3)."""
    packed = pixels.reshape(-1, 3).astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], dtype=np.uint32)
    found, counts = np.unique(packed, return_counts=True)
    return {(c >> 16, c >> 8 & 255, c & 255): n for c, n in zip(found.tolist(), counts.tolist(), strict=True)}


def _flat(node: dict[str, Any], nodes: dict[str, dict[str, Any]]) -> Generator[dict[str, Any], None, None]:
    if not node.get("ignored"):
        told = {"role": node["role"]["value"], "name": node.get("name", {}).get("value", "")}
        yield told | {p["name"]: p["value"].get("value") for p in node.get("properties", ())}
    for child in node.get("childIds", ()):
        if child in nodes:
            yield from _flat(nodes[child], nodes)


@contextmanager
def new_tab(
    browser: Browser,
    file: Path,
    *,
    scheme: Literal["light", "dark"] = "light",
    width: int = 1280,
    height: int = 900,
) -> Generator[Tab, None, None]:
    """`file` opened offline in a window of this size. What went wrong fails the test when the tab is closed."""
    context = browser.new_context(
        offline=True,
        color_scheme=scheme,
        viewport={"width": width, "height": height},
        reduced_motion="reduce",
    )
    context.set_default_timeout(10_000)
    try:
        tab = Tab(context, file)
        yield tab
        if tab.problems:
            pytest.fail("\n".join(tab.problems))
    finally:
        context.close()
