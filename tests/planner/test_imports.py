"""The lowest floor stays light: importing all of it loads no engine, no database, no web of validators."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pkgutil import iter_modules

import pytest

HEAVY = frozenset(
    {"duckdb", "gguf", "llama_cpp", "openvino", "openvino_genai", "pyarrow", "pydantic", "rich", "simpy", "typer"}
)

SCRIPT = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def modules_of(room: str) -> list[str]:
    package = import_module(room)
    return [room, *(f"{room}.{m.name}" for m in iter_modules(package.__path__))]


def loaded_by(names: list[str]) -> set[str]:
    """Top-level modules in a fresh interpreter after importing `names`."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(names)], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("room", "some"),
    [
        ("kvtape.planner", {"kvtape.planner.plan", "kvtape.planner.residency", "kvtape.planner.specs"}),
        ("kvtape.capacity", {"kvtape.capacity.model"}),
    ],
)
def test_importing_a_lowest_room_loads_nothing_heavy(room: str, some: set[str]) -> None:
    names = modules_of(room)
    assert some <= set(names), "the room was found"
    loaded = loaded_by(names)
    assert "kvtape" in loaded
    assert not loaded & HEAVY


def test_the_check_sees_what_is_loaded() -> None:
    assert loaded_by(["pydantic"]) & HEAVY == {"pydantic"}
