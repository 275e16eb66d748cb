"""docs/gate.md says what the shipped rows and the workloads say."""

from __future__ import annotations

import runpy
from typing import Any

from kvtape.backends.proofs.store import Proofs, shipped_rows
from support.repository import ROOT


def writer() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "write_gate.py"))


def test_the_page_is_what_would_be_written_now() -> None:
    page = writer()
    text = page["PAGE"].read_text(encoding="utf-8")
    assert page["filled"](text) == text, "docs/gate.md is stale; write it with: make docs"


def test_every_shipped_row_is_in_the_page_with_its_interval() -> None:
    text = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
    rows = Proofs(shipped_rows()).current("gate")
    assert rows
    for row in rows:
        saved = next(m for m in row.measures if m.name == "cpu_time_saved")
        assert saved.value is not None
        assert saved.low is not None
        assert f"{100 * saved.value:.1f} % [{100 * saved.low:.1f}" in text, row.subject
        assert row.reason in text
