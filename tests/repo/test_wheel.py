"""What is published: the wheel holds exactly the tracked modules, and alone it does all that needs no extra.

A sub-package that nobody listed would be missing without a word.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from support.bare_install import BareInstall, install_bare, required
from support.repository import ROOMS, copy_tracked, tracked_files
from support.tiny_gguf import write_tiny

SHIPPED = (".py", "py.typed", ".gz", ".json", ".txt", ".css", ".js")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source distribution, and the wheel that was built from it."""
    source = tmp_path_factory.mktemp("source")
    copy_tracked(source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(source / "out"), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    assert "would be ignored" not in built.stdout + built.stderr  # every install shows such a warning
    return source / "out"


@pytest.fixture(scope="module")
def wheel(published: Path) -> Path:
    (path,) = published.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> BareInstall:
    return install_bare(wheel, tmp_path_factory.mktemp("bare") / "venv")


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


def test_an_index_would_take_both(published: Path) -> None:
    made = sorted(published.iterdir())
    assert [path.suffix for path in made] == [".whl", ".gz"]
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


def test_the_source_distribution_has_the_pages_and_what_they_show(published: Path) -> None:
    (path,) = published.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {n for n in tracked_files() if n.split("/")[0] in ("docs", "examples")}
    assert wanted | {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= names
    assert not {n for n in names if n.startswith(("tests/", ".venv", "build/")) or n.endswith(".pyc")}


def test_the_metadata_says_what_it_is_and_names_no_private_host(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry,) = (n for n in archive.namelist() if n.endswith("METADATA"))
    said = message_from_string(archive.read(entry).decode())
    assert (said["License-Expression"], said["License-File"]) == ("Apache-2.0", "LICENSE")
    assert said["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in said.get_all("Classifier", [])
    assert {"png", "llama", "openvino", "demo"} <= set(said.get_all("Provides-Extra", []))
    links = [url for each in said.get_all("Project-URL", []) for url in re.findall(r"https?://([^/\s]+)", each)]
    assert not [host for host in links if host.startswith(("localhost", "127.", "10.", "192.168.")) or "." not in host]


def test_without_extras_the_modelled_demo_runs_and_reads_nothing_else(bare: BareInstall, tmp_path: Path) -> None:
    log, costs = "demo-out/demo.duckdb", "demo-out/costs.json"
    commands = [
        ["--version"],
        ["demo", "--modelled", "--json"],
        ["verify", log],
        ["show", log, "--session", "essay", "--plot", "map.svg"],
        ["explain", log, "--session", "essay", "40"],
        ["whatif", log, "--costs", costs, "--policy", "stream", "--budget", "512", "--plot", "whatif.svg"],
        ["curve", log, "--plot", "curve.svg"],
        ["report", log, "--with", "demo-out/whatif.json", "--out", "report.html"],
        ["export", log, "--format", "parquet", "--out", "parquet"],
        ["doctor"],
    ]
    said, modules = bare.run(commands, tmp_path)
    for command, each in zip(commands, said, strict=True):
        assert each.code == 0, (command, each.err)
    assert json.loads(said[1].out)["whatif"]["recorded"]["equal"] is True
    for extra in ("llama", "openvino"):
        assert f"kvtape[{extra}]" in said[-1].out
    mine = {name.replace("-", "_").lower() for name in required("kvtape")} | {"kvtape"}
    strangers = set(modules) & {
        "llama_cpp",
        "openvino",
        "ray",
        "optuna",
        "starlette",
        "resvg_py",
        "hypothesis",
        "pytest",
    }
    assert (strangers, "duckdb" in mine) == (set(), True)
    assert {"map.svg", "whatif.svg", "curve.svg", "report.html"} <= {p.name for p in tmp_path.iterdir()}


def test_what_needs_an_extra_names_it_in_one_line(bare: BareInstall, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf")
    (tmp_path / "text.txt").write_text("what is kept and what is not", encoding="utf-8")
    bare.run([["demo", "--modelled"]], tmp_path)
    log, costs = "demo-out/demo.duckdb", "demo-out/costs.json"
    record = ["record", "--text", "text.txt", "--log", "new.duckdb"]
    point = ["--costs", costs, "--policy", "stream", "--budget", "512"]
    tiny = ["--model", model]
    wanted = [
        (["demo"], "demo"),
        (record, "demo"),
        ([*record, *tiny], "llama"),
        ([*record, *tiny, "--backend", "openvino"], "openvino"),
        ([*record, *tiny, "--backend", "reference"], "llama"),  # for its tokeniser, as OpenVINO would do too
        (["certify", *tiny, "--backend", "llama"], "llama"),
        (["certify", *tiny, "--backend", "openvino"], "openvino"),
        (["eval", "--policy", "stream", "--budget", "128", "--seeds", "0:1"], "demo"),
        (["eval", "--policy", "stream", "--budget", "64", "--seeds", "0:1", "--tokens", "200", *tiny], "llama"),
        (["eval", "--task", "nll", "--policy", "stream", "--budget", "64", *tiny], "llama"),
        (["eval", "--task", "batching", "--policy", "stream", "--budget", "64", *tiny], "openvino"),
        (["bench", "--engine", "standard", "--prompt", "x"], "demo"),
        (["bench", "--engine", "standard", "--prompt", "x", *tiny], "llama"),
        (["run", "--prompt", "x"], "demo"),
        (["run", "--prompt", "x", *tiny], "llama"),
        (["gate"], "demo"),
        (["serve", "--log", "tapes", *tiny], "serve"),
        (["tune", log, "--costs", costs, "--budget", "512", "--minimize", "ttft_p95"], "tune"),
        (["whatif", log, *point, "--ray", "local"], "ray"),
        (["whatif", log, *point, "--plot", "points.png"], "png"),
    ]
    before = sorted(tmp_path.rglob("*"))
    said, _ = bare.run([*(command for command, _ in wanted), ["replay", log, "--on", "llama"]], tmp_path)
    last = said.pop()
    assert said[0].err.endswith("or see it without an engine: kvtape demo --modelled\n")
    assert (last.code, "pip install 'kvtape[demo]'" in last.err) == (2, True)  # or the file, wherever it is
    for (command, extra), each in zip(wanted, said, strict=True):
        assert each.code == 3, (command, each)
        assert f"pip install 'kvtape[{extra}]'" in each.err, (command, each.err)
        assert (each.out, each.err.count("\n")) == ("", 1), (command, each)
    assert sorted(tmp_path.rglob("*")) == before
