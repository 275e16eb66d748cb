"""The command line. `main` is the console script; nothing heavy is imported before a verb runs."""

from __future__ import annotations

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code (see `kvtape.cli.errors`). Never raises but for a bug under `--debug`."""
    import sys

    try:
        from kvtape.cli.app import run

        return run(argv)
    except KeyboardInterrupt:  # while the command was being imported, or its error was being told
        print("kvtape: interrupted", file=sys.stderr)
        return 130
