"""The proofs that hold here: those that come with kvtape, and the user's own in one JSON document.

A document is written whole under a lock, so that two writers lose nothing of each other and a reader finds the old
one or the new one. A damaged one is an error that names it, never an empty one: an absent proof must not hide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from kvtape.backends.errors import UsageError
from kvtape.backends.proofs.rows import Kind, ProofRow
from kvtape.backends.user_documents import Document, document_text, parse_document
from kvtape.backends.user_files import alone, data_file, write_whole

__all__ = ["PROOFS_VARIABLE", "Proofs", "add_rows", "open_proofs", "proofs_path", "read_rows", "shipped_rows"]

PROOFS_VARIABLE: Final = "KVTAPE_PROOFS"
_SCHEMA: Final = "kvtape.proofs/1"


class _Document(Document):
    rows: tuple[ProofRow, ...]


@dataclass(frozen=True, slots=True)
class Proofs:
    """Rows, oldest first where they speak of the same thing."""

    rows: tuple[ProofRow, ...] = ()

    def newest(
        self, kind: Kind, *, fingerprint: str, engine: str, engine_version: str, machine: str, subject: str
    ) -> ProofRow | None:
        """The newest row on exactly this; of rows of one day the one that was written last. None without one."""
        place = (kind, fingerprint, engine, engine_version, machine, subject)
        found = [row for row in self.rows if row.place == place]
        return max(enumerate(found), key=lambda at: (at[1].day, at[0]))[1] if found else None

    def current(self, kind: Kind) -> tuple[ProofRow, ...]:
        """The newest row of each subject, in the order of their places."""
        best: dict[tuple[str, ...], ProofRow] = {}
        for row in self.rows:
            if row.kind == kind and (row.place not in best or best[row.place].day <= row.day):
                best[row.place] = row
        return tuple(best[place] for place in sorted(best))


def proofs_path() -> Path:
    """The user's document: what KVTAPE_PROOFS names, else `kvtape/proofs.json` in the user's data folder."""
    return data_file("proofs.json", PROOFS_VARIABLE)


def open_proofs(path: Path | None = None) -> Proofs:
    """The shipped rows and, after them, those of the user's document at `path` (`proofs_path()`), if there is one.

    Raises UsageError for a document that is damaged.
    """
    own = proofs_path() if path is None else path
    return Proofs((*shipped_rows(), *(read_rows(own) if own.exists() else ())))


def read_rows(path: Path) -> tuple[ProofRow, ...]:
    """Rows of a document. Raises UsageError, which names the file, for one that is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise UsageError(f"{path}: the proofs cannot be read ({err}); restore the file or remove it") from None
    return _parse(text, str(path))


def add_rows(rows: Iterable[ProofRow], path: Path | None = None) -> Path:
    """Write rows behind those of the document, durably; returns its path.

    A row that is there word for word is not written again. Raises UsageError for a damaged document, which stays as
    it is, and OSError.
    """
    new = tuple(rows)
    own = proofs_path() if path is None else path
    with alone(own):
        there = read_rows(own) if own.exists() else ()
        merged = list(there)
        for row in new:
            if row not in merged:
                merged.append(row)
        if len(merged) != len(there) or not own.exists():
            write_whole(own, document(merged))
    return own


def document(rows: Sequence[ProofRow]) -> str:
    """The text of a document: one row a line, so that a difference of two can be read."""
    return document_text(_SCHEMA, "rows", rows)


@cache
def shipped_rows() -> tuple[ProofRow, ...]:
    """The rows inside the package: the demo model, on the machine class where they were measured."""
    resource = files("kvtape.backends.proofs") / "shipped.json"
    return _parse(resource.read_text(encoding="utf-8"), "shipped.json of kvtape")


def _parse(text: str, where: str) -> tuple[ProofRow, ...]:
    return parse_document(_Document, text, schema=_SCHEMA, where=where, what="document of proofs").rows
