"""`pytest --kvtape-backend module:factory`, started as a stranger would start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtape.testing.conformance import SCENARIOS
from support.repository import ROOT


def run_pytest(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "NO_COLOR": "1", "COLUMNS": "300"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    return subprocess.run([*command, *args], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_toy_passes_from_an_empty_folder(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "-q", "--kvtape-backend", "kvtape.testing.toy:open_toy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SCENARIOS) - 6} passed, 6 skipped" in done.stdout


def test_a_wrong_backend_fails_and_the_report_is_two_lines(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "-q", "--kvtape-backend", "support.wrong_toys:forgets_to_evict")
    assert done.returncode == 1
    assert "Rows of the middle, the beginning and the end go; the others stay where they are" in done.stdout
    assert "after evict of [4, 8): the memory has rows at [0, 20), expected [0, 4) [8, 20)" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "::prefill" not in done.stdout


def test_a_factory_beside_it_is_found_and_k_selects(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from kvtape.testing.toy import open_toy as opened\n", encoding="utf-8")
    done = run_pytest(tmp_path, "-v", "-k", "evict or shift", "--kvtape-backend", "mine:opened")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conformance[mine:opened]::evict PASSED" in done.stdout
    assert "::decode" not in done.stdout


def test_two_backends_and_tests_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_mine():\n    assert True\n", encoding="utf-8")
    toy = ("--kvtape-backend", "kvtape.testing.toy:open_toy")
    again = ("--kvtape-backend", "support.conformance_backends:toy_again")
    alone = run_pytest(tmp_path, "-v", "-k", "take_mass or mine", *toy, *again)
    assert "conformance[support.conformance_backends:toy_again]::take_mass PASSED" in alone.stdout
    assert "2 passed" in alone.stdout
    beside = run_pytest(tmp_path, "-v", "-k", "take_mass or mine", *toy, "test_own.py")
    assert "test_own.py::test_mine PASSED" in beside.stdout
    assert "2 passed" in beside.stdout


@pytest.mark.parametrize("option", ["nothing", "no_such_module_here:open"])
def test_a_bad_option_is_one_line(tmp_path: Path, option: str) -> None:
    done = run_pytest(tmp_path, "--kvtape-backend", option)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: --kvtape-backend '{option}'" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_without_the_option_the_plugin_adds_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "import sys\n\ndef test_mine():\n    assert 'kvtape.testing.conformance' not in sys.modules\n", encoding="utf-8"
    )
    done = run_pytest(tmp_path, "-q")
    assert done.returncode == 0
    assert "1 passed" in done.stdout
