"""Half-open ranges of whole numbers as text: `0:40` is 0 to 39."""

from __future__ import annotations

import re

from kvtape.backends.errors import UsageError

__all__ = ["MOST", "parse_range"]

MOST = 100_000
"""Seeds of one range: more are a slip of the hand, and would fill the memory before anything runs."""

_RANGE = re.compile(r"([0-9]{1,9}):([0-9]{1,9})", re.ASCII)


def parse_range(option: str, text: str) -> range:
    """Raises UsageError for other text, for an empty range and for one of more than `MOST` numbers."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise UsageError(f"{option} {text!r}: write A:B, two whole numbers; 0:40 is 0 to 39")
    first, stop = int(match[1]), int(match[2])
    if first >= stop:
        raise UsageError(f"{option} {text}: the range is empty; the second number must be larger")
    if stop - first > MOST:
        raise UsageError(f"{option} {text}: {stop - first:,} numbers; at most {MOST:,} are taken")
    return range(first, stop)
