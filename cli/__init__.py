"""The command line. `main` is the console script; nothing heavy is imported before a verb runs."""

from __future__ import annotations

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code (see `kvtape.cli.errors`). Never raises but for a bug under `--debug`."""
    from kvtape.cli.app import run

    return run(argv)
