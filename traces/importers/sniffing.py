"""The beginning of a file, looked at to recognise its format."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["first_line", "first_object"]

_KEY = re.compile(r'"(\w+)"\s*:')


def first_line(head: bytes) -> bytes:
    """The first line that is not blank."""
    for line in head.removeprefix(b"\xef\xbb\xbf").splitlines():
        if line.strip():
            return line.strip()
    return b""


def first_object(head: bytes) -> dict[str, Any]:
    """The JSON object on the first line; empty where there is none.

    A first line longer than what was looked at gives the keys that stand before the cut, as far as they can be told.
    """
    line = first_line(head)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        cut = line[:1] == b"{" and b"\n" not in head.strip()
        return dict.fromkeys(_KEY.findall(line.decode("utf-8", "replace"))) if cut else {}
    return value if isinstance(value, dict) else {}
