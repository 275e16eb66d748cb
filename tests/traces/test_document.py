"""The documentation of the log cannot drift from the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtape.planner.events import Op
from kvtape.traces.document import replace_generated
from kvtape.traces.schema import ALL_TABLES, ROW_TABLES
from kvtape.traces.views import VIEWS

DOCUMENT = Path(__file__).parents[2] / "docs" / "log-schema.md"


def test_the_generated_part_is_up_to_date() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == replace_generated(text), "run: python -m kvtape.traces.document docs/log-schema.md"


def test_everything_is_in_it() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in (*ALL_TABLES, *(v.name for v in VIEWS)):
        assert f"### `{name}`" in text
    for table in ROW_TABLES:
        for field in table.fields:
            assert f"| `{field.name}` |" in text
            assert field.doc.replace("|", "\\|") in text
    assert all(op.value in text for op in Op)


def test_a_document_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="markers"):
        replace_generated("# The log\n")
