"""The wheel holds exactly the tracked modules; a sub-package that nobody listed would be missing without a word."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.repository import ROOMS, ROOT, tracked_files

SHIPPED = (".py", "py.typed", ".gz", ".json", ".txt", ".css", ".js")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in tracked_files():
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not (ROOT / name).is_dir():  # typings/ links to folders
            shutil.copyfile(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(source / "out"), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    assert "would be ignored" not in built.stdout + built.stderr  # every install shows such a warning
    (path,) = (source / "out").glob("*.whl")
    return path


def test_the_wheel_has_every_tracked_file_of_the_rooms_and_no_other(wheel: Path) -> None:
    shipped = {n for n in tracked_files() if n.split("/")[0] in ROOMS and n.endswith(SHIPPED)}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {n for n in names if not n.startswith("kvtape-")} == {f"kvtape/{n}" for n in shipped}


def test_the_wheel_carries_the_licence_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
    assert "kvtape = kvtape.cli:main" in archive.read(entry).decode()
    assert "[pytest11]\nkvtape = kvtape.testing.plugin" in archive.read(entry).decode()
    assert any(n.endswith("licenses/LICENSE") for n in archive.namelist())


def test_the_command_starts_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import kvtape.cli, pathlib, sys\n"
        f"assert pathlib.Path(kvtape.cli.__file__).is_relative_to({str(tmp_path)!r}), kvtape.cli.__file__\n"
        "sys.exit(kvtape.cli.main(['--version']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("kvtape ")
