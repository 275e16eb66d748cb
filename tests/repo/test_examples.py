"""The samples run, and stay samples: short, with what they need as arguments."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.repository import ROOT
from support.tiny_gguf import write_tiny

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONGEST_SAMPLE_LINES = 45


def run(name: str, *args: object) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *(str(a) for a in args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_a_sample_is_short_and_says_how_to_run_it(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= LONGEST_SAMPLE_LINES
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(source)) or "")


def test_plan_only() -> None:
    out = run("plan_only.py", "stream:sink=4,recent=60", 200)
    assert "keep  [0, 16) [140, 200)" in out  # the system segment is pinned, the rest streams
    assert "never evicts" in run("plan_only.py", "none", 200)


def test_record_a_session_and_fold_its_log(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf")
    log = tmp_path / "new.duckdb"
    out = run("record_session.py", model, ROOT / "examples" / "text" / "harbour.txt", log)
    assert "resident: [0, 4) [" in out
    folded = run("fold_log.py", log)
    assert "session s0 on llama, policy stream:sink=4,recent=252" in folded
    assert " evict " in folded
    assert "resident: [0, 4) [" in folded


def test_a_tape_on_a_program_of_ones_own(tmp_path: Path) -> None:
    out = run("capture_llama.py", write_tiny(tmp_path / "tiny.gguf", n_ctx=1024), tmp_path / "new.duckdb")
    assert "events are safe" in out
    assert "session captured on llama, policy none" in run("fold_log.py", tmp_path / "new.duckdb")


THIRD_PARTY = ROOT / "examples" / "third_party"


def test_a_backend_of_ones_own_conforms() -> None:
    """In the folder of the sample, as its first line says; the outcome is that of a backend without surgery."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-q",
        "--kvtape-backend",
        "backend:open_backend",
    ]
    done = subprocess.run(command, cwd=THIRD_PARTY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this engine can only compute and clear its cache" in done.stdout
    assert re.search(r"\b(\d+) passed, 21 skipped", done.stdout)


def test_a_policy_of_ones_own_on_it() -> None:
    out = run("third_party/use_both.py")
    assert "of a budget of 16" in out
    assert "evicts, all by recompute" in out
    assert "fold and books agree" in out


@pytest.mark.parametrize("path", sorted(THIRD_PARTY.glob("*.py")), ids=lambda p: p.name)
def test_a_third_party_sample_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_a_sample_without_arguments_says_how_to_run_it(path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"python examples/{path.name} " in done.stderr
    assert "Traceback" not in done.stderr
