"""One browser for each module that asks for one; one log with the results of every verb, and its report, for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from support.browser import running_browser
from support.report_page import write_page
from support.report_results import RESULTS, write_results


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `write_results`; nothing more is written into it."""
    return write_results(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="session")
def full(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a log of a real engine, with the results of every verb."""
    named = [option for name in RESULTS for option in ("--with", results / f"{name}.json")]
    return write_page(results / "L.duckdb", tmp_path_factory.mktemp("full") / "report.html", *named)
