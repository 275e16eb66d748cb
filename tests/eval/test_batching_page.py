"""The page about continuous batching says what the benchmark measured."""

from __future__ import annotations

import json
import runpy
from typing import Any

from support.repository import ROOT

PAGE = ROOT / "docs" / "continuous-batching.md"
WRITER: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "write_batching.py"))


def test_the_page_is_written_from_the_measured_rows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert WRITER["filled"](text) == text, "write it anew with: make docs"
    for name in WRITER["PARTS"]:
        assert text.count(f"<!-- {name} -->") == text.count(f"<!-- end of {name} -->") == 1


def test_what_was_measured_is_a_comparison_of_one_model_at_equal_rows() -> None:
    runs = json.loads((ROOT / "docs" / "continuous-batching.json").read_text(encoding="utf-8"))
    for name in set(runs) - {"options"}:
        assert all(agreed["same_model"] for agreed in runs[name]["agreement"].values())
        policies = [row for row in runs[name]["rows"] if row["kind"] == "policy"]
        assert len(policies) >= 3
        assert all(row["rows_equal"] and row["n_prompts"] >= 5 for row in policies)
    if "options" in runs:
        assert runs["options"]["options"]["xattention"] is False
        assert set(runs["options"]["options"]) == {row["option"] for row in runs["options"]["rows"]}
