"""What a command reads that takes both: a log, or somebody's trace file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtape.traces.importers.notes import Notes, Warned

__all__ = ["is_log", "noted", "require_log_alone", "tell_warnings"]


def is_log(source: str) -> bool:
    from kvtape.cli.files import is_database

    return source != "-" and (source.startswith("parquet://") or Path(source).is_dir() or is_database(Path(source)))


def require_log_alone(source: str, format_name: str, block_tokens: int | None) -> None:
    """Raises CurveError for options of a trace beside a log."""
    from kvtape.sim.blocks.errors import CurveError

    if format_name != "auto" or block_tokens is not None:
        raise CurveError(f"{source}: a log; --format and --block-tokens are for traces")


@contextmanager
def noted() -> Iterator[Notes]:
    """What a reader has to say of a trace goes to people when it has read it."""
    from kvtape.traces.importers.notes import Notes

    notes = Notes()
    yield notes
    tell_warnings(notes.warnings())


def tell_warnings(warnings: Iterable[Warned]) -> None:
    """One line on stderr for each kind."""
    from kvtape.cli.output import note

    for warned in warnings:
        note(f"kvtape: {warned.file}, line {warned.line} ({warned.count} such): {warned.text}")
