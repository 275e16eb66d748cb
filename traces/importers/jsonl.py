"""JSON lines decoded into typed rows. The types are stated by each format, never inferred."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from kvtape.traces.importers.source import Source

__all__ = ["decoded", "json_objects", "json_rows", "refuse_repeated_keys"]

Row = TypeVar("Row", bound=msgspec.Struct)

_REMEDIES = {
    "int": "counts and ids are whole numbers: write them without a fraction, a quote or an exponent",
    "decimal": "give the time as a number",
    "array": "give a list, [] where there is nothing",
    "object": "each line is one JSON object",
    "str": "give a text",
}
_AT = re.compile(r" - at `\$\.?(.*)`$")
_EXPECTED = re.compile(r"Expected `(\w+)")


def json_rows(source: Source, row_type: type[Row], *, drop_repeated: bool = False) -> Iterator[Row]:
    """Each line as a row of `row_type`. Raises SourceRejected; `source.line` is the line at hand.

    A key that comes twice in one object is refused: which of the two counts is anybody's guess.
    """
    decoder = msgspec.json.Decoder(row_type)
    names = [f'"{field.encode_name}"'.encode() for field in msgspec.structs.fields(row_type)]
    for line in source.lines(drop_repeated=drop_repeated):
        if b"\\u" in line or any(line.count(name) > 1 for name in names):
            refuse_repeated_keys(source, line)
        yield decoded(source, decoder, line)


def json_objects(source: Source, *, drop_repeated: bool = False) -> Iterator[dict[str, Any]]:
    """Each line as a plain object, for formats whose shape a type cannot tell."""
    for line in source.lines(drop_repeated=drop_repeated):
        value = refuse_repeated_keys(source, line)
        if not isinstance(value, dict):
            raise source.rejected(None, "not a JSON object", _REMEDIES["object"])
        yield value


def decoded(source: Source, decoder: msgspec.json.Decoder[Row], data: bytes) -> Row:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as err:
        raise _rejected(source, str(err)) from None
    except msgspec.DecodeError as err:
        what = str(err).replace("JSON is malformed: ", "not JSON, ")
        if "NaN" in str(data) or "Infinity" in str(data):
            what = "NaN or Infinity, which JSON has no word for"
        raise source.rejected(None, what, "correct the line or leave it out") from None
    except RecursionError:
        raise source.rejected(None, "nested too deeply", "correct the line or leave it out") from None


def _rejected(source: Source, message: str) -> Exception:
    at = _AT.search(message)
    expected = _EXPECTED.search(message)
    missing = re.search(r"missing required field `(\w+)`", message)
    field = at.group(1) if at else None
    what = message[: at.start()] if at else message
    if missing:
        field = f"{field}.{missing.group(1)}" if field else missing.group(1)
        return source.rejected(field, "is missing", "this format needs it; see docs/importing.md, or name another one")
    remedy = _REMEDIES.get(expected.group(1), "see docs/importing.md") if expected else "see docs/importing.md"
    return source.rejected(field, what[0].lower() + what[1:].replace("`", ""), remedy)


def refuse_repeated_keys(source: Source, data: bytes, *, decimals: bool = False) -> Any:
    """The value, decoded. Raises SourceRejected where an object has one key twice, and for NaN and Infinity.

    `decimals`: numbers with a fraction keep every digit, as Decimal.
    """

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(found)
        if len(made) < len(found):
            names = [name for name, _ in found]
            twice = next(n for n in names if names.count(n) > 1)
            raise source.rejected(twice, "the key is there twice", "leave one of them")
        return made

    def constant(word: str) -> Any:
        raise source.rejected(None, f"{word}, which JSON has no word for", "correct the line or leave it out")

    try:
        text = source.text(data)
        kind = Decimal if decimals else None
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=kind)
    except json.JSONDecodeError as err:
        what = f"not JSON, {err.msg} at column {err.colno}"
        raise source.rejected(None, what, "correct the line or leave it out") from None
    except RecursionError:
        raise source.rejected(None, "nested too deeply", "correct the line or leave it out") from None
