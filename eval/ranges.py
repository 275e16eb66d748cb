"""Half-open ranges of whole numbers as text: `0:40` is 0 to 39."""

from __future__ import annotations

import re

from kvtape.backends.errors import UsageError

__all__ = ["parse_range"]

_RANGE = re.compile(r"([0-9]{1,9}):([0-9]{1,9})", re.ASCII)


def parse_range(option: str, text: str) -> range:
    """Raises UsageError for other text and for an empty range."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise UsageError(f"{option} {text!r}: write A:B, two whole numbers; 0:40 is 0 to 39")
    first, stop = int(match[1]), int(match[2])
    if first >= stop:
        raise UsageError(f"{option} {text}: the range is empty; the second number must be larger")
    return range(first, stop)
