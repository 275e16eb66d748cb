"""Running the blocks of a page in a folder of its own, and writing what comes out back into the page."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from kvtape.cli import main, models
from support.pages import Block, alike, blocks, is_sign, shell_words, steps
from support.repository import ROOT
from support.tiny_gguf import write_tiny

__all__ = ["REAL_MODEL", "PageFailed", "prepare", "refilled", "run_block", "run_command", "write_model_and_text"]

REAL_MODEL = frozenset({"README.md", "docs/capture.md", "docs/tutorial.md"})
"""Pages whose commands without `--model` run on the demo model itself; on others a tiny one stands for it."""

TINY = "M.gguf"
_TAIL = re.compile(r"\s+(?:\| head -n (?P<head>\d+)|> (?P<file>[\w.-]+))$")
_OWN_CODE = re.compile(r"PYTHONPATH=([\w./-]+) ")
RUN = ("console", "sh", "python")


class PageFailed(AssertionError):
    """A block of a page did not do what the page says."""


def write_model_and_text(folder: Path) -> None:
    """A tiny model with random weights, `M.gguf`, and a short text, `book.txt`."""
    write_tiny(folder / TINY, n_ctx=1024)
    shutil.copyfile(ROOT / "examples" / "text" / "harbour.txt", folder / "book.txt")


def prepare(folder: Path) -> None:
    """What pages take for granted: the samples, a tiny model, a text, a chat, a recorded log and its costs."""
    for name in ("examples", "cli"):
        (folder / name).symlink_to(ROOT / name, target_is_directory=True)
    write_model_and_text(folder)
    (folder / "model.gguf").symlink_to(TINY)
    (folder / "chat.jsonl").symlink_to(ROOT / "examples" / "chat.jsonl")
    run_command(
        f"kvtape record --text book.txt --policy stream:sink=4,recent=92 --n-ctx 128 --decode 8 --content "
        f"--score-all --model {TINY} --log recorded.duckdb",
        folder,
    )
    run_command("kvtape calibrate recorded.duckdb --out costs.json", folder)
    (folder / "demo-out").mkdir()
    for path in folder.glob("recorded.duckdb*"):
        shutil.copy(path, folder / "demo-out" / path.name.replace("recorded", "demo"))
    shutil.copy(folder / "kvtape.key", folder / "demo-out")


class _Told:
    """What is written to two streams, in the order in which it comes."""

    def __init__(self) -> None:
        self.parts: list[tuple[bool, str]] = []
        self.out, self.err = _Stream(self.parts, out=True), _Stream(self.parts, out=False)

    def said(self) -> str:
        """What came on stdout."""
        return "".join(part for of_out, part in self.parts if of_out)

    def text(self, head: int | None = None) -> str:
        """Both together; of stdout the first `head` lines."""
        left = len("".join(self.said().splitlines(keepends=True)[:head]))
        kept = []
        for of_out, part in self.parts:
            kept.append(part[:left] if of_out else part)
            left -= len(kept[-1]) if of_out else 0
        return "".join(kept)


class _Stream(io.TextIOBase):
    def __init__(self, parts: list[tuple[bool, str]], *, out: bool) -> None:
        self._parts, self._out = parts, out

    def write(self, text: str) -> int:
        self._parts.append((self._out, text))
        return len(text)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[_Told]:
    """In `folder`, with everything that is written caught."""
    before, told = Path.cwd(), _Told()
    argv, path = sys.argv, list(sys.path)
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(told.out), contextlib.redirect_stderr(told.err):
            yield told
    finally:
        os.chdir(before)
        sys.argv, sys.path[:] = argv, path


def _here(words: list[str], folder: Path, own_code: Path | None = None) -> tuple[int, _Told]:
    """A command of kvtape, or a sample, in this process; modules of the reader's are in `own_code`."""
    with _inside(folder) as told:
        if own_code is not None:
            sys.path.insert(0, str(own_code))
        if words[0] == "kvtape":
            return main(words[1:]), told
        sys.argv = words[1:]
        sys.path.insert(0, str((folder / words[1]).parent))
        try:
            runpy.run_path(words[1], run_name="__main__")
        except SystemExit as end:
            return (end.code if isinstance(end.code, int) else int(end.code is not None)), told
        return 0, told


def _words(command: str) -> list[str] | None:
    """The words of a command that needs no shell; None for one that does."""
    words = shell_words(command.replace("\\\n", " "))
    if words is None or "$" in command or any(map(is_sign, words)):
        return None
    ours = words[0] == "kvtape" or (words[0] == "python" and words[1].endswith(".py"))
    return words if ours else None


def run_command(command: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of a command line. `| head -n N` and `> FILE` behind a command are done here too."""
    tail, own = _TAIL.search(command), _OWN_CODE.match(command)
    words = _words(command[own.end() if own else 0 : tail.start() if tail else None])
    if words is not None:
        code, told = _here(words, folder, folder / own[1] if own else None)
        if tail is not None and tail["file"]:
            (folder / tail["file"]).write_text(told.said(), encoding="utf-8")
            return code, told.text(0)
        return code, told.text(int(tail["head"]) if tail else None)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        # Where CI is set, pytest does not shorten its lines; the reader of a page has it not.
        env={k: v for k, v in os.environ.items() if k != "CI"}
        | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def _expect(command: str, came: int, code: int, out: str) -> None:
    if came != code:
        raise PageFailed(f"`{command}` gave exit code {came}, not {code}:\n{out}")


def run_block(block: Block, folder: Path) -> str:
    """Run a block; its text as it would be now, with fresh outputs where those shown no longer hold.

    Raises PageFailed where a command has another exit code than the page says; what a program raises comes through.
    """
    if block.language == "python":
        with _inside(folder):
            exec(compile(block.text, "page", "exec"), {"__name__": "__main__"})
        return block.text
    if block.language == "sh":
        for command in block.text.replace("\\\n", " ").splitlines():
            if command.strip() and not command.startswith("#"):
                came, out = run_command(command, folder)
                _expect(command, came, 0, out)
        return block.text
    fresh = []
    for step in steps(block.text):
        came, out = run_command(step.command, folder)
        _expect(step.command, came, step.code, out)
        same = alike(step.output, out.rstrip("\n"), numbers="like" in block.words)
        shown = step.output if same else "\n".join(line.rstrip() for line in out.rstrip("\n").splitlines())
        fresh.append(f"$ {step.command}\n" + (f"{shown}\n" if shown else ""))
    return "".join(fresh)


def _is_run(block: Block, *, slow: bool) -> bool:
    return block.language in RUN and block.why_not_run in ((None, "slow") if slow else (None,))


def refilled(name: str, folder: Path, *, slow: bool = False) -> str:
    """The page `name` (from the root of the repository) with its outputs as they are now; with `slow`, of all blocks.

    Raises PageFailed with page and line.
    """
    text = (ROOT / name).read_text(encoding="utf-8")
    lines, moved = text.splitlines(keepends=True), 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, KVTAPE_PROGRESS="none"))
        if name not in REAL_MODEL:
            stack.enter_context(mock.patch.object(models, "find_demo_model", return_value=folder / TINY))
        for block in (b for b in blocks(text) if _is_run(b, slow=slow)):
            try:
                fresh = run_block(block, folder).splitlines(keepends=True)
            except Exception as error:
                raise PageFailed(f"{name}, line {block.line}: {error}") from error
            first, n = block.line + moved, len(block.text.splitlines())
            lines[first : first + n] = fresh
            moved += len(fresh) - n
    return "".join(lines)
