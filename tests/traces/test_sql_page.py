"""docs/sql.md: every answer is the one that comes out; a log is read without kvtape; the notebook runs."""

from __future__ import annotations

import inspect
import runpy
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.repository import ROOT

PAGE = ROOT / "docs" / "sql.md"
WRITER = runpy.run_path(str(ROOT / "docs" / "write_sql.py"))


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made: dict[str, Path] = WRITER["make_logs"](tmp_path_factory.mktemp("logs"))
    return made


def test_every_answer_is_what_comes_out(logs: dict[str, Path]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(WRITER["QUESTION"].findall(text)) >= 20
    assert text.count("```sql") == len(WRITER["QUESTION"].findall(text))
    assert WRITER["answered"](text, logs) == text, "run: python docs/write_sql.py"


def test_an_old_answer_would_be_seen(logs: dict[str, Path]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    edited = text.replace("24520", "24521")
    assert edited != text
    assert WRITER["answered"](edited, logs) == text


NO_KVTAPE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "kvtape":
            raise ImportError("kvtape is not installed here")

sys.meta_path.insert(0, Blocked())
"""


def test_a_log_is_read_without_kvtape(logs: dict[str, Path]) -> None:
    """The lines of the page, in a process in which kvtape cannot be imported."""
    (code,) = [part.split("```")[0] for part in PAGE.read_text(encoding="utf-8").split("```python\n")[1:]]
    run = subprocess.run(
        [sys.executable, "-c", NO_KVTAPE + code], cwd=logs["toy"].parent, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "pinned" in run.stdout
    blocked = subprocess.run(
        [sys.executable, "-c", NO_KVTAPE + "import kvtape.traces"], capture_output=True, check=False
    )
    assert blocked.returncode == 1


class _Anything:
    """Stands for marimo's page elements."""

    value: Any = None

    def __init__(self, *args: Any, **options: Any) -> None:
        self.value = options.get("value")
        self.args = args


class _App:
    """Runs cells when what they take is there, as marimo does."""

    def __init__(self, **_: Any) -> None:
        self.cells: list[Callable[..., Any]] = []

    def cell(self, made: Callable[..., Any]) -> Callable[..., Any]:
        self.cells.append(made)
        return made

    def results(self) -> dict[str, Any]:
        known: dict[str, Any] = {}
        waiting = list(self.cells)
        while waiting:
            ready = [c for c in waiting if set(inspect.signature(c).parameters) <= known.keys()]
            assert ready, "a cell takes what no cell gives"
            for cell in ready:
                waiting.remove(cell)
                names = [n.strip(" ,()\n") for n in inspect.getsource(cell).rsplit("return ", 1)[1].split(",")]
                given = cell(**{n: known[n] for n in inspect.signature(cell).parameters})
                known.update(zip([n for n in names if n], given, strict=True))
        return known


@pytest.mark.parametrize("name", ["toy", "requests", "server"])
def test_the_cells_of_the_notebook_run(logs: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = types.ModuleType("marimo")
    ui = types.SimpleNamespace(dropdown=_Anything, table=_Anything)
    for attribute, value in {"App": _App, "ui": ui, "md": _Anything, "vstack": _Anything, "Html": _Anything}.items():
        setattr(stand_in, attribute, value)
    monkeypatch.setitem(sys.modules, "marimo", stand_in)
    monkeypatch.setattr(sys, "argv", ["notebook.py", str(logs[name])])
    found = runpy.run_path(str(ROOT / "examples" / "notebook" / "notebook.py"))["app"].results()
    try:
        query = f"FROM turns WHERE session_id = '{found['session'].value}'"
        assert len(found["turns_rows"]) == len(found["log"].sql(query).fetchall()) > 0
        assert found["picture"].count("<polyline") == 2
        assert found["lengths"]
    finally:
        found["log"].close()
