"""The floor rule holds, and the check of it can fail."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.repository import ROOT, copy_rooms, module_name, room_files

CONTRACTS = 6


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on the rooms under `folder`/kvtape, which go before the editable install."""
    shutil.copyfile(ROOT / "pyproject.toml", folder / "pyproject.toml")
    environment = {**os.environ, "PYTHONPATH": str(folder), "NO_COLOR": "1", "COLUMNS": "200"}
    code = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def rooms(tmp_path: Path) -> Path:
    copy_rooms(tmp_path)
    return tmp_path


def test_every_contract_is_kept(rooms: Path) -> None:
    done = lint_imports(rooms)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Contracts: {CONTRACTS} kept, 0 broken." in done.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("planner/ranges.py", "import kvtape.traces"),
        ("planner/ranges.py", "import kvtape.capacity.model"),
        ("traces/__init__.py", "import kvtape.backends.protocol"),
        ("sim/__init__.py", "import kvtape.replay"),
        ("backends/__init__.py", "import kvtape.cli"),
        ("replay/__init__.py", "import kvtape.testing.toy"),
        ("testing/__init__.py", "import kvtape.cli"),
        ("backends/llama/__init__.py", "import kvtape.planner.residency"),
        ("backends/openvino/__init__.py", "from kvtape.planner import residency"),
        ("backends/reference/model/__init__.py", "import kvtape.backends.reference.engines.engine"),
        ("planner/events.py", "import pydantic"),
        ("capacity/model.py", "import duckdb"),
        ("cli/output.py", "import llama_cpp"),
    ],
)
def test_a_planted_import_breaks_a_contract(rooms: Path, file: str, line: str) -> None:
    path = rooms / "kvtape" / file
    path.write_text(path.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    done = lint_imports(rooms)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout


def test_every_room_is_under_the_contracts() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    roots = set(config["tool"]["importlinter"]["root_packages"])
    assert roots == {".".join(module_name(name).split(".")[:2]) for name in room_files()}
    listed = set(config["tool"]["setuptools"]["packages"])
    # No code: listed because setuptools takes a folder of data for a package.
    texts = {"kvtape.cli.text", "kvtape.report.assets"}
    assert listed - texts == {module_name(name) for name in room_files() if name.endswith("__init__.py")}


@pytest.mark.parametrize(
    ("room", "allowed"), [("planner", {"numpy", "kvtape"}), ("capacity", {"numpy", "gguf", "kvtape"})]
)
def test_the_lowest_floor_imports_only_what_it_may(room: str, allowed: set[str]) -> None:
    """A contract can only forbid packages that somebody thought of; this one allows by name."""
    found: set[str] = set()
    for name in room_files():
        if name.startswith(f"{room}/"):
            found |= top_level_imports((ROOT / name).read_text(encoding="utf-8"))
    assert found - set(sys.stdlib_module_names) <= allowed


def test_no_room_is_imported_by_its_bare_name() -> None:
    rooms = {name.split("/")[0] for name in room_files()}
    for name in room_files():
        assert not top_level_imports((ROOT / name).read_text(encoding="utf-8")) & rooms, name


def top_level_imports(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found
