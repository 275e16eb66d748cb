"""`View`: a question that every log answers, as SQL."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ROW", "View"]


@dataclass(frozen=True, slots=True)
class View:
    """A view: what it answers, its columns, its SQL, and an example query for the documentation."""

    name: str
    doc: str
    columns: tuple[tuple[str, str], ...]
    sql: str
    example: str


ROW = (("run_id", "the run"), ("session_id", "the session"))
"""Columns with which a view of sessions begins."""
