"""What the runtime takes in silence and must never see: bad token ids, positions, ranges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtape.backends import token_ids
from kvtape.backends.errors import InputRejected
from kvtape.backends.openvino.mirror import Rows
from kvtape.backends.openvino.rope import I64
from kvtape.planner import layout as lay

__all__ = ["check_positions", "check_tape_free", "check_tokens", "shifted"]

_POSITION_LIMIT = 1 << 24
"""Positions become f32 in the graph; from here on neighbours are one number."""


def check_tokens(tokens: Sequence[int], n_vocab: int) -> I64:
    """As `token_ids.check_tokens`, int64 `[n]`: what the graph takes."""
    return token_ids.check_tokens(tokens, n_vocab).astype(np.int64)


def check_positions(start: int, n: int) -> None:
    """Raises InputRejected for cache positions that the graph cannot tell apart or that are negative."""
    if start < 0 or start + n > _POSITION_LIMIT:
        raise InputRejected(f"cache positions [{start}, {start + n}) are outside [0, {_POSITION_LIMIT})")


def check_tape_free(rows: Rows, start: int, n: int) -> None:
    """Raises InputRejected when one of the tape positions is resident already, or negative."""
    if start < 0:
        raise InputRejected(f"tape position {start} is negative")
    resident = rows.tape[(rows.tape >= start) & (rows.tape < start + n)]
    if len(resident):
        raise InputRejected(f"tape position {int(resident.min())} is resident already")


def shifted(rows: Rows, cache_start: int, cache_stop: int, delta: int) -> I64:
    """Cache positions `[n]` after the shift. Raises InputRejected when it moves nothing, or a row onto another."""
    moves = (rows.cache >= cache_start) & (rows.cache < cache_stop)
    if not moves.any() or not delta:
        raise InputRejected(f"shift of [{cache_start}, {cache_stop}) by {delta} moves no row")
    try:
        lay.shift(rows.layout(), cache_start, cache_stop, delta)
    except ValueError as err:
        raise InputRejected(f"shift of [{cache_start}, {cache_stop}) by {delta}: {err}") from None
    cache = rows.cache + np.where(moves, delta, 0)
    check_positions(int(cache.min()), int(cache.max() - cache.min()) + 1)
    return np.asarray(cache, np.int64)
