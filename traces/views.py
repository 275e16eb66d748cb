"""Views inside every log. Names and columns are public interface."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["VIEWS", "View"]


@dataclass(frozen=True, slots=True)
class View:
    """A view: what it answers, its SQL, and an example query for the documentation."""

    name: str
    doc: str
    sql: str
    example: str


VIEWS: tuple[View, ...] = ()
