"""docs/policies.md names every policy, option, value and diagnostic, and its function works."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvtape.planner.blocks import Block, CacheClass
from kvtape.planner.outcome import Diagnostic
from kvtape.planner.policy_options import OPTIONS, POLICY_NAMES
from kvtape.planner.user_policy import plan_user
from support.repository import ROOT

PAGE = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
ROWS = {line.split("|")[1].strip(): line for line in PAGE.splitlines() if line.startswith("| ")}


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_has_its_row(name: str) -> None:
    row = ROWS[f"`{name}`"]
    required = [key for key, option in OPTIONS[name].items() if repr(option.default) == "REQUIRED"]
    assert re.findall(r"`(\w+)`", row.split("|")[2]) == required


@pytest.mark.parametrize("key", sorted({key for table in OPTIONS.values() for key in table}))
def test_every_option_has_its_row(key: str) -> None:
    row = ROWS[f"`{key}`"]
    for table in OPTIONS.values():
        option = table.get(key)
        if option is not None and option.kind is str and option.allowed is not None:
            assert all(f"`{value}`" in row for value in option.allowed)


def test_every_diagnostic_is_explained() -> None:
    assert all(str(d) in PAGE.partition("## What a plan says")[2] for d in Diagnostic)


def test_the_function_on_the_page_keeps_the_newest() -> None:
    code = PAGE[PAGE.index("def newest") :].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    blocks = [Block(i, i, i + 1, "user", CacheClass.VOLATILE) for i in range(9)]
    found = plan_user(
        blocks, budget=4, sink=1, recent=1, target="mine:newest", function=names["newest"], can_evict=True
    )
    assert [(r.start, r.stop) for r in found.keep] == [(0, 1), (6, 9)]
