"""Sizes in bytes as people write them: `6GiB`, `512 MiB`, `1.5GB`, `4096`."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from kvtape.capacity.errors import CapacityError

__all__ = ["parse_size", "size_text"]

_UNITS: Final = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-z]*)", re.IGNORECASE)
_LARGEST: Final = 2**80


def parse_size(text: str) -> int:
    """Bytes, rounded down. Raises CapacityError that lists the units."""
    match = _SIZE.fullmatch(text.strip())
    unit = None if match is None else _UNITS.get(match[2].lower())
    n_bytes = -1 if match is None or unit is None else int(Fraction(match[1]) * unit)
    if not 0 <= n_bytes < _LARGEST:
        known = "KiB, MiB, GiB, TiB, kB, MB, GB or TB"
        raise CapacityError(f"{text[:40]!r} is no size; write bytes, or a number with {known}")
    return n_bytes


def size_text(n_bytes: int, *, up: bool = False) -> str:
    """Two decimals in the largest binary unit that leaves a number from 1 on; `up`: never less than `n_bytes`."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n_bytes >= unit:
            return f"{-(-n_bytes * 100 // unit) / 100 if up else n_bytes / unit:.2f} {name}"
    return f"{n_bytes} B"
