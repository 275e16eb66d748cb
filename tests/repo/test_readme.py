"""The README: its picture is what the script draws, its sixty seconds are what comes out, its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import write_pictures

from kvtape.cli.demo_script import ESSAY
from kvtape.cli.sample.bundled import sample_facts
from support.command import kvtape
from support.page_runs import refilled
from support.pages import NOT_RUN, blocks
from support.repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_picture_is_the_one_that_the_bundled_log_gives() -> None:
    assert f"]({write_pictures.PICTURE.relative_to(ROOT)})" in README
    assert write_pictures.PICTURE.read_text(encoding="utf-8") == write_pictures.picture(), "write it anew: make docs"


def test_the_example_is_what_comes_out(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    assert refilled("README.md", tmp_path) == README, "write it anew: python docs/write_outputs.py README.md"
    assert {"report.html", "map.svg"} <= {path.name for path in (tmp_path / "demo-out").iterdir()}


def test_every_block_says_what_it_is() -> None:
    found = blocks(README)
    assert [b.language for b in found if b.why_not_run is None and b.language in ("console", "python")] == [
        "console"
    ] * 2
    for block in found:
        assert block.fenced
        assert block.language in ("console", "sh", ""), block.line
        assert set(block.words[1:]) <= set(NOT_RUN), block.line


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that the demo made without an engine, and what it said."""
    folder = tmp_path_factory.mktemp("demo") / "demo-out"
    ran = kvtape("demo", "--modelled", "--out", folder)
    assert ran.code == 0
    return folder, ran.out


def test_two_commands_lead_to_a_report_and_a_third_to_ones_own_trace(demo: tuple[Path, str]) -> None:
    """The two are targets of the Makefile; what they call writes the report, and says the third."""
    shown = next(b.text for b in blocks(README) if "make demo" in b.text)
    assert re.findall(r"^make (\w+)", shown, re.MULTILINE) == ["setup", "demo"]
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^demo: setup .*\n\t\$\(BIN\)/kvtape demo --out \$\(DEMO_OUT\)$", rules, re.MULTILINE)
    folder, said = demo
    assert (folder / "report.html").stat().st_size > 10_000
    assert "whatif trace.jsonl" in said.splitlines()[-1]


def test_what_it_says_of_the_bundled_log_is_so(demo: tuple[Path, str]) -> None:
    question = "SELECT sum(n_tokens) AS n FROM events WHERE session_id = 'essay' AND turn = 1 AND op = 'prefill'; "
    found = kvtape("sql", demo[0] / "demo.duckdb", question.rstrip("; "))
    assert found.out.splitlines()[-1] == "3453"
    assert ESSAY.n_ctx == 1024
    assert "stream:sink=4,recent=508" in ESSAY.policy
    assert sample_facts().model == "SmolLM2-135M-Instruct.Q4_1.gguf"
