"""The pages speak of what is there: every command, option, module, and every link."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import PurePosixPath

import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvtape.cli.app import app
from support.repository import ROOT, room_files, tracked_files

IMPORTED = re.compile(r"^ *(?:from|import) (\w+)(?=[\w.]* import | as |[\w.]*$)", re.MULTILINE)
"""The package of an import, wherever it stands in a file."""

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
    for package in sorted(set().union(*declared().values()) - {"setuptools", "kvtape"}):
        assert re.search(rf"\b{re.escape(package)}\b", page), package


def declared() -> dict[str, set[str]]:
    """The packages that each extra names; those that are always there under an empty name."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: {canonicalize_name(Requirement(text).name) for text in texts} for extra, texts in groups.items()}


def test_what_the_rooms_import_is_declared() -> None:
    """A package that only another one brings would be gone with that one's next version."""
    shipped = set().union(*(packages for extra, packages in declared().items() if extra not in ("dev", "docs")))
    # pydantic_core is of one release with pydantic; _typeshed is there for type checkers alone.
    known = {"kvtape", "pydantic_core", "_typeshed", *sys.stdlib_module_names}
    made_by = packages_distributions()
    for name in room_files():
        for top in set(IMPORTED.findall(read(name))) - known:
            assert shipped & {canonicalize_name(package) for package in made_by[top]}, f"{name} imports {top}"


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
