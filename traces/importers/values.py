"""Numbers of a source as exact integers. Every refusal names file, line, field and remedy.

Nothing is guessed and nothing goes through a float: ids of 2^63 and above keep every digit, and times are decimal
text scaled to nanoseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from kvtape.traces.importers.protocol import U64_MAX
from kvtape.traces.importers.source import Source

__all__ = ["MS", "NS", "SECOND", "US", "block_ids", "check_block_count", "count", "duration_ns", "whole"]

NS = 1
US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000
"""Nanoseconds in a unit."""

_WHOLE = "write it as a whole number in digits"
_LONGEST_NS = 2**63 - 1


def whole(source: Source, field: str, text: str) -> int:
    """A whole number of 0 to 2^64 - 1 from the text of a cell."""
    if not (text.isascii() and text.isdigit()):
        raise source.rejected(field, f"{text[:40]!r} is not a whole number of 0 or more", _WHOLE)
    value = int(text)
    if value > U64_MAX:
        raise source.rejected(field, f"{text} is more than 2^64 - 1", "ids and counts are unsigned 64-bit")
    return value


def count(source: Source, field: str, value: int) -> int:
    """A number that was decoded as an integer, checked for its range."""
    if not 0 <= value <= U64_MAX:
        what = f"{value} is not in 0 to 2^64 - 1"
        raise source.rejected(field, what, "ids and counts are unsigned 64-bit, tokens are counted from 0")
    return value


def duration_ns(source: Source, field: str, value: str | Decimal, unit: int) -> int:
    """A point in time or a duration in units of `unit` nanoseconds, exactly; digits below 1 ns are rounded."""
    try:
        number = Decimal(value)
    except InvalidOperation:
        raise source.rejected(field, f"{value!r} is not a number", "give the time in decimal digits") from None
    if not number.is_finite():
        raise source.rejected(field, f"{value} is no point in time", "leave such rows out, or correct them")
    if number < 0:
        raise source.rejected(field, f"{value} is before 0", "times count from the beginning of the trace")
    # Compared first: the product of a number like 1e999999999 has no room anywhere.
    scaled = int((number * unit).to_integral_value()) if number <= _LONGEST_NS else None
    if scaled is None or scaled > _LONGEST_NS:
        raise source.rejected(field, f"{value} is beyond 292 years in nanoseconds", "look at the unit of the column")
    return scaled


def block_ids(source: Source, field: str, ids: Sequence[int]) -> array[int]:
    """Ids as unsigned 64-bit."""
    try:
        return array("Q", ids)
    except (OverflowError, TypeError):
        at = next(i for i, v in enumerate(ids) if not 0 <= v <= U64_MAX)
        what = f"{ids[at]} is not in 0 to 2^64 - 1"
        raise source.rejected(f"{field}[{at}]", what, "ids are unsigned 64-bit: map larger ones to smaller") from None


def check_block_count(source: Source, field: str, n_ids: int, n_tokens: int, block_tokens: int, rule: str) -> None:
    """Refuse a list of ids that does not fit the length of its prompt under the format's rule."""
    wanted = n_tokens // block_tokens if rule == "floor" else -(-n_tokens // block_tokens)
    if n_ids != wanted:
        what = f"{n_ids} ids for {n_tokens} tokens, {rule}({n_tokens}/{block_tokens}) is {wanted}"
        raise source.rejected(field, what, "the blocks have another size (--block-tokens N), or the row is damaged")
