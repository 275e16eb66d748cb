"""docs/importing.md names every format with its rules, every warning and every export."""

from __future__ import annotations

import re

import pytest

from kvtape.traces.exporters.exporting import format_names
from kvtape.traces.importers.protocol import Reader
from kvtape.traces.importers.registry import LOG_LINES, READERS
from support.repository import ROOT

PAGE = (ROOT / "docs" / "importing.md").read_text(encoding="utf-8")
IMPORTS, EXPORTS = PAGE.split("## Exporting")


def rows(text: str) -> dict[str, str]:
    """Rows of the table, by the name in their first cell."""
    return {row.split("|")[1].strip(" `"): row for row in text.splitlines() if row.startswith("| `")}


@pytest.mark.parametrize("reader", READERS, ids=lambda r: r.name)
def test_the_page_says_what_the_reader_says(reader: Reader) -> None:
    _, _, summary, time, blocks, *_ = rows(IMPORTS)[reader.name].split("|")
    assert summary.strip() == reader.summary
    assert time.strip() == reader.rules.time_unit
    rules = reader.rules
    if rules.block_tokens is not None:
        assert blocks.strip() == f"{rules.block_tokens}, {rules.block_rule}, {rules.id_scope}"


def test_the_page_has_no_other_format() -> None:
    assert set(rows(IMPORTS)) == {r.name for r in READERS} | {LOG_LINES}
    assert set(rows(EXPORTS)) == set(format_names())


def test_every_kind_of_warning_is_listed() -> None:
    sources = [p.read_text(encoding="utf-8") for p in sorted((ROOT / "traces" / "importers").glob("*.py"))]
    given = set(re.findall(r'(?:warn|_fault)\(\s*"(\w+)"', "\n".join(sources)))
    listed = set(re.findall(r"`(\w+)`", PAGE.split("Warnings, by kind:")[1].split("\n\n")[0]))
    assert listed == given
