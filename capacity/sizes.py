"""Sizes in bytes as people write them: `6GiB`, `512 MiB`, `1.5GB`, `4096`."""

from __future__ import annotations

import re
from typing import Final

from kvtape.capacity.errors import CapacityError

__all__ = ["parse_size", "size_text"]

_UNITS: Final = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes, rounded down. Raises CapacityError that lists the units."""
    match = _SIZE.fullmatch(text.strip())
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise CapacityError(f"{text!r} is no size; write bytes, or a number with KiB, MiB, GiB, TiB, kB, MB, GB or TB")
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


def size_text(n_bytes: int) -> str:
    """Two decimals in the largest binary unit that leaves a number from 1 on."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:.2f} {name}"
    return f"{n_bytes} B"
