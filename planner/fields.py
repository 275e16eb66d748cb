"""The one table of columns that the row dataclasses, the wire models and the DuckDB tables all come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Field", "Kind"]

Kind = Literal["u64", "i64", "f64", "bool", "text", "json", "op", "way", "placement", "tokens", "floats"]
"""`json` is text that holds JSON; `op`, `way` and `placement` are enumerations; `tokens` is a list of i32, `floats`
a list of f32. Numbers that are not finite have no place in a log: what has no value is NULL.
"""


@dataclass(frozen=True, slots=True)
class Field:
    """One column: `nullable` columns are None where the row has nothing to say, never 0 in its place.

    `logical` columns take part in the logical digest; times, engine-dependent sizes and run ids do not. `chained` ones
    are under the hash chain; content is not, its keyed hash is, so that content can be taken out of a log.

    `since`: the schema version that brought the column. Later ones are nullable, and leave no trace in the canonical
    bytes of rows that have no value there: older logs keep their digests.
    """

    name: str
    kind: Kind
    doc: str
    nullable: bool = True
    logical: bool = True
    chained: bool = True
    since: int = 1
