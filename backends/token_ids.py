"""Token ids before the engine sees them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import InputRejected

__all__ = ["check_token", "check_tokens"]


def check_tokens(tokens: Sequence[int], n_vocab: int) -> npt.NDArray[np.int32]:
    """The ids as int32 `[n]`. Raises InputRejected for none, for what is no integer, for one outside the vocabulary."""
    if len(tokens) == 0:
        raise InputRejected("no tokens to compute")
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputRejected(f"token ids must be integers that fit 64 bits, not {ids.dtype} of {ids.ndim} dimensions")
    if any(isinstance(token, bool) for token in tokens):
        raise InputRejected("token ids must be integers, and one is a truth value")
    outside = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if len(outside):
        at = int(outside[0])
        raise InputRejected(f"token {ids[at]} at index {at} is not in the vocabulary of {n_vocab}")
    return ids.astype(np.int32)


def check_token(token: int, n_vocab: int) -> npt.NDArray[np.int32]:
    """One id as int32 `[1]`. Raises InputRejected."""
    return check_tokens([token], n_vocab)
