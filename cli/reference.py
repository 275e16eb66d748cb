"""The reference of the commands, from the commands: `python -m kvtape.cli.reference > docs/cli.md`."""

from __future__ import annotations

import typer

from kvtape.cli.app import app

__all__ = ["reference"]

_WIDTH = 100

_HEAD = """\
# Commands

This page is written by `python -m kvtape.cli.reference`; a test keeps it true.

Results go to stdout, progress and errors to stderr. With `--json` a command prints one JSON object with sorted keys;
each has `schema`, `kvtape_version`, `digest` and `digest_kind`:

| digest_kind | the digest speaks of |
|---|---|
| `logical` | what happened in the run, without times and run names: the same run recorded again gives the same |
| `chain` | every byte of the log |
| `report` | the output itself, but for the place of a log that it wrote |

Without `--json` a terminal gets tables, a pipe gets tab-separated lines. Colours are off with `NO_COLOR`. An error is
one line that says what to do; `--debug`, anywhere on the line, adds the traceback.

Long work shows on stderr how far it is, how fast, and how long it still takes: a bar on a terminal, elsewhere (and with
`TERM=dumb`) a line after five seconds and then every ten. `KVTAPE_PROGRESS` set to `bar`, `lines` or `none` says
otherwise.

`--print-config` prints every option of a verb as JSON and runs nothing; `--config F` reads that file back, so flags and
file say the same. What stands on the line goes before the file; a flag without an opposite (`--content`) that the
file has set stays set. A key that is not known is refused with the nearest one.

`kvtape --install-completion` lets bash, zsh or fish complete verbs, options, policies part by part, engines, formats
and the sessions of a log.

| exit code | meaning |
|---|---|
| 0 | fine |
| 1 | findings: a divergence, a log that fails verification, logs that differ, a session that ended fatally |
| 2 | usage or bad input: option, spec, missing file, foreign file, newer schema, a log of another model |
| 3 | environment: an engine or an extra is missing, the disk is full |
| 4 | an unreadable or torn log |
| 130 | interrupted |
"""


def reference() -> str:
    """The page: the head, then the help of each command as a terminal of 100 columns shows it."""
    group = typer.main.get_command(app)
    root = group.make_context("kvtape", [], resilient_parsing=True, terminal_width=_WIDTH)
    parts = [_HEAD, _block("kvtape", group.get_help(root))]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        context = command.make_context(name, [], parent=root, resilient_parsing=True)
        parts.append(_block(f"kvtape {name}", command.get_help(context)))
    return "\n".join(parts)


def _block(title: str, text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return f"## {title}\n\n```text\n{lines}\n```\n"


if __name__ == "__main__":
    print(reference(), end="")
