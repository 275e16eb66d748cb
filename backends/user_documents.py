"""A list of the user's own as a JSON document: what is read is whole and of this version, or an error that names it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvtape.backends.errors import UsageError

__all__ = ["Document", "document_text", "parse_document"]


class Document(BaseModel):
    """What every such document says; its rows stand in a field of their own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_name: str = Field(alias="schema")


D = TypeVar("D", bound=Document)


def parse_document(kind: type[D], text: str, *, schema: str, where: str, what: str) -> D:
    """Raises UsageError, which names `where`, for a text that is no `what`, or is one of another schema."""
    try:
        found = kind.model_validate_json(text)
    except ValidationError as err:
        first = err.errors()[0]
        at = ".".join(str(part) for part in first["loc"]) or "the document"
        raise UsageError(f"{where}: no {what} ({at}: {first['msg']}); restore the file or remove it") from None
    if found.schema_name != schema:
        raise UsageError(f"{where}: schema {found.schema_name!r}, this kvtape reads {schema}; upgrade kvtape")
    return found


def document_text(schema: str, field: str, rows: Iterable[BaseModel]) -> str:
    """One row a line, so that a difference of two documents can be read; defaults of a row are left out."""
    lines = ",\n".join(
        json.dumps(row.model_dump(exclude_defaults=True), sort_keys=True, ensure_ascii=False) for row in rows
    )
    return f'{{"schema": "{schema}", "{field}": [\n{lines}\n]}}\n'
