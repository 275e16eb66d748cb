"""What a command line that is not understood is told: one line, with the nearest thing that would be."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from kvtape.cli.configured import file_of

__all__ = ["usage_line"]


def usage_line(error: Any, root: Any, words: Sequence[str]) -> str:
    """The line for an error of the parser; `root` is the command tree, `words` the line behind the program's name."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else _reached(root, words)
    unknown = getattr(error, "option_name", None) if hasattr(error, "possibilities") else None
    if unknown is not None:
        what = _unknown_option(unknown, context, root)
    else:
        what = " ".join(error.format_message().split()).rstrip(".")
        file = file_of(context, getattr(getattr(error, "param", None), "name", None))
        what = what if file is None else f"{file}: {what}"
    return f"{what} (see {path} --help)"


def _reached(root: Any, words: Sequence[str]) -> str:
    """The command that the words name, for an error that does not know."""
    command, path = root, [root.name]
    for word in words:
        if word in getattr(command, "commands", {}):
            command = command.commands[word]
            path.append(word)
    return " ".join(path)


def _unknown_option(unknown: str, context: Any, root: Any) -> str:
    """`no such option: --polcy; did you mean --policy?`, or which verbs have an option of just that name."""
    what = f"no such option: {_shown(unknown)}"
    verbs = [name for name, command in root.commands.items() if unknown in _options(command)]
    if verbs and context is not None and context.parent is None:
        return f"{what} before the verb; it stands behind {_listed(verbs)}"
    if verbs:
        return f"{what} here; {_listed(verbs)} {'has' if len(verbs) == 1 else 'have'} it"
    near = get_close_matches(unknown, [] if context is None else _options(context.command), n=1)
    return f"{what}; did you mean {near[0]}?" if near else what


def _options(command: Any) -> list[str]:
    names = [name for p in command.params if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)]
    return [*names, "--help", "--debug"]


def _listed(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
