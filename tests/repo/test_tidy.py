"""Rules of the repository that a linter does not know."""

from __future__ import annotations

import ast
import re
from pathlib import PurePosixPath

import pytest

from support.repository import ROOMS, ROOT, room_files, tracked_files

LONGEST_MODULE_LINES = 500
TEXT = (".py", ".md", ".toml", ".txt", ".sql", ".json", ".cfg", "Makefile", "run", ".gitignore")
# Folders of one machine, and hosts that packages come from: no file may know them.
MACHINE = re.compile(r"(?<![\w.])/(?:home|root|Users|tmp|work)/\w|[A-Z]:\\\\Users|pythonhosted|pypi\.org|/simple/")


def public_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            value: list[str] = ast.literal_eval(node.value)
            return value
    return None


def defined_names(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {t.id for target in node.targets for t in ast.walk(target) if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found


@pytest.mark.parametrize("name", room_files())
def test_public_names_are_sorted_and_there(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    names = public_names(tree)
    if names is None:
        own = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        assert not own, f"{name} defines names but has no __all__"
        return
    assert len(set(names)) == len(names)
    # Constants, then classes, then functions: the order that ruff gives too.
    assert names == sorted(names, key=lambda n: (not n.isupper(), not n[:1].isupper(), n)), f"__all__ of {name}"
    assert set(names) <= defined_names(tree)


@pytest.mark.parametrize("name", room_files())
def test_a_module_stays_small_and_says_what_it_is(name: str) -> None:
    source = (ROOT / name).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= LONGEST_MODULE_LINES
    if source.strip():
        assert ast.get_docstring(ast.parse(source)), f"{name} has no docstring"


def test_every_package_is_typed() -> None:
    packages = {str(PurePosixPath(n).parent) for n in room_files() if n.endswith("/__init__.py")}
    assert set(ROOMS) <= packages
    assert {n.removesuffix("/py.typed") for n in room_files("py.typed")} >= packages


def test_the_type_checkers_see_every_room() -> None:
    links = ROOT / "typings" / "kvtape"
    for room in ROOMS:
        assert (links / room).resolve() == ROOT / room


@pytest.mark.parametrize("name", [n for n in tracked_files() if n.endswith(TEXT)])
def test_no_file_knows_one_machine(name: str) -> None:
    if name == "tests/repo/test_tidy.py" or (ROOT / name).is_dir():
        return
    text = (ROOT / name).read_text(encoding="utf-8")
    found = MACHINE.search(text)
    assert found is None, f"{name}: {found.group()!r}"


def test_the_search_for_machine_paths_finds_one() -> None:
    assert MACHINE.search("open('/home/" + "someone/x')")
    assert not MACHINE.search("see demo-out/demo.duckdb")
