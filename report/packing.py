"""Long columns of integers as short text: differences, as bytes that hold seven bits each, deflated, in base64.

    value 300 after 298   difference 2   zigzag 4   04
    value 0 after 300     difference -300, zigzag 599   d7 04

`assets/base.js` has the way back.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtape.planner.table import Ints

__all__ = ["pack", "unpack"]

_MOST_BYTES = 9
"""Of a value: 63 bits."""


def pack(columns: Sequence[Ints]) -> str:
    """Columns of one length, one behind the other. Values between -2**52 and 2**52: a script has no larger integers.

    Raises ValueError for larger ones.
    """
    parts = []
    for column in columns:
        if len(column) and int(np.abs(column).max()) >= 2**52:
            raise ValueError(f"{int(np.abs(column).max())} is more than a script can hold")
        parts.append(_bytes(np.diff(column, prepend=0)))
    return base64.b64encode(zlib.compress(b"".join(parts), 6)).decode()


def unpack(text: str, n_columns: int, n_rows: int) -> list[Ints]:
    """The columns of `pack`."""
    raw = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
    ends = np.flatnonzero(raw < 128)
    begins = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    value = np.zeros(len(ends), dtype=np.int64)
    for place in range(_MOST_BYTES):
        rows = np.flatnonzero(begins + place <= ends)
        value[rows] |= (raw[begins[rows] + place].astype(np.int64) & 127) << (7 * place)
    signed = (value >> 1) ^ -(value & 1)
    return [np.cumsum(signed[i * n_rows : (i + 1) * n_rows]) for i in range(n_columns)]


def _bytes(values: Ints) -> bytes:
    zigzag = (values << 1) ^ (values >> 63)
    lengths = np.ones(len(values), dtype=np.int64)
    for place in range(1, _MOST_BYTES):
        lengths += zigzag >> (7 * place) > 0
    ends = np.cumsum(lengths)
    out: npt.NDArray[np.uint8] = np.zeros(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    for place in range(_MOST_BYTES):
        rows = np.flatnonzero(lengths > place)
        more = (lengths[rows] > place + 1).astype(np.int64) << 7
        out[ends[rows] - lengths[rows] + place] = ((zigzag[rows] >> (7 * place)) & 127) | more
    return out.tobytes()
