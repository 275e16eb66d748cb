"""Code blocks of the pages: where each stands, what its fence says, and the commands and outputs of a console.

The first word of a fence is its language, the words behind it say how the block is held against reality:

    console          commands behind `$ `, each with its output, which is what comes out, digests aside
    console like     the same words, tables and columns come out; numbers may differ
    sh               commands that succeed; their output is not shown
    sh, python WHY   not run, for one of the reasons `NOT_RUN`; commands are parsed
    python           a program that runs
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.token import Token

from support.repository import tracked_files

__all__ = [
    "NOT_RUN",
    "PAGES",
    "RUN_ELSEWHERE",
    "Block",
    "Step",
    "alike",
    "blocks",
    "commands",
    "is_sign",
    "parsed",
    "rendered",
    "shell_words",
    "steps",
]

NOT_RUN = {
    "slow": "takes some seconds: `make docs` runs it, the suite does not",
    "yours": "needs a file or a model of the reader's own",
    "server": "needs a server beside it; pages of servers have tests of their own",
    "minutes": "takes minutes on the demo model",
    "setup": "installs or builds",
}
"""Why a block is not run, by the word on its fence."""

RUN_ELSEWHERE = {
    "docs/cli.md": "tests/repo/test_docs.py",
    "docs/contributing.md": "tests/docs/test_contributing.py",
    "docs/example.md": "tests/cli/test_demo.py",
    "docs/log-schema.md": "tests/traces/test_document.py",
    "docs/serve.md": "tests/repo/test_serve_page.py",
    "docs/sql.md": "tests/traces/test_sql_page.py",
}
"""Pages whose blocks another test holds, and that test."""

PAGES = tuple(n for n in tracked_files() if n.startswith("docs/") and n.endswith(".md") and n not in RUN_ELSEWHERE)

_PARSER = MarkdownIt("commonmark").enable("table")
_DIGEST = re.compile(r"\b(digest) [0-9a-f]{64}\b")
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,.]*(?:e[-+]?\d+)?")
_HEX = re.compile(r"\b[0-9a-f]{8,}\b")
_SIGNS = "|&;<>"
_EXIT = re.compile(r"#\s*exit code (\d+)\s*$")


@dataclass(frozen=True, slots=True)
class Block:
    """One code block: `line` counts from 1 and is that of the fence; `words` are what the fence says."""

    line: int
    words: tuple[str, ...]
    text: str
    fenced: bool

    @property
    def language(self) -> str:
        return self.words[0] if self.words else ""

    @property
    def why_not_run(self) -> str | None:
        """The word that says why it is not run; None for a block that is."""
        return next((w for w in self.words[1:] if w in NOT_RUN), None)


@dataclass(frozen=True, slots=True)
class Step:
    """A command of a console, the exit code it must have, and the output that the page shows."""

    command: str
    output: str
    code: int


@cache
def parsed(page: str) -> tuple[Token, ...]:
    """What CommonMark reads in the text of a page. Read once: several tests ask, and a long page takes a while."""
    return tuple(_PARSER.parse(page))


def rendered(page: str) -> str:
    """The text of a page as HTML, as CommonMark reads it."""
    html: str = _PARSER.renderer.render(parsed(page), _PARSER.options, {})
    return html


def blocks(page: str) -> list[Block]:
    """All code blocks of the text of a page, in order, indented ones too."""
    found = []
    for token in parsed(page):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            words = tuple(token.info.split())
            found.append(Block(token.map[0] + 1, words, token.content, token.type == "fence"))
    return found


def steps(console: str) -> list[Step]:
    """The commands of a console with their outputs. Raises ValueError where it does not begin with a command."""
    if not console.startswith("$ "):
        raise ValueError(f"a console begins with a command: {console.splitlines()[0]}")
    found: list[Step] = []
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        last = next(i for i, line in enumerate(lines) if not line.endswith("\\"))
        command = "\n".join(lines[: last + 1])
        code = _EXIT.search(command)
        found.append(Step(command, "\n".join(lines[last + 1 :]).rstrip("\n"), int(code.group(1)) if code else 0))
    return found


def commands(text: str) -> Iterator[list[str]]:
    """The words of each kvtape command in a shell text, without `kvtape`, up to a pipe, a redirection or `&`."""
    lines = iter(text.replace("\\\n", " ").splitlines())
    for line in lines:
        line = line.removeprefix("$ ")
        if not line.startswith("kvtape "):
            continue
        while (words := shell_words(line)) is None:
            line += " " + next(lines)
        stop = next((i for i, w in enumerate(words) if is_sign(w)), len(words))
        yield words[1:stop]


def shell_words(line: str) -> list[str] | None:
    """The words and signs of a line of shell; None where a quotation goes on in the next line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=_SIGNS)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return None


def is_sign(word: str) -> bool:
    """Whether it is a pipe, a redirection or what else stands between commands."""
    return word != "" and set(word) <= set(_SIGNS)


def alike(shown: str, came: str, *, numbers: bool) -> bool:
    """Whether an output is the one shown: to the character but for digests, or but for all `numbers` too."""
    return _core(shown, numbers) == _core(came, numbers)


def _core(text: str, numbers: bool) -> list[str]:
    text = _DIGEST.sub(r"\1 #", text)
    if numbers:
        text = _HEX.sub("#", _NUMBER.sub("#", text))
        # A mark of the front, and columns that are padded, follow the numbers.
        return [re.sub(r"[ \t]+", " ", line.removeprefix("*")).strip() for line in text.splitlines()]
    return [line.rstrip() for line in text.splitlines()]
