"""docs/contributing.md, followed to the letter in a copy of the sources: files, changes, commands, outputs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

from support.page_runs import run_command, write_model_and_text
from support.pages import Block, alike, blocks, steps
from support.repository import ROOT, copy_rooms, copy_tracked

__all__ = ["PAGE", "PARTS", "followed", "part_of"]

PAGE = ROOT / "docs" / "contributing.md"
PARTS = ("policy", "backend", "importer")
"""Each begins at its marker and ends at the next one."""
QUICK = {"KVTAPE_PROGRESS": "none", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "kvtape.testing.plugin"}
"""Plugins of other packages take longer to load than the tests of the page to run."""

BESIDE = (
    "docs/importing.md",
    "tests/support/__init__.py",
    "tests/support/imports.py",
    "tests/support/repository.py",
    "tests/traces/importers/test_page.py",
)


def part_of(name: str) -> list[Block]:
    """The blocks of a part, which its marker begins and the next one ends."""
    text = PAGE.read_text(encoding="utf-8")
    return blocks(re.split(r"^<!-- \w+ -->$", text.partition(f"<!-- {name} -->")[2], flags=re.MULTILINE)[0])


def _copied(target: Path, *, rooms: bool) -> Path:
    """What pages take for granted, and the sources where the page changes them."""
    here = target / "kvtape"
    if rooms:
        copy_rooms(target)
    copy_tracked(here, BESIDE)
    shutil.copytree(ROOT / "examples", here / "examples")
    write_model_and_text(here)
    (target / "bin").mkdir()
    command = target / "bin" / "kvtape"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvtape.cli "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return here


def _run(command: str, here: Path) -> tuple[int, str]:
    """In a process, where the copied sources come before the installed ones."""
    path = f"{here.parent / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    python = os.pathsep.join(map(str, (here.parent, here, here / "tests")))
    environment = {**os.environ, **QUICK, "PATH": path, "PYTHONPATH": python}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=here,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.rstrip("\n")


def _follow(block: Block, here: Path) -> str:
    """Do what a block says; its text as it should be."""
    if block.language == "diff":
        done = subprocess.run(
            ["git", "apply", "--verbose", "-"], input=block.text, cwd=here, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return block.text
    if block.language != "console":
        path = here / block.words[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
        return block.text
    fresh = []
    for step in steps(block.text):
        changed = (here / "traces" / "importers" / "tides.py").exists()
        code, out = _run(step.command, here) if changed else run_command(step.command, here)
        out = out.rstrip("\n")
        assert code == step.code, f"{step.command}: exit code {code}\n{out}"
        same = alike(step.output, out, numbers="like" in block.words)
        shown = step.output if same else out
        fresh.append(f"$ {step.command}\n" + (f"{shown}\n" if shown else ""))
    return "".join(fresh)


def followed(name: str, target: Path) -> tuple[list[Block], list[str]]:
    """Do what a part of the page says, in a copy below `target`: its blocks, and their texts as they should be.

    Raises AssertionError where a change does not apply or a command has another exit code.
    """
    found = part_of(name)
    here = _copied(target, rooms=any(block.language == "diff" for block in found))
    with mock.patch.dict(os.environ, QUICK):
        return found, [_follow(block, here) for block in found]
