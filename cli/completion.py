"""Completing a command line in a shell: verbs, options, and the names that options take.

The shell hands over the words up to the cursor; nothing is parsed or converted, so an answer takes no longer than
`--help`. An empty answer leaves the word to the shell, which knows files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtape.cli.completion_values import values

__all__ = ["SHELLS", "Candidate", "answer", "candidates"]

Candidate = tuple[str, str]
"""A whole word that the last one may become, and what it is."""

_OPEN_ENDS = (":", "=", ",", "/")
"""A word that ends so goes on: no space behind it."""


@dataclass(slots=True)
class _Line:
    """The words before the last, understood: the command they reach, its name, its arguments, what is open."""

    command: Any
    verb: str = ""
    arguments: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    waiting: str | None = None
    """The option whose value comes next."""
    only_arguments: bool = False
    """`--` was there."""


def candidates(root: Any, words: Sequence[str]) -> list[Candidate]:
    """What the last of `words`, those behind the program's name, can become; in the order of the help."""
    *before, last = words or [""]
    line = _read(root, before)
    option, equals, begun = last.partition("=")
    if line.waiting is not None:
        return [(value, "") for value in values(line.verb, line.waiting, last, line.arguments)]
    if equals and not line.only_arguments and option in _options(line.command):
        return [(f"{option}={value}", "") for value in values(line.verb, option, begun, line.arguments)]
    if last.startswith("-") and not line.only_arguments:
        found = {o: p for o, p in _options(line.command).items() if o.startswith(last)}
        return [(o, p.help or "") for o, p in found.items() if o not in line.given or getattr(p, "multiple", False)]
    commands: Mapping[str, Any] = getattr(line.command, "commands", {})
    return [(name, c.get_short_help_str(60)) for name, c in commands.items() if name.startswith(last)]


def _read(root: Any, words: Sequence[str]) -> _Line:
    line = _Line(root)
    for word in words:
        commands = getattr(line.command, "commands", {})
        option = word.partition("=")[0]
        if line.waiting is not None:
            line.waiting = None
        elif word == "--":
            line.only_arguments = True
        elif word.startswith("-") and len(word) > 1 and not line.only_arguments:
            known = _options(line.command).get(option)
            line.given.add(option)
            if known is not None and "=" not in word and not _is_flag(known):
                line.waiting = option
        elif word in commands:
            line = _Line(commands[word], verb=f"{line.verb} {word}".lstrip())
        else:
            line.arguments.append(word)
    return line


def _options(command: Any) -> dict[str, Any]:
    own = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    return {name: p for p in own for name in p.opts} | {"--help": _HELP}


@dataclass(frozen=True, slots=True)
class _Help:
    help: str = "Show this message and exit."
    is_flag: bool = True
    multiple: bool = False


_HELP = _Help()


def _is_flag(option: Any) -> bool:
    return bool(getattr(option, "is_flag", False))


def answer(shell: str, root: Any, words: Sequence[str]) -> str:
    """What `shell` reads. Raises KeyError for a shell that is not in SHELLS."""
    form = SHELLS[shell]
    # bash cuts words at these two, and hands over what is between as words.
    joined = _joined(words) if shell == "bash" else list(words)
    return "".join(f"{form(word, about, joined[-1] if joined else '')}\n" for word, about in candidates(root, joined))


def _joined(words: Sequence[str]) -> list[str]:
    found: list[str] = []
    glued = False
    for word in words:
        if word in (":", "=") or glued:
            found = [*found[:-1], (found[-1] if found else "") + word]
        else:
            found.append(word)
        glued = word in (":", "=")
    return found


def _for_bash(word: str, about: str, begun: str) -> str:
    """bash replaces what stands behind the last `:` or `=` only."""
    cut = max(begun.rfind(":"), begun.rfind("=")) + 1
    return word[cut:] + ("" if word.endswith(_OPEN_ENDS) else " ")


def _for_zsh(word: str, about: str, begun: str) -> str:
    return f"{word}\t{_line(about)}"


def _for_fish(word: str, about: str, begun: str) -> str:
    return f"{word}\t{_line(about)}" if about else word


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


SHELLS: dict[str, Callable[[str, str, str], str]] = {"bash": _for_bash, "fish": _for_fish, "zsh": _for_zsh}
"""How a candidate is written for each shell, as the scripts in `completion_scripts` read it."""
