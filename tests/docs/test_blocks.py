"""What the pages show is run: commands, outputs, programs. The few blocks that are not say why, and are parsed."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.exceptions import TyperException

from kvtape.cli.app import app
from support.page_runs import PageFailed, refilled, run_block
from support.pages import NOT_RUN, PAGES, RUN_ELSEWHERE, Block, alike, blocks, commands, steps
from support.repository import ROOT, tracked_files

SHOWN = ("console", "sh", "bash", "python")
PICTURES = ("json", "sql", "text")
"""Languages that nobody runs: samples of data, drawings, grammars."""


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_every_block_does_what_the_page_shows(name: str, prepared: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(prepared, tmp_path / "here", symlinks=True)
    assert refilled(name, folder) == read(name), "if that is right, write it anew: python docs/write_outputs.py " + name


@pytest.mark.parametrize("name", PAGES)
def test_every_block_says_what_it_is(name: str) -> None:
    for block in blocks(read(name)):
        where = f"{name}, line {block.line}"
        assert block.fenced, f"{where}: fence it and name its language"
        assert block.language in SHOWN + PICTURES, where
        assert set(block.words[1:]) <= {"like", *NOT_RUN}, where
        if block.language in PICTURES:
            assert not list(commands(block.text)), f"{where}: commands belong in a console or sh block"
            assert len(block.words) == 1, where


@cache
def command_line() -> Any:
    return typer.main.get_command(app)


def parse(words: list[str]) -> None:
    """Take the words of a command apart as the command line does, without doing anything. Raises TyperException."""
    command = command_line().commands[words[0]]
    if hasattr(command, "commands"):
        command, words = command.commands[words[1]], words[1:]
    command.make_context(words[0], list(words[1:]), parent=None)


@pytest.mark.parametrize("name", [*PAGES, *RUN_ELSEWHERE, "README.md"])
def test_commands_that_are_not_run_are_parsed(name: str) -> None:
    for block in blocks(read(name)):
        for words in commands(block.text):
            try:
                parse(words)
            except (KeyError, TyperException) as error:
                raise AssertionError(f"{name}, line {block.line}: kvtape {' '.join(words)}: {error!r}") from error


def test_a_command_that_is_gone_would_be_seen() -> None:
    parse(["curve", "L", "--policy", "lru"])
    with pytest.raises(TyperException):
        parse(["curve", "L", "--police", "lru"])
    with pytest.raises(KeyError):
        parse(["curves", "L"])


@pytest.mark.parametrize(("page", "test"), RUN_ELSEWHERE.items())
def test_pages_held_by_another_test_are_named_there(page: str, test: str) -> None:
    assert page in tracked_files()
    assert Path(page).name in read(test) or Path(page).name in read(f"tests/support/{Path(page).stem}.py")


def test_few_blocks_are_not_run() -> None:
    of_all = [b for name in PAGES for b in blocks(read(name)) if b.language in SHOWN]
    assert len([b for b in of_all if b.why_not_run]) < len(of_all) / 2


class TestOfTheTestItself:
    """A page that says something else than what comes out is found."""

    def block(self, text: str, *words: str) -> Block:
        return Block(1, ("console", *words), text, fenced=True)

    def test_an_output_that_is_another_is_written_anew(self, tmp_path: Path) -> None:
        fresh = run_block(self.block("$ echo one\ntwo\n$ echo three\nthree\n"), tmp_path)
        assert fresh == "$ echo one\none\n$ echo three\nthree\n"

    def test_numbers_may_differ_where_the_fence_says_so(self, tmp_path: Path) -> None:
        shown = "$ echo '* 17 ms  of 3.5e-06'\n41 ms of 7\n"
        assert run_block(self.block(shown, "like"), tmp_path) == shown
        assert run_block(self.block(shown), tmp_path) != shown
        other = shown.replace("41 ms", "41 s")
        assert run_block(self.block(other, "like"), tmp_path) != other

    def test_an_exit_code_that_is_another_fails(self, tmp_path: Path) -> None:
        with pytest.raises(PageFailed, match="exit code 2, not 0"):
            run_block(self.block("$ kvtape verify nothing.duckdb\n"), tmp_path)
        run_block(self.block("$ exit 3  # exit code 3\n"), tmp_path)
        with pytest.raises(PageFailed, match="exit code 0, not 3"):
            run_block(self.block("$ true  # exit code 3\n"), tmp_path)

    def test_a_program_that_raises_fails(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError):
            run_block(Block(1, ("python",), "1 / 0\n", fenced=True), tmp_path)

    def test_digests_are_no_difference(self) -> None:
        assert alike(f"chain digest {'a' * 64}", f"chain digest {'b' * 64}", numbers=False)
        assert not alike(f"chain digest {'a' * 64}", f"logical digest {'a' * 64}", numbers=False)

    def test_commands_end_where_the_shell_says(self) -> None:
        text = 'kvtape sql L "SELECT 1 | 2" > out.txt\nkvtape serve --port 1 &\n$ kvtape show \\\n  L | head\n'
        assert list(commands(text)) == [["sql", "L", "SELECT 1 | 2"], ["serve", "--port", "1"], ["show", "L"]]
        assert [s.command for s in steps("$ a \\\n  b\nout\n$ c\n")] == ["a \\\n  b", "c"]
