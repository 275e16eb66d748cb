"""The example of docs/serve.md runs from its first block to its last, here on a tiny model."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from support.openvino_tiny import tiny_path
from support.repository import ROOT


def writer() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "write_serve.py"))


def test_every_block_runs(tmp_path: Path) -> None:
    page = writer()
    model = tiny_path("llama")

    def on_tiny(command: str) -> str:
        for verb in ("serve", "replay"):
            command = command.replace(f"kvtape {verb}", f"kvtape {verb} --model {model}")
        return command

    inside = page["example"](page["PAGE"].read_text(encoding="utf-8"))[1]
    told = page["play"](inside, tmp_path, on_tiny)
    assert len(told) == len(page["BLOCK"].findall(inside)) == 9
    assert [out for code, out in told if code] == []
    assert [out.splitlines()[0] for _, out in told if "# EQUAL" in out]
    assert sum("# EQUAL" in out for _, out in told) == 2
    assert sum("is sealed" in out for _, out in told) == 2


def test_filling_changes_outputs_alone() -> None:
    page = writer()
    text = page["PAGE"].read_text(encoding="utf-8")
    n = len(page["BLOCK"].findall(page["example"](text)[1]))
    once = page["filled"](text, [(0, f"out {i}" if i % 2 else "") for i in range(n)])
    assert page["filled"](once, [(0, f"out {i}" if i % 2 else "") for i in range(n)]) == once
    assert once.count("```text\nout ") == n // 2
