"""Rows at the public edges: pydantic models and JSON, generated from the field tables.

JSON columns travel as text that holds JSON, unsigned 64-bit ids as JSON integers with every digit.
"""

from __future__ import annotations

import json
import struct
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StrictBool,
    StrictInt,
    StrictStr,
    create_model,
)

from kvtape.planner.fields import Field as Column
from kvtape.planner.fields import Kind
from kvtape.traces.codec import blocks_from_text, blocks_text
from kvtape.traces.schema import ENUMS, EVENTS, ROW_TABLES, TABLES, Table

__all__ = ["WIRE_MODELS", "from_json", "from_wire", "to_json", "to_wire"]

_F32_MAX = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


def _checked_json(text: str) -> str:
    json.loads(text)
    return text


_U64 = Annotated[StrictInt, Field(ge=0, lt=2**64)]
_I64 = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
_F64 = Annotated[FiniteFloat, Field(strict=True)]
_F32 = Annotated[FiniteFloat, Field(strict=True, ge=-_F32_MAX, le=_F32_MAX)]
_I32 = Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)]

_TYPES: dict[Kind, Any] = {
    "u64": _U64,
    "i64": _I64,
    "f64": _F64,
    "bool": StrictBool,
    "text": StrictStr,
    "json": Annotated[StrictStr, AfterValidator(_checked_json)],
    "tokens": tuple[_I32, ...],
    "floats": tuple[_F32, ...],
    **ENUMS,
}


def _model(table: Table) -> type[BaseModel]:
    fields: dict[str, Any] = {f.name: _entry(f) for f in table.fields}
    config = ConfigDict(extra="forbid", frozen=True)
    return create_model(f"{table.row.__name__}Wire", __config__=config, **fields)


def _entry(column: Column) -> tuple[Any, Any]:
    kind = _TYPES[column.kind]
    if column.nullable:
        return kind | None, Field(default=None, description=column.doc)
    return kind, Field(description=column.doc)


WIRE_MODELS: dict[str, type[BaseModel]] = {t.name: _model(t) for t in ROW_TABLES}
"""By table name. Unknown keys are an error; a nullable column may be left out."""


def _table_of(row: Any) -> Table:
    return next(t for t in ROW_TABLES if t.row is type(row))


def to_wire(row: Any) -> BaseModel:
    """The wire model of a row dataclass. Raises pydantic.ValidationError for a value its column cannot hold."""
    table = _table_of(row)
    values = {name: getattr(row, name) for name in table.columns}
    if table is EVENTS and values["blocks"] is not None:
        values["blocks"] = blocks_text(values["blocks"])
    return WIRE_MODELS[table.name](**values)


def from_wire(table: str, model: BaseModel) -> Any:
    """The row dataclass of a wire model of `table`. Raises ValueError when `blocks` is not a list of blocks."""
    values = {name: getattr(model, name) for name in TABLES[table].columns}
    if table == EVENTS.name and values["blocks"] is not None:
        values["blocks"] = blocks_from_text(values["blocks"])
    return TABLES[table].row(**values)


def to_json(row: Any) -> str:
    """One line of JSON, columns in table order, columns without a value left out."""
    return to_wire(row).model_dump_json(exclude_none=True)


def from_json(table: str, text: str | bytes) -> Any:
    """Inverse of `to_json`. Raises pydantic.ValidationError or ValueError."""
    return from_wire(table, WIRE_MODELS[table].model_validate_json(text))
